"""Workers that drain, with one rule taken away each."""

from disagg.kv.transfer_plan import first_blocks, moved_blocks
from disagg.messages.session import EndReason
from disagg.scheduling.draining import DrainEvent, Draining
from disagg.scheduling.handover.moving import TIME_OVER, Moving


class MovesAmidSteps(Moving):
    """What decodes is kept at once, by its tokens, though a step still computes one of them."""

    def move_all(self, now_ms: int) -> None:
        for seq in list(self._generations.sequences.values()):
            if not self._can_move(seq):
                self._parts.end(seq, EndReason.DRAINING, TIME_OVER)
                continue
            num_tokens, managers = len(seq.request.token_ids) - 1, self._kv.managers
            first = first_blocks(managers, (0,) * len(managers), num_tokens)
            blocks = moved_blocks(managers, seq.key, num_tokens, first)
            last = seq.request.token_ids[-1]
            self._leases.keep(now_ms, seq.key, self._prefill_side, first, blocks, num_tokens, last)
            self._generations.end(seq, EndReason.DRAINING, TIME_OVER, num_tokens)


class MovesOnce(Draining):
    """What could not be moved at once, as a step was in flight, is not looked at again."""

    def due(self, now_ms: int, *, ready: bool, idle: bool) -> DrainEvent:
        if self.gave_up and not idle:
            return DrainEvent.NOTHING
        return super().due(now_ms, ready=ready, idle=idle)
