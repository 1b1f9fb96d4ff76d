"""Curves as JSON, with what they were measured on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeGuard, TypeVar

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.registry import KINDS
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.routing.estimates.place import LinkCost
from disagg.simulation.curves import Curves, Line, Surface

VERSION = 3
MS_MAX = 600_000.0
"""Of every time: as long as a whole request may take where nothing else is set."""
NUMBER_MAX = 1e9
"""Of tokens and shares; more is a mistake in the file, and with infinities nothing ends."""
COUNT_MAX = 1 << 31
NUM_BLOCKS_MIN = 2
"""One of them is the null block."""
_Made = TypeVar("_Made", Surface, Line)


def curves_to_json(curves: Curves, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content; all times are ms.

    Args:
        curves: what is simulated.
        measured: what else is known of the measurement, for people.
    """
    layout = curves.layout
    return {
        "version": VERSION,
        "name": curves.name,
        "measured": dict(measured),
        "model": {
            "max_model_tokens": curves.max_model_tokens,
            "num_blocks": curves.num_blocks,
            "block_bytes": layout.block_bytes,
            "hash_block_tokens": layout.hash_block_tokens,
            "groups": [
                {
                    "kind": group.spec.kind,
                    "layers": list(group.layers),
                    "blocks_per_state": group.blocks_per_state,
                    "spec": {one.name: getattr(group.spec, one.name) for one in fields(group.spec)},
                }
                for group in layout.groups
            ],
        },
        "prefill": _surface_to_json(curves.prefill, "tokens", "tokens_before"),
        "decode": _surface_to_json(curves.decode, "sequences", "tokens_before"),
        "mixed": {"shared_ms": curves.shared_ms},
        "transfer": {"read_ms": curves.link.read_ms, "mib_ms": curves.link.mib_ms},
        "messages": {"hop_ms": curves.hop_ms},
        "request": {
            "prompt_tokens": list(curves.request.along),
            "ms": list(curves.request.ms),
            "beside_ms": curves.request_beside_ms,
        },
        "serving": {
            "step_ms": curves.step_more_ms,
            "sequence_ms": curves.sequence_more_ms,
            "read_ms": curves.read_more_ms,
            "beside": {
                "step_tokens": list(curves.beside.along),
                "share": list(curves.beside.ms),
            },
            "workers_per_host": curves.workers_per_host,
        },
    }


def curves_from_json(content: object, name: str = "curves") -> Curves:
    """Read such a content.

    Raises:
        ConfigError: it is not one; names the field.
    """
    whole = _Object(content, name)
    if (version := whole.fields.get("version")) != VERSION:
        raise ConfigError(
            f"{name}: version: {version!r:.60}, not {VERSION}: calibrate anew", param="curves"
        )
    model = whole.inner("model")
    mixed, transfer, messages = map(whole.inner, ("mixed", "transfer", "messages"))
    request, serving = map(whole.inner, ("request", "serving"))
    return Curves(
        prefill=_surface(whole.inner("prefill"), "tokens", "tokens_before"),
        decode=_surface(whole.inner("decode"), "sequences", "tokens_before"),
        shared_ms=mixed.ms("shared_ms"),
        link=LinkCost(transfer.ms("read_ms"), transfer.ms("mib_ms")),
        hop_ms=messages.ms("hop_ms"),
        request=_line(request, "prompt_tokens", "ms"),
        layout=_layout(model),
        num_blocks=model.count("num_blocks", NUM_BLOCKS_MIN),
        max_model_tokens=model.count("max_model_tokens"),
        name=str(whole.fields.get("name", "")),
        request_beside_ms=request.ms("beside_ms"),
        step_more_ms=serving.ms("step_ms"),
        sequence_more_ms=serving.ms("sequence_ms"),
        read_more_ms=serving.ms("read_ms"),
        beside=_line(serving.inner("beside"), "step_tokens", "share"),
        workers_per_host=serving.count("workers_per_host"),
    )


