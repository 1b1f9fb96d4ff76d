"""Our steps as vLLM's scheduler would describe them, and what the runner holds because of them.

vLLM's runner keeps a state per request: its tokens, its block tables, its row in the batch. It gets
a request whole when it starts and after that only what is new. A table there only grows: entries
that left the window stay, unread. Of a linear state the runner knows one block, the one that the
step ends in; when that is another one than before, the request is told as if it resumed, which
replaces its tables.

A step is described while the runner computes the one before it. If that one fails, its sequences
are taken out of the description; the runner knows them until they end or begin anew.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import RequestKey
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import SequenceSlice, Step

NONE_DISCARDED = 1 << 30
"""The runner drops drawn tokens of its own where it is told of fewer; here none is ever dropped."""


class RunnerBatch:
    """Which sequences the runner holds, by name, and how far it knows their tables."""

    def __init__(self, layout: KVCacheLayout) -> None:
        self._block_tokens = [group.spec.block_tokens for group in layout.groups]
        self._is_state = [keeps_states(group.spec) for group in layout.groups]
        self._num_sent: dict[str, tuple[int, ...]] = {}
        """Entries of our tables that the runner knows; of a state, those up to the one it knows."""
        # Tokens are drawn by our sampler; the runner's own parameters only must not stand out.
        self._sampling = SamplingParams(temperature=0.0, max_tokens=1 << 30)

    def __len__(self) -> int:
        return len(self._num_sent)

    def __contains__(self, key: RequestKey) -> bool:
        """Whether the sequence was sent and has not ended."""
        return name_of(key) in self._num_sent

    @property
    def names(self) -> frozenset[str]:
        """Of the sequences that were sent and have not ended."""
        return frozenset(self._num_sent)

    def forget(self, ended: Iterable[RequestKey]) -> None:
        """These are not told of again, but for their end."""
        for key in ended:
            self._num_sent.pop(name_of(key), None)

    def describe(self, step: Step, tables: BlockTables) -> SchedulerOutput:
        """The runner's order for a step whose table changes have been made; see `complete`."""
        finished: set[str] = set()
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        for part in step.slices:
            name = name_of(part.key)
            needed = self._num_needed(part)
            table = tables[part.key]
            if part.is_new:
                if name in self._num_sent:
                    finished.add(name)  # one that was preempted begins anew
                new.append(self._new(name, part, self._columns(table, needed)))
                self._num_sent[name] = needed
                continue
            sent = self._num_sent[name]
            needed = tuple(map(max, needed, sent))
            fresh = tuple(t[s:n].tolist() for t, s, n in zip(table, sent, needed, strict=True))
            cached.req_ids.append(name)
            if any(map(self._moved, self._is_state, sent, needed)):
                cached.resumed_req_ids.add(name)
                cached.new_block_ids.append(self._columns(table, needed))
            else:
                cached.new_block_ids.append(fresh if any(fresh) else None)
            cached.num_computed_tokens.append(part.start)
            cached.num_output_tokens.append(NONE_DISCARDED)
            self._num_sent[name] = needed
        scheduled = {name_of(part.key): len(part.token_ids) for part in step.slices}
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )

    @staticmethod
    def complete(
        order: SchedulerOutput, names: Mapping[str, SequenceSlice], ended: Iterable[RequestKey]
    ) -> None:
        """Make an order what the runner gets, when the steps before it have ended.

        Args:
            order: as it was described.
            names: which of its sequences are computed; the others were lost since.
            ended: sequences that the runner forgets.
        """
        order.finished_req_ids |= {name_of(key) for key in ended}
        # A new sequence is never lost: it had nothing in the steps before.
        if len(names) == len(order.num_scheduled_tokens):
            return
        cached = order.scheduled_cached_reqs
        left = [n for n, name in enumerate(cached.req_ids) if name in names]
        cached.req_ids = [cached.req_ids[n] for n in left]
        cached.resumed_req_ids &= names.keys()
        cached.new_block_ids = [cached.new_block_ids[n] for n in left]
        cached.num_computed_tokens = [cached.num_computed_tokens[n] for n in left]
        cached.num_output_tokens = [cached.num_output_tokens[n] for n in left]
        scheduled = order.num_scheduled_tokens
        order.num_scheduled_tokens = {name: scheduled[name] for name in names}
        order.total_num_scheduled_tokens = sum(order.num_scheduled_tokens.values())

    @staticmethod
    def names_of(step: Step) -> dict[str, SequenceSlice]:
        """The step's slices by the runner's names, in their order."""
        return {name_of(part.key): part for part in step.slices}

    def _num_needed(self, part: SequenceSlice) -> tuple[int, ...]:
        end = part.start + len(part.token_ids)
        return tuple(-(-end // tokens) for tokens in self._block_tokens)

    @staticmethod
    def _moved(is_state: bool, num_sent: int, num_needed: int) -> bool:
        return is_state and num_sent != num_needed

    def _columns(
        self, table: "Sequence[array[int]]", needed: Sequence[int]
    ) -> tuple[list[int], ...]:
        """The runner's whole tables: of tokens all entries, of a state the last one."""
        return tuple(
            ids[num - 1 : num].tolist() if is_state else ids[:num].tolist()
            for ids, num, is_state in zip(table, needed, self._is_state, strict=True)
        )

    def _new(self, name: str, part: SequenceSlice, table: tuple[list[int], ...]) -> NewRequestData:
        tokens = list(part.known_token_ids)
        return NewRequestData(
            req_id=name,
            prompt_token_ids=tokens,
            prefill_token_ids=tokens,
            mm_features=[],
            sampling_params=self._sampling,
            pooling_params=None,
            block_ids=table,
            num_computed_tokens=part.start,
            lora_request=None,
        )


def name_of(key: RequestKey) -> str:
    """The runner's name of a sequence."""
    return f"{key.router}/{key.request_id}/{key.generation}"


def key_of(name: str) -> RequestKey:
    """The sequence that the runner knows by a name."""
    router, _, name = name.partition("/")  # a request's id may have some of its own
    request_id, _, generation = name.rpartition("/")
    return RequestKey(request_id, int(generation), router)
