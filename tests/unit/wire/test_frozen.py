"""What the type checker alone keeps frozen is compared, hashed and copied as the library has it."""

import copy
import dataclasses
import pickle

import pytest

from disagg.messages import frozen
from disagg.messages.sampling import SamplingParams


@frozen.dataclass(frozen=True, slots=True)
class Ours:
    a: int
    b: tuple[str, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Theirs:
    a: int
    b: tuple[str, ...] = dataclasses.field(default=(), repr=False)


def test_it_is_a_value_as_the_librarys() -> None:
    ours, theirs = Ours(1, ("x",)), Theirs(1, ("x",))
    assert ours == Ours(1, ("x",))
    assert ours != Ours(1)
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert dataclasses.replace(ours, a=2) == Ours(2, ("x",))
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == ours
    assert not hasattr(ours, "__dict__")


def test_control_what_is_written_to_is_none() -> None:
    with pytest.raises(TypeError):

        @frozen.dataclass(frozen=False, slots=True)
        class Written:
            a: int


def test_messages_are_made_so() -> None:
    params = SamplingParams(max_tokens=1)
    params.max_tokens = 2  # type: ignore[misc]  # the checker's word for it is what refuses it
    assert params.max_tokens == 2
