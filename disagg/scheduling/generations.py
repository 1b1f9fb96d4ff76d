"""The register of the generations that this worker has a part in."""

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.sequence import KVSequence
from disagg.messages.identity import RequestKey
from disagg.messages.outputs import SequenceOutput
from disagg.messages.sampling import SampledToken
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import Submit
from disagg.scheduling.actions import Actions, ToRouter
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.limits import Counters, WorkerLimits
from disagg.scheduling.sequence import HOLDING, Sequence


class Generations:
    """Sequences by key; each is in exactly one place: queue, batch, or one side of a transfer.

    Attributes:
        sequences: all of them.
    """

    def __init__(
        self,
        kv: KVCacheCoordinator,
        hasher: BlockHasher,
        limits: WorkerLimits,
        batcher: Batcher,
        counters: Counters,
        out: Actions,
    ) -> None:
        self._kv = kv
        self._hasher = hasher
        self._limits = limits
        self._batcher = batcher
        self._counters = counters
        self._out = out
        self.sequences: dict[RequestKey, Sequence] = {}
        self._num_arrivals = 0

    @property
    def num_holding(self) -> int:
        """Sequences that hold blocks, wherever they are: at most ``max_sequences``."""
        return sum(seq.phase in HOLDING for seq in self.sequences.values())

    def add(self, now_ms: int, submit: Submit) -> Sequence:
        """Register a generation that the router submitted."""
        request = KVSequence(submit.key, list(submit.token_ids), list(submit.hashes))
        self._hasher.extend(request.hashes, request.token_ids, submit.cache_salt)
        seq = Sequence(
            submit,
            request,
            self._num_arrivals,
            self._limits.max_model_tokens,
            arrived_ms=now_ms,
            progress_shown_ms=now_ms,
        )
        self._num_arrivals += 1
        self.sequences[seq.key] = seq
        return seq

    def emit(self, seq: Sequence, *tokens: SampledToken) -> SequenceOutput:
        """Append sampled tokens; the output names the reason if one of them ends the request."""
        return seq.emit(tokens, self._hasher)

    def forget(self, seq: Sequence) -> None:
        """Take a sequence out of queue, batch and register, and free its blocks."""
        self._batcher.remove(seq)
        self._kv.free(seq.key)
        self.sequences.pop(seq.key, None)

    def end(self, seq: Sequence, reason: EndReason, message: str, num_kept_tokens: int = 0) -> None:
        """Forget a sequence that is not finished, and report its end to the router."""
        self.forget(seq)
        self._counters.add("parts_ended_" + reason)
        self._out.add(ToRouter(PartEnded(seq.key, reason, message, num_kept_tokens)))
