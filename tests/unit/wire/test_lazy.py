"""Attributes that are computed when they are read first."""

from disagg.messages.lazy import cached_property


class Square:
    def __init__(self, side: int) -> None:
        self.side = side
        self.num_computed = 0

    @cached_property
    def area(self) -> int:
        """Of the square."""
        self.num_computed += 1
        return self.side**2


def test_an_attribute_is_computed_once_for_each_instance() -> None:
    one, other = Square(2), Square(3)
    assert (one.area, one.area, other.area) == (4, 4, 9)
    assert (one.num_computed, other.num_computed) == (1, 1)


def test_the_class_shows_what_it_is() -> None:
    assert Square.area.__doc__ == "Of the square."
