"""Being the one supervisor in charge of a Ray cluster; claims are kept by Ray's head.

Its key-value store writes a key that does not exist for one of those who try alone.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import ray

from disagg.cluster import head_store
from disagg.cluster.claims import Claim, Standby
from disagg.errors import ChargeLostError, ExpiredError

_PREFIX = "supervisor/"
_POLL_S = 1.0
_RENEW_S = 1.0
_GIVE_BACK_S = 3.0
"""The head may have gone, and then does not answer for a minute."""

log = logging.getLogger(__name__)


class Charge:
    """This process among the supervisors of the cluster it is connected to. Not thread-safe."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._holder = secrets.token_hex(8)
        self._claim: Claim | None = None
        self._confirmed_s = 0.0

    def take(self, see: Callable[[], None], timeout_s: float | None = None) -> None:
        """Return when this process is in charge; until then another one is.

        Args:
            see: called whenever Ray's head has answered.
            timeout_s: how long to wait for it; None: as long as the other one is in charge.

        Raises:
            ExpiredError: Ray's head does not answer, or the other one is in charge for that long.
        """
        standby, said = Standby(), ""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            claim = _read_highest()
            see()
            has_ended = claim is not None and _has_ended(claim.job_id)
            if standby.may_claim(claim, time.monotonic(), has_ended=has_ended):
                if self._try(claim):
                    return
                continue  # somebody else was faster
            assert claim is not None
            if until_s is not None and time.monotonic() > until_s:
                raise ExpiredError(
                    f"a supervisor is in charge of this Ray cluster ({claim.place}): stop it first"
                )
            if claim.holder != said:
                said = claim.holder
                self._report(
                    f"another supervisor is in charge ({claim.place}); this one stands by, and"
                    " takes over when that one ends"
                )
            time.sleep(_POLL_S)

    def confirm(self) -> None:
        """Return if this process is still in charge; to be called before anything is changed.

        Renews its claim once a second. A process that stood still asks before it goes on.

        Raises:
            ChargeLostError: another one has taken over, or the cluster has forgotten everything.
            ExpiredError: Ray's head does not answer.
        """
        now_s = time.monotonic()
        if now_s - self._confirmed_s < _RENEW_S:
            return
        highest = _read_highest()
        if self._claim is None or highest is None or highest.holder != self._holder:
            self._claim = None
            who = highest.place if highest is not None else "Ray's head has lost its state"
            raise ChargeLostError(f"this supervisor is not in charge any more ({who})")
        self._claim = self._claim.renewed()
        _write(self._claim, overwrite=True)
        self._confirmed_s = now_s

    def give_back(self) -> None:
        """Let whoever waits take over at once; nothing if this process is not in charge."""
        claim, self._claim = self._claim, None
        if claim is not None:
            # A call of Ray's cannot be bounded; what remains of it ends with the process.
            giving = threading.Thread(target=_give_back, args=(claim,), daemon=True)
            giving.start()
            giving.join(_GIVE_BACK_S)

    def _try(self, before: Claim | None) -> bool:
        """Claim the number after another one; False when somebody else has."""
        generation = before.generation + 1 if before is not None else 1
        place = f"{socket.gethostname()}, pid {os.getpid()}"
        # Another one each time: what a process claimed before it lost its charge is not its own.
        self._holder = secrets.token_hex(8)
        job_id = ray.get_runtime_context().get_job_id()
        claim = Claim(generation, self._holder, place, job_id)
        now_s = time.monotonic()
        _write(claim, overwrite=False)
        # Read, as the answer to a write that was sent twice says nothing.
        highest = _read_highest()
        if highest is None or highest.holder != self._holder:
            return False
        self._claim, self._confirmed_s = claim, now_s
        _forget_before(generation)
        if generation > 1:
            self._report(f"in charge as supervisor {generation} of this cluster")
        return True


def is_supervised() -> bool:
    """Whether a supervisor is in charge that has not ended; one that stands still is one.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    claim = _read_highest()
    return claim is not None and not (claim.is_given_back or _has_ended(claim.job_id))


def _key(generation: int) -> str:
    return f"{_PREFIX}{generation:012d}"


def _read_highest() -> Claim | None:
    keys = head_store.keys(_PREFIX)
    if not keys:
        return None
    highest = max(keys)
    return Claim.from_bytes(int(highest.removeprefix(_PREFIX)), head_store.get(highest))


def _write(claim: Claim, *, overwrite: bool) -> None:
    head_store.put(_key(claim.generation), claim.to_bytes(), overwrite=overwrite)


def _forget_before(generation: int) -> None:
    """Remove the claims that were followed by others."""
    for key in head_store.keys(_PREFIX):
        if key < _key(generation):
            head_store.delete(key)


def _give_back(claim: Claim) -> None:
    try:
        if _read_highest_is(claim):
            _write(claim.given_back(), overwrite=True)
    except ExpiredError as error:
        log.debug("not given back: %s", error.message)


def _read_highest_is(claim: Claim) -> bool:
    highest = _read_highest()
    return highest is not None and highest.holder == claim.holder


def _has_ended(job_id: str) -> bool:
    """Whether Ray knows a process, and that it has ended.

    Ray's own libraries ask so; there is no public way that needs no dashboard.
    """
    with head_store.head_answers():
        jobs = ray._private.state.state.job_table()  # type: ignore[no-untyped-call]
    return any(job["JobID"] == job_id and job["IsDead"] for job in jobs)