class _Object:
    """A JSON object whose fields are asked for by name."""

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, dict):
            raise ConfigError(f"{where}: a JSON object is wanted", param="curves")
        self.fields: dict[str, Any] = content
        self.where = where

    def refuse(self, name: str, wanted: str) -> ConfigError:
        """The error of a field."""
        given = self.fields.get(name)
        return ConfigError(f"{self.where}: {name}: {wanted}, not {given!r:.60}", param="curves")

    def inner(self, name: str) -> "_Object":
        """A field that is an object."""
        return _Object(self.fields.get(name), f"{self.where}: {name}")

    def ms(self, name: str) -> float:
        """A field that is a time."""
        found = self.fields.get(name)
        if not _is_number(found, MS_MAX):
            raise self.refuse(name, f"a number of ms from 0 to {MS_MAX:,.0f} is wanted")
        return float(found)

    def count(self, name: str, least: int = 1) -> int:
        """A field that is a whole number."""
        found = self.fields.get(name)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= COUNT_MAX:
            raise self.refuse(name, f"a whole number from {least} to {COUNT_MAX:,} is wanted")
        return found

    def row(self, name: str) -> tuple[float, ...]:
        """A field that is a list of numbers."""
        return _row(self, name, self.fields.get(name))


def _is_number(found: object, most: float) -> TypeGuard[int | float]:
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= most


def _row(content: _Object, name: str, found: object) -> tuple[float, ...]:
    most = MS_MAX if name == "ms" else NUMBER_MAX
    if not isinstance(found, list) or not found or not all(_is_number(one, most) for one in found):
        raise content.refuse(name, f"a list of numbers from 0 to {most:,.0f} is wanted")
    return tuple(map(float, found))


def _surface_to_json(surface: Surface, across: str, along: str) -> dict[str, Any]:
    return {across: list(surface.across), along: list(surface.along), "ms": list(surface.ms)}


def _surface(content: _Object, across: str, along: str) -> Surface:
    rows = content.fields.get("ms")
    if not isinstance(rows, list) or not rows:
        raise content.refuse("ms", "rows of numbers are wanted")
    ms = tuple(_row(content, "ms", row) for row in rows)
    names = {"across": across, "along": along}
    return _made(content, lambda: Surface(content.row(across), content.row(along), ms), names)


def _line(content: _Object, along: str, values: str) -> Line:
    names = {"along": along, "ms": values}
    return _made(content, lambda: Line(content.row(along), content.row(values)), names)


def _made(content: _Object, make: Callable[[], _Made], names: Mapping[str, str]) -> _Made:
    """What is made of fields, which have other names there."""
    try:
        return make()
    except ConfigError as error:
        if error.param == "curves":
            raise
        name, why = names.get(error.param, error.param), error.message.partition(": ")[2]
        raise ConfigError(f"{content.where}: {name}: {why}", param="curves") from None


def _layout(model: _Object) -> KVCacheLayout:
    groups = model.fields.get("groups")
    if not isinstance(groups, list):
        raise model.refuse("groups", "a list is wanted")
    found = []
    for number, one in enumerate(groups):
        group = _Object(one, f"{model.where}: groups[{number}]")
        layers = group.row("layers")
        spec = _spec(group)
        blocks = group.count("blocks_per_state")
        found.append(KVCacheGroup(number, spec, tuple(map(int, layers)), blocks))
    block_bytes, hash_tokens = model.count("block_bytes"), model.count("hash_block_tokens")
    try:
        return KVCacheLayout(tuple(found), block_bytes, hash_tokens)
    except ConfigError as error:
        raise ConfigError(
            f"{model.where}: {error.param}: {error.message}", param="curves"
        ) from None


def _spec(group: _Object) -> Spec:
    kind = group.fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise group.refuse("kind", f"one of {', '.join(KINDS)} is wanted")
    given = group.inner("spec").fields
    arguments = {name: _hashable(value) for name, value in given.items()}
    try:
        return KINDS[kind](**arguments)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{group.where}: spec: {error}", param="curves") from None


def _hashable(value: object) -> object:
    """Tuples come back from JSON as lists."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_hashable, value))
    return value
