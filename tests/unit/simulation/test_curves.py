"""Lines between measured points, and the file they come from."""

import copy
import json
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.messages.identity import Incarnation
from disagg.messages.step_times import SCALE_TOKENS, StepShape
from disagg.routing.estimates.place import LinkCost
from disagg.simulation.curves import Surface
from disagg.simulation.curves_file import curves_from_json, curves_to_json
from disagg.simulation.links import Wires
from tests.unit.simulation.fleets import DECODE, PREFILL, curves


def test_measured_points_are_met() -> None:
    for across, row in zip(PREFILL.across, PREFILL.ms, strict=True):
        for along, ms in zip(PREFILL.along, row, strict=True):
            assert PREFILL.at(across, along) == ms


@pytest.mark.parametrize(
    ("across", "along", "ms"),
    [
        (64, 2048, 12.5),
        (288, 0, 26),
        (288, 4096, 31.5),
        (0, 0, 10),  # flat below the first
        (512, 8192, 60),  # on as between the last two
        (960, 0, 68),
    ],
)
def test_between_and_beyond(across: float, along: float, ms: float) -> None:
    assert PREFILL.at(across, along) == pytest.approx(ms)


def test_a_falling_line_never_goes_below_nothing() -> None:
    assert Surface((1, 2), (0,), ((10,), (1,))).at(50, 0) == 0


@pytest.mark.parametrize(
    ("across", "along", "ms"),
    [
        ((2, 1), (0,), ((1,), (2,))),
        ((), (0,), ()),
        ((1, 2), (0,), ((1,),)),
        ((1,), (0, 1), ((1,),)),
    ],
)
def test_a_grid_with_holes_is_refused(across: Any, along: Any, ms: Any) -> None:
    with pytest.raises(ConfigError):
        Surface(across, along, ms)


def shape(tokens: int = 0, before: float = 0, decodes: int = 0, context: float = 0) -> StepShape:
    prefill = tokens * (before + (tokens - 1) / 2) / SCALE_TOKENS
    return StepShape(tokens, prefill, decodes, decodes * context / SCALE_TOKENS)


def test_steps_by_what_they_compute() -> None:
    one = curves()
    assert one.step_ms(shape(512)) == 40
    assert one.step_ms(shape(512, 4096)) == pytest.approx(50)
    assert one.step_ms(shape(decodes=8, context=4096)) == 15
    # Both: 9 ms are shared, and no step is shorter than either part.
    assert one.step_ms(shape(512, decodes=8, context=64)) == pytest.approx(40 + 11 - 9)
    assert one.step_ms(shape(1, decodes=1, context=64)) == pytest.approx(11)
    assert one.step_ms(shape(1, decodes=8, context=4096)) == pytest.approx(16)


def test_what_steps_of_both_share_is_found_again() -> None:
    one = curves()
    mixed = [
        (each, one.step_ms(each))
        for each in (shape(512, decodes=8, context=64), shape(400, decodes=4, context=64))
    ]
    assert one.with_mixed(mixed).shared_ms == pytest.approx(9)
    assert one.with_mixed([]).shared_ms == 0


def test_the_file_brings_back_what_was_written() -> None:
    content = json.loads(json.dumps(curves_to_json(curves(), {"by": "a test"})))
    assert curves_from_json(content) == curves()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("version",), 2, "version"),
        (("decode",), None, "decode"),
        (("decode", "ms"), [[1, 2]], "decode"),
        (("decode", "sequences"), [2, 1, 32], "decode: sequences: points must ascend"),
        (("decode", "tokens_before"), [2, 1], "decode: tokens_before: points must ascend"),
        (("prefill", "tokens"), "many", "tokens"),
        (("prefill", "ms", 0, 0), -1, "ms"),
        (("transfer", "mib_ms"), float("nan"), "mib_ms"),
        (("messages", "hop_ms"), True, "hop_ms"),
        (("messages", "hop_ms"), 1e308, "hop_ms"),
        (("serving", "step_ms"), 1e7, "step_ms: a number of ms from 0 to 600,000 is wanted"),
        (("decode", "ms", 0, 0), 1e7, "decode: ms: a list of numbers from 0 to 600,000 is wanted"),
        pytest.param(("serving", "step_ms"), 10**400, "step_ms", id="no float"),
        (("request", "ms"), [], "request"),
        (("request", "ms"), [1, 2], "request: ms: a grid of"),
        (("request", "prompt_tokens"), [2, 1], "request: prompt_tokens: points must ascend"),
        (("serving", "beside", "share"), [-1], "share"),
        (("serving", "beside", "step_tokens"), [1, 2], "beside: share: a grid of"),
        (("serving", "read_ms"), "long", "read_ms"),
        (("serving", "workers_per_host"), 0, "workers_per_host"),
        (("model", "num_blocks"), 0.5, "num_blocks"),
        (("model", "num_blocks"), 1, "num_blocks: a whole number from 2"),
        (("model", "max_model_tokens"), 1 << 70, "max_model_tokens"),
        (("model", "groups", 0, "kind"), "rings", "kind"),
        (("model", "groups", 0, "kind"), [], "kind"),
        (("model", "groups", 1, "spec"), {"block_tokens": 16}, "groups[1]"),
        (("model", "block_bytes"), 1, "block_bytes"),
        (("model", "block_bytes"), 1 << 40, "block_bytes"),
    ],
)
def test_a_bad_file_names_the_field(path: tuple[Any, ...], value: Any, named: str) -> None:
    content: Any = copy.deepcopy(json.loads(json.dumps(curves_to_json(curves(), {}))))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        curves_from_json(content, "f.json")
    assert caught.value.message.startswith("f.json")
    assert named in caught.value.message


def test_reads_take_turns_at_both_ends() -> None:
    wires = Wires(LinkCost(1.0, 10.0))
    one, two, three, four = (Incarnation(name, "1") for name in "abcd")
    mib = 1 << 20
    assert wires.read_ms(0, one, two, mib) == 11
    assert wires.read_ms(0, one, three, mib) == 21  # the owner sends another one
    assert wires.read_ms(0, four, two, mib) == 21  # the reader receives another one
    assert wires.read_ms(100, one, two, mib) == 11


def test_decode_is_flat_where_it_was_measured_so() -> None:
    """What a line over all points cannot say: here the surface keeps it."""
    flat = Surface((1, 16, 64), (0,), ((10,), (10,), (40,)))
    assert flat.at(8, 0) == 10
    assert DECODE.at(8, 64) == 11
