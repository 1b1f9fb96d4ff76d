"""A router that knows the speed of all steps and links, and workers for it."""

from dataclasses import replace

from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, PrefillTimes
from disagg.messages.submit import Role, Submit
from tests.unit.routing.builders import Router, request, worker
from tests.unit.routing.measured import ALL_STEPS, stats, transfer

P, P2 = (worker(name, "prefill", num_blocks=1000) for name in ("p", "p2"))
D, D2 = (worker(name, "decode", num_blocks=1000) for name in ("d", "d2"))


def fleet(
    *workers: WorkerInfo, policy: str = "estimated", link_ms: int = 3, **options: float
) -> Router:
    """A router that knows the speed of all steps and links: 2 ms a step, 0.1 a token."""
    router = Router(*workers, policy=policy, worker_silent_ms=10**6, **options)  # type: ignore[arg-type]
    learn_links(router, link_ms)
    for one in workers:
        say(router, one)
    return router


def learn_links(router: Router, link_ms: int) -> None:
    """Two hand-overs; the first READ of a pair is cold."""
    for number in range(6):
        name = f"warm-up-{number}"
        router.generate(request(name, num_tokens=3))
        prefill = dict(router.submits)
        keys = {submit.role: (who, submit) for who, submit in router.submits}
        if Role.PREFILL in keys:
            owner, submit = keys[Role.PREFILL]
            reader = keys[Role.DECODE][0]
            report = transfer(submit.key, worker(owner).incarnation, (1 + number) * 4096, link_ms)
            prefill_report = PrefillReport(submit.key, 3, 0, 3, times=PrefillTimes(0, 1, 1))
            router.core.from_worker(router.now_ms, worker(owner).incarnation, prefill_report)
            router.core.from_worker(router.now_ms, worker(reader).incarnation, report)
        assert prefill
        router.core.cancel(router.now_ms, name, "warm")


def say(router: Router, who: WorkerInfo, **changes: int) -> None:
    router.core.from_worker(router.now_ms, who.incarnation, stats(ALL_STEPS, **changes))


def served(router: Router, num_tokens: int = 401, **changes: object) -> dict[str, Submit]:
    new = replace(request("r", num_tokens=num_tokens, max_tokens=100), **changes)  # type: ignore[arg-type]
    router.generate(new)
    return dict(router.submits)


def roles(submits: dict[str, Submit]) -> dict[str, Role]:
    return {who: submit.role for who, submit in submits.items()}
