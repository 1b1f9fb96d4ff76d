"""How the transfer benchmarks print a figure: a JSON line, a ratio above 1 beats the peer."""

import json
import os
import statistics
from collections.abc import Sequence
from typing import Any

MS = 1e3


def figure(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float] | None,
    *,
    unit: str,
    target: float | None,
    peer_name: str | None,
    note: str,
    higher_is_better: bool = False,
) -> bool:
    """Print medians of samples; returns whether the target was reached, if there is one."""
    ratio = None
    if peer is not None:
        ratio = statistics.median(peer) / statistics.median(ours)
        ratio = round(1 / ratio if higher_is_better else ratio, 3)
    ok = None if target is None or ratio is None else ratio >= target
    spread = f"ours {spread_of(ours)}" + (f", peer {spread_of(peer)}" if peer else "")
    line: dict[str, Any] = {
        "name": name,
        "ours": round(statistics.median(ours), 4),
        "peer": None if peer is None else round(statistics.median(peer), 4),
        "unit": unit,
        "ratio": ratio,
        "target": target,
        "ok": ok,
        "peer_name": peer_name,
        "note": f"{note}; {len(ours)} samples, alternating, {spread}; {load()}",
    }
    print(json.dumps(line), flush=True)
    return ok is not False


def spread_of(samples: Sequence[float]) -> str:
    """Least and largest value, as text."""
    return f"{min(samples):.4g} to {max(samples):.4g}"


def load() -> str:
    """How busy the machine was in the last minute."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
