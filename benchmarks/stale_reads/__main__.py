"""Wrong answers, counted: KV that is read after its owner has given the blocks away.

``python -m benchmarks.stale_reads --setup``, once, then ``python -m benchmarks.stale_reads``.

Both systems serve the same small model, whose answers lie far back in the prompt, as one prefill
and one decode worker over NIXL. Between a prefill and the READ of its KV comes a fault that lasts
longer than the owner's lease, and other users' prompts, so that the owner uses the blocks again.
Every answer is compared with the only right one: right, wrong with status 200, or an error.
A JSON line per fault; the exit code is 1 if an answer of ours was wrong, or a control was not
as it must be: without a fault all are right, with our commit taken out some are wrong.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers.environment import PYTHON, set_up, vllm_release
from benchmarks.stale_reads.checkpoint import DIRECTORY, make_checkpoint
from benchmarks.stale_reads.ours import STRICT, STRICT_ROUTER, Ours
from benchmarks.stale_reads.peer import OWNER_BLOCKS, READER_BLOCKS, Pair, plan
from benchmarks.stale_reads.questions import Prompts, Row, Tally
from tests.process.harness import HERE
from tests.process.network import Network, UnavailableError, network

SHORT_S = 6
"""The peer's short lease; ours is `STRICT`'s. Waiting for the default one takes longer."""
NO_FAULT = "no fault"
LATE = "KV read after the lease's end, default settings"
LATE_SHORT = "KV read after the lease's end, short lease"
HELD = "READs held back for longer than the lease, default settings"
STOPPED = "reader stopped between admission and READ, default settings"
STOPPED_SHORT = "reader stopped between admission and READ, short lease"
CUT = "link cut for longer than the lease"
RESTARTED_FIXED = "owner restarted under a fixed identity"
RESTARTED = "owner restarted, default settings"
AGAIN = "the same prompts asked again, without a fault"
FAULTS = "all of ours with a fault"
NO_COMMIT = "control: our commit taken out"
NO_PEER = "\nor leave the peer out: --ours"
NO_COMMIT_AGAIN = "control: our commit taken out, the same prompts asked again"
STRICT_NOTE = ", ".join(f"{key} {value}" for key, value in (STRICT | STRICT_ROUTER).items())


@dataclass(frozen=True, slots=True)
class Size:
    """Requests of one row."""

    ours: int
    quick: int
    peer: int = 0
    peer_quick: int = 0
    note: str = ""


ROWS: dict[str, Size] = {
    NO_FAULT: Size(24, 12, 16, 8, "default settings"),
    LATE: Size(
        600,
        24,
        16,
        0,
        "ours: READs wait while the owner ends its leases and what it says of it is lost; "
        "peer (30 s): the decode engine is asked 31 s after the prefill",
    ),
    LATE_SHORT: Size(240, 12, 16, 8, f"as above; ours: {STRICT_NOTE}; peer: {SHORT_S} s"),
    HELD: Size(12, 0, note="ours alone: READs wait 65 s, the lease has 60 s"),
    STOPPED: Size(36, 0, 8, 0, "SIGSTOP until the leases are over"),
    STOPPED_SHORT: Size(72, 12, 16, 8, f"as above; ours: {STRICT_NOTE}; peer: {SHORT_S} s"),
    CUT: Size(60, 12, 8, 8, f"ours: {STRICT_NOTE}; peer: {SHORT_S} s"),
    RESTARTED_FIXED: Size(
        24,
        12,
        8,
        0,
        "ours: the worker's name and address; peer: engine_id set by hand, and a decode engine "
        "that has not met the owner's earlier life",
    ),
    RESTARTED: Size(12, 0, 8, 0, "the peer takes a new engine_id"),
    NO_COMMIT: Size(48, 12, note="ours alone; must be wrong, else the rest shows nothing"),
}


class Count:
    """What came of each row on one side."""

    def __init__(self, side: str) -> None:
        self._side = side
        self.rows: dict[str, Tally] = {}

    def add(self, name: str, row: Row) -> None:
        """Take in a row, and show it."""
        self.rows[name] = row.faulty
        self.rows.setdefault(NO_COMMIT_AGAIN if name == NO_COMMIT else AGAIN, Tally()).add(
            row.again
        )
        if name not in (NO_FAULT, NO_COMMIT):
            self.rows.setdefault(FAULTS, Tally()).add(row.faulty)
        say(f"{self._side}, {name}: {row.faulty.counts()}")


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def measure_ours(count: Count, num: Callable[[str], int], link: Network | None) -> None:
    """All our rows, in two clusters."""
    prompts = Prompts(DIRECTORY)
    say("ours, default settings")
    with Ours(DIRECTORY, _logs("ours"), prompts, strict=False) as ours:
        count.add(NO_FAULT, ours.undisturbed(NO_FAULT, num(NO_FAULT)))
        for name, fault in (
            (LATE, ours.lease_ends_unheard),
            (STOPPED, ours.reader_stops),
            (RESTARTED, ours.owner_restarts),
            (HELD, ours.lease_lapses),
        ):
            if num(name):
                count.add(name, ours.disturbed(name, num(name), fault))
        count.rows[NO_FAULT].add(ours.between)
    say("ours, short lease and a patient reader")
    with Ours(DIRECTORY, _logs("ours-strict"), prompts, strict=True, network=link) as ours:
        for name, fault in (
            (LATE_SHORT, ours.lease_ends_unheard),
            (STOPPED_SHORT, ours.reader_stops),
            (CUT, ours.link_is_cut),
            (RESTARTED_FIXED, ours.owner_restarts),
        ):
            if num(name) and not (name == CUT and link is None):
                count.add(name, ours.disturbed(name, num(name), fault))
        count.rows[NO_FAULT].add(ours.between)
        ours.take_out_the_commit()
        count.add(NO_COMMIT, ours.disturbed(NO_COMMIT, num(NO_COMMIT), ours.lease_ends_unheard))


def measure_peer(
    count: Count, num: Callable[[str], int], link: Network | None, python: Path
) -> None:
    """The peer's rows, in two pairs of engines: a short lease, and the default one."""
    prompts = Prompts(DIRECTORY)
    if num(LATE):
        say("peer, default settings")
        owner = plan("owner", DIRECTORY, OWNER_BLOCKS)
        reader = plan("reader", DIRECTORY, READER_BLOCKS)
        with Pair(owner, reader, python, _logs("peer"), prompts) as pair:
            count.add(NO_FAULT, pair.undisturbed(NO_FAULT, num(NO_FAULT)))
            for name, fault in ((LATE, pair.lease_lapses), (STOPPED, pair.reader_stops)):
                count.add(name, pair.disturbed(name, num(name), fault))
            count.rows[NO_FAULT].add(pair.between)
            count.add(RESTARTED, pair.restarted(RESTARTED, num(RESTARTED), reader_too=False))
    say(f"peer, lease of {SHORT_S} s")
    places = [HERE, HERE] if link is None else link.places
    owner = plan("owner", DIRECTORY, OWNER_BLOCKS, SHORT_S, "owner-of-this-address", places[0])
    reader = plan("reader", DIRECTORY, READER_BLOCKS, SHORT_S, place=places[1])
    with Pair(owner, reader, python, _logs("peer-short"), prompts, link) as pair:
        if not num(LATE):
            count.add(NO_FAULT, pair.undisturbed(NO_FAULT, num(NO_FAULT)))
        for name, fault in (
            (LATE_SHORT, pair.lease_lapses),
            (STOPPED_SHORT, pair.reader_stops),
            (CUT, pair.link_is_cut),
        ):
            if num(name) and not (name == CUT and link is None):
                count.add(name, pair.disturbed(name, num(name), fault))
        count.rows[NO_FAULT].add(pair.between)
        if num(RESTARTED_FIXED):
            restarted = pair.restarted(RESTARTED_FIXED, num(RESTARTED_FIXED), reader_too=True)
            count.add(RESTARTED_FIXED, restarted)


