"""Why a request was planned as it was, in JSON: in its record, and in a header of its answer."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from disagg.errors import RequestError
from disagg.router.callers import ADMIN, OBSERVE, Caller
from disagg.routing.estimates.considered import Considered
from disagg.routing.estimates.estimate import Estimate
from disagg.routing.record import RequestRecord

DEBUG_HEADER, PLAN_HEADER = b"x-disagg-debug", b"x-disagg-plan"
OBSERVERS = frozenset((OBSERVE, ADMIN))


def wants_debug(headers: Mapping[bytes, bytes], caller: Caller) -> bool:
    """Whether a request asks for the plan's header.

    Raises:
        ForbiddenError: the caller may not see workers.
        RequestError: neither 0 nor 1 is asked for.
    """
    given = headers.get(DEBUG_HEADER, b"0").strip()
    if given not in (b"0", b"1"):
        raise RequestError("must be 0 or 1", param=DEBUG_HEADER.decode())
    if given == b"0":
        return False
    caller.check(OBSERVERS)
    return True


def plan_header(record: RequestRecord | None) -> list[tuple[bytes, bytes]]:
    """The header that says how a request was planned last; none where it was not.

    About 130 bytes for each plan that was weighed, of which there are few; the record has more.
    """
    if record is None or not record.generations:
        return []
    last = record.generations[-1]
    body = {
        "plan": len(record.generations),
        "reason": last.reason,
        "considered": [_short(one) for one in last.considered],
    }
    return [(PLAN_HEADER, json.dumps(body, separators=(",", ":")).encode())]


def _short(one: Considered) -> dict[str, Any]:
    body: dict[str, Any] = {"prefill": one.prefill, "decode": one.decode}
    if one.pull:
        body["pull"] = one.pull
    if (found := one.estimate) is not None:
        figures = found.ttft_ms, found.mean_tpot_ms, found.others_ms
        names = "ttft_ms", "tpot_ms", "others_ms"
        body |= {name: round(ms, 1) for name, ms in zip(names, figures, strict=True)}
        body["bytes"] = found.num_bytes
    return body | ({"chosen": True} if one.chosen else {})


def considered_body(one: Considered) -> dict[str, Any]:
    """A plan that was weighed."""
    return dataclasses.asdict(one) | {"estimate": estimate_body(one.estimate)}


def estimate_body(estimate: Estimate | None) -> dict[str, Any] | None:
    """What a plan was expected to take, with the sums that plans are compared by."""
    if estimate is None:
        return None
    sums = {"ttft_ms": estimate.ttft_ms, "mean_tpot_ms": estimate.mean_tpot_ms}
    figures: dict[str, Any] = sums | dataclasses.asdict(estimate)
    return {name: round(one, 3) for name, one in figures.items()}
