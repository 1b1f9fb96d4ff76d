"""CPU of the router process beside its peers': ``python -m benchmarks.router [--quick]``.

Workers without engines: of ours a prefill and a decode worker over gRPC (each request is handed
over), of the peers two that speak HTTP, between which they take turns. Streams of 64 tokens at one
per 10 ms, one after the other on each connection, in whose chunks the requests' set-up is included;
long streams, of which all that is measured lies within one answer: chunks alone; then small
requests without streaming, whose tokens come at once. CPU seconds of the router's process (user and
system) per chunk and per request; the time to the first byte beside that of the peers' worker
without a router. Routers take turns. Target: per chunk no more than the better peer, per request
twice that.
``--setup`` first creates the peers' environment; ``--ours`` measures without peers.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from benchmarks.router.checkpoint import make_checkpoint
from benchmarks.router.environment import (
    OURS,
    PEERS,
    check_peers,
    set_up,
    start_ours,
    start_peer,
)
from benchmarks.router.load import Load, request
from benchmarks.servers.program import Program, free_port
from benchmarks.transfer.figures import load, spread_of

STEP_S = 0.010
NUM_TOKENS = 64
NUM_STREAMS = (1, 64, 256)
LONG_TOKENS = 2_000
"""20 s at the workers' pace, behind which no router comes in what is measured."""
NUM_LONG_STREAMS = (64, 256)
NUM_CALLERS = 16
WARM_S, MEASURED_S = 2.0, 8.0
QUICK_S = 3.0
ROUNDS, QUICK_ROUNDS = 3, 1
US = 1e6


@contextmanager
def workers_of(
    name: str, step_s: float, checkpoint: Path, folder: Path, *, num_processes: int = 1
) -> Iterator[Program]:
    """A router with its workers; yields the router. Only ours has several processes."""
    with ExitStack() as stack:

        def started(program: Program) -> Program:
            stack.callback(program.end)
            return program

        def module(which: str, given: Mapping[str, float | str], url: str) -> Program:
            command = [sys.executable, "-m", f"benchmarks.router.{which}", json.dumps(given)]
            return started(Program(command, {}, folder / f"{which}.log", url))

        if name == OURS:
            port = free_port()
            log = folder / "disagg.log"
            router = started(start_ours(checkpoint, port, log, num_processes=num_processes))
            router.wait_ready()
            module("grpc_workers", {"router": f"127.0.0.1:{port}", "step_s": step_s}, "")
        else:
            urls = []
            for _ in range(2):
                port = free_port()
                urls.append(f"http://127.0.0.1:{port}")
                given = {"port": port, "step_s": step_s}
                module("http_worker", given, urls[-1]).wait_ready()
            router = started(start_peer(name, urls, folder / f"{name}.log"))
        # Of several processes each connection reaches any.
        router.wait_until(lambda: all(serves(router.url) for _ in range(8 * num_processes - 7)))
        yield router


def serves(url: str) -> bool:
    """Whether a router answers a request."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=5).status_code == 200


async def measure(
    router: Program, data: bytes, num: int, *, stream: bool, measured_s: float
) -> tuple[float, float, list[float]]:
    """CPU seconds, chunks or answers in that time, seconds to the first byte of each answer."""
    clients = Load(router.url, data, num=num, stream=stream)
    try:
        await clients.start()
        await asyncio.sleep(WARM_S)
        clients.take_ttft_s()
        before = clients.num_chunks if stream else clients.num_answers
        cpu_s = router.cpu_s()
        await asyncio.sleep(measured_s)
        cpu_s = router.cpu_s() - cpu_s
        after = clients.num_chunks if stream else clients.num_answers
        clients.check()
        return cpu_s, after - before, clients.take_ttft_s()
    finally:
        clients.stop()


def round_of(
    name: str, checkpoint: Path, folder: Path, measured_s: float
) -> dict[str, tuple[float, float, float]]:
    """By case: microseconds of CPU per chunk or request, those per second, ms to the first byte.

    0 ms where no answer began in that time.
    """
    found = {}
    with workers_of(name, STEP_S, checkpoint, folder) as router:
        for what, num_tokens, nums in (
            ("streams", NUM_TOKENS, NUM_STREAMS),
            ("long streams", LONG_TOKENS, NUM_LONG_STREAMS),
        ):
            data = request(router.url, num_tokens=num_tokens, stream=True)
            for num in nums:
                taken = asyncio.run(measure(router, data, num, stream=True, measured_s=measured_s))
                found[f"per chunk, {num} {what}"] = in_figures(taken, measured_s)
    with workers_of(name, 0.0, checkpoint, folder) as router:
        data = request(router.url, num_tokens=2, stream=False)
        for num in (1, NUM_CALLERS):
            taken = asyncio.run(measure(router, data, num, stream=False, measured_s=measured_s))
            found[f"per request, {num} at once"] = in_figures(taken, measured_s)
    return found


def in_figures(
    taken: tuple[float, float, list[float]], measured_s: float
) -> tuple[float, float, float]:
    """See `round_of`."""
    cpu_s, num, ttft_s = taken
    return cpu_s * US / max(1, num), num / measured_s, 1e3 * statistics.median(ttft_s or [0.0])


def lines(rounds: dict[str, list[dict[str, tuple[float, float, float]]]]) -> Iterator[object]:
    """A JSON object per case and peer."""
    for case in rounds[OURS][0]:
        ours = [one[case][0] for one in rounds[OURS]]
        target = 1.0 if "chunk" in case else 0.5
        peers: list[str | None] = [name for name in rounds if name != OURS]
        for peer in peers or [None]:
            theirs = [one[case][0] for one in rounds[peer]] if peer else None
            ratio = statistics.median(theirs) / statistics.median(ours) if theirs else None
            rates = {
                name: round(statistics.median(one[case][1] for one in rounds[name]))
                for name in (OURS, *([peer] if peer else []))
            }
            firsts = {
                name: round(statistics.median(one[case][2] for one in rounds[name]), 2)
                for name in rates
            }
            shown = f", ms to the first byte {firsts}" if any(firsts.values()) else ""
            yield {
                "name": f"router/{case}",
                "ours": round(statistics.median(ours), 1),
                "peer": round(statistics.median(theirs), 1) if theirs else None,
                "unit": "us of CPU",
                "ratio": round(ratio, 3) if ratio else None,
                "target": target,
                "ok": ratio >= target if ratio else None,
                "peer_name": peer,
                "note": f"ours {spread_of(ours)}, per second {rates}{shown}; "
                f"{len(ours)} rounds, {load()}",
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, shorter")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ours", action="store_true", help="no peers")
    parser.add_argument("--setup", action="store_true", help="create the peers' environment first")
    options = parser.parse_args()
    if options.setup:
        set_up()
    names = [OURS] if options.ours else [OURS, *(peer.partition("==")[0] for peer in PEERS)]
    check_peers(names)
    taken: dict[str, list[dict[str, tuple[float, float, float]]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = make_checkpoint(Path(temporary) / "model")
        for number in range(QUICK_ROUNDS if options.quick else options.rounds):
            for name in names:
                folder = Path(temporary) / f"{name}-{number}"
                folder.mkdir()
                measured_s = QUICK_S if options.quick else MEASURED_S
                taken[name].append(round_of(name, checkpoint, folder, measured_s))
                print(f"round {number + 1}: {name} {taken[name][-1]}", file=sys.stderr)
    reached = True
    for one in lines(taken):
        print(json.dumps(one), flush=True)
        reached &= one["ok"] is not False  # type: ignore[index]
    if not reached:
        raise SystemExit(1)