def report(ours: Count, peer: Count, peer_name: str | None) -> bool:
    """Print a line per row; whether everything was as it must be."""
    reached = True
    for name in (*ROWS, AGAIN, NO_COMMIT_AGAIN, FAULTS):
        mine, theirs = ours.rows.get(name), peer.rows.get(name)
        if name == FAULTS:
            theirs = None  # of other rows in other numbers
        if mine is None and theirs is None:
            continue
        ok = is_as_it_must_be(name, mine, theirs)
        reached &= ok
        note = f"{ROWS[name].note}; " if name in ROWS else ""
        line = {
            "name": name,
            "ours": mine and mine.wrong,
            "peer": theirs and theirs.wrong,
            "unit": "wrong answers with status 200",
            "ratio": None,
            "target": None if name in (NO_COMMIT, NO_COMMIT_AGAIN) else 0,
            "ok": ok,
            "peer_name": peer_name,
            "counts": {"ours": mine and mine.counts(), "peer": theirs and theirs.counts()},
            "note": f"{note}load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs",
        }
        print(json.dumps(line), flush=True)
    return reached


def is_as_it_must_be(name: str, ours: Tally | None, peer: Tally | None) -> bool:
    """Ours never wrong, but for the control; without a fault the peer is right as well."""
    if ours is not None:
        if name in (NO_COMMIT, NO_COMMIT_AGAIN):
            return ours.wrong > 0
        if ours.wrong or not ours.right:
            return False
    return peer is None or name != NO_FAULT or peer.right == peer.rounds


@contextlib.contextmanager
def _link() -> Iterator[Network | None]:
    """A link that can be cut, or None where that cannot be had, with the reason."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(network())
        except UnavailableError as error:
            say(f"left out: {CUT}: {error}")
            yield None
            return
        yield made


def _logs(name: str) -> Path:
    """A new folder; those of earlier runs stay."""
    logs = DIRECTORY.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=logs))


def main() -> int:
    """Measure both sides; 1 if something was not as it must be."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.stale_reads",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--setup", action="store_true", help="make install-vllm, and end")
    parser.add_argument("--quick", action="store_true", help="few rounds, short leases only")
    parser.add_argument("--ours", action="store_true", help="without the peer")
    parser.add_argument("--peer", action="store_true", help="the peer alone")
    parser.add_argument(
        "--python", type=Path, default=PYTHON, help="an interpreter with vLLM and NIXL"
    )
    chosen = parser.parse_args()
    if chosen.setup:
        set_up()
        return 0
    peer_name = None
    if not chosen.ours:
        release = vllm_release(chosen.python, "benchmarks.stale_reads", NO_PEER)
        peer_name = f"vLLM {release}, NixlConnector, 1P1D"
    make_checkpoint()
    ours, peer = Count("ours"), Count("peer")
    try:
        with _link() as link:
            if not chosen.peer:
                measure_ours(
                    ours, lambda name: ROWS[name].quick if chosen.quick else ROWS[name].ours, link
                )
            if not chosen.ours:
                measure_peer(
                    peer,
                    lambda name: ROWS[name].peer_quick if chosen.quick else ROWS[name].peer,
                    link,
                    chosen.python,
                )
    finally:
        reached = report(ours, peer, peer_name)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
