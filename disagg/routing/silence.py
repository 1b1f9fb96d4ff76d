"""Which workers are taken for lost because they say nothing."""

from collections.abc import Callable, Collection, Container

from disagg.messages.identity import Incarnation
from disagg.routing.pulse import GAPS_MAX, OBSERVED_MS, Pulse, RouterTime
from disagg.routing.worker import Worker

DROPPED_MAX = 1024


class Silence:
    """Judges silence by each worker's own rhythm, in the time in which the router itself ran.

    Args:
        silent_ms: a worker that sends nothing for so long is lost.
        busy_ms: so is one from which a request awaits something, or after `GAPS_MAX` times its
            longest silence, or time between two ticks, of the last minutes. Others must have been
            heard meanwhile: where nobody is, the router may be the one that is cut off.
    """

    def __init__(self, silent_ms: int, busy_ms: int) -> None:
        self._silent_ms, self._busy_ms = silent_ms, busy_ms
        self._time = RouterTime()
        self._dropped: dict[Incarnation, Pulse] = {}
        """Whoever of them comes back within `silent_ms` was taken for lost too early."""

    def pulse(self, now_ms: int, incarnation: Incarnation) -> Pulse:
        """Of a worker that comes; of one that comes back soon the silence is one of its rhythm."""
        ran_ms = self._time.at(now_ms)
        pulse = self._dropped.pop(incarnation, None)
        if pulse is None or pulse.silent_ms(ran_ms) > self._silent_ms:
            return Pulse(ran_ms)
        pulse.heard(ran_ms, loaded=True)
        return pulse

    def heard(self, now_ms: int, worker: Worker) -> None:
        """A registration or message of it arrived."""
        worker.pulse.heard(self._time.at(now_ms), loaded=worker.is_loaded)
        worker.heard_ms = now_ms

    def planned(self, worker: Worker) -> None:
        """It is given work, and is to say something from now on."""
        if not worker.is_loaded:
            worker.pulse.awaited_ms = self._time.ran_ms

    def lost(
        self,
        now_ms: int,
        workers: Collection[Worker],
        awaited: Callable[[], Container[Incarnation]],
    ) -> list[Incarnation]:
        """Those that are lost at a tick.

        Args:
            now_ms: of the tick.
            workers: all there are.
            awaited: who has to do something for a request.
        """
        ran_ms = self._time.tick(now_ms)
        quiet = [one for one in workers if self._is_quiet(ran_ms, one)]
        of_requests = awaited() if quiet else ()
        lost = [
            one.info.incarnation
            for one in quiet
            if ran_ms - one.pulse.heard_ms > self._silent_ms
            or (one.info.incarnation in of_requests and self._were_others_heard(one, workers))
        ]
        for worker in quiet:
            if worker.info.incarnation in lost:
                self._dropped[worker.info.incarnation] = worker.pulse
        while len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]
        return lost

    def _is_quiet(self, ran_ms: int, worker: Worker) -> bool:
        pulse = worker.pulse
        if ran_ms - pulse.heard_ms > self._silent_ms:
            return True
        if not worker.connected or pulse.loaded_ms < OBSERVED_MS:
            return False
        usual_ms = max(pulse.longest.ms, self._time.longest_tick.ms)
        return pulse.silent_ms(ran_ms) > max(self._busy_ms, GAPS_MAX * usual_ms)

    def _were_others_heard(self, worker: Worker, workers: Collection[Worker]) -> bool:
        """Whether another one, which could go on with its requests, was heard well after it."""
        since_ms = worker.pulse.heard_ms + self._busy_ms // 2
        return any(
            other.ready and other.pulse.heard_ms >= since_ms
            for other in workers
            if other.info.revision == worker.info.revision
        )
