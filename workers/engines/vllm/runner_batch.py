"""Our steps as vLLM's scheduler would describe them, and what the runner holds because of them.

vLLM's runner keeps a state per request: its tokens, its block tables, its row in the batch. It gets
a request whole when it starts and after that only what is new. A table there only grows: entries
that left the window stay, unread.
"""

from collections.abc import Iterable, Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from disagg.messages.identity import RequestKey
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import SequenceSlice, Step

NONE_DISCARDED = 1 << 30
"""The runner drops drawn tokens of its own where it is told of fewer; here none is ever dropped."""


class RunnerBatch:
    """Which sequences the runner holds, by name, and how far it knows their tables."""

    def __init__(self, block_tokens: Sequence[int]) -> None:
        self._block_tokens = tuple(block_tokens)
        self._num_sent: dict[str, tuple[int, ...]] = {}
        self._ended: set[str] = set()
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

    def end(self, keys: Iterable[RequestKey]) -> None:
        """Forget sequences; the next order tells the runner, whichever step that is."""
        names = {name_of(key) for key in keys} & self._num_sent.keys()
        self._ended |= names
        for name in names:
            del self._num_sent[name]

    def describe(self, step: Step, tables: BlockTables) -> SchedulerOutput:
        """The runner's order for a step whose table changes have been made."""
        finished, self._ended = self._ended, set()
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        for part in step.slices:
            name = name_of(part.key)
            needed = self._num_needed(part)
            table = tables[part.key]
            if part.is_new:
                if name in self._num_sent:
                    finished.add(name)  # one that was preempted begins anew
                new.append(
                    self._new(
                        name, part, [t[:n].tolist() for t, n in zip(table, needed, strict=True)]
                    )
                )
                self._num_sent[name] = needed
                continue
            sent = self._num_sent[name]
            needed = tuple(map(max, needed, sent))
            fresh = tuple(t[s:n].tolist() for t, s, n in zip(table, sent, needed, strict=True))
            cached.req_ids.append(name)
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
    def names_of(step: Step) -> dict[str, SequenceSlice]:
        """The step's slices by the runner's names, in their order."""
        return {name_of(part.key): part for part in step.slices}

    def _num_needed(self, part: SequenceSlice) -> tuple[int, ...]:
        end = part.start + len(part.token_ids)
        return tuple(-(-end // tokens) for tokens in self._block_tokens)

    def _new(
        self, name: str, part: SequenceSlice, table: Sequence[Sequence[int]]
    ) -> NewRequestData:
        tokens = list(part.known_token_ids)
        return NewRequestData(
            req_id=name,
            prompt_token_ids=tokens,
            prefill_token_ids=tokens,
            mm_features=[],
            sampling_params=self._sampling,
            pooling_params=None,
            block_ids=tuple(list(ids) for ids in table),
            num_computed_tokens=part.start,
            lora_request=None,
        )


def name_of(key: RequestKey) -> str:
    """The runner's name of a sequence."""
    return f"{key.request_id}/{key.generation}"
