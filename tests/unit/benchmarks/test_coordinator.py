"""The whole decode step that the coordinator's benchmark measures."""

import pytest

from benchmarks.coordinator.step import DecodeSteps, measure_steps


def test_both_sides_of_the_step_are_measured() -> None:
    pairs = measure_steps(4, 100, 2)
    assert len(pairs) == 2
    assert all(before > 0 and after > 0 for before, after in pairs)


def test_a_step_that_lacks_a_sequence_is_not_measured() -> None:
    steps = DecodeSteps(2, 40, num_samples=1)

    def sample_beyond_their_end() -> None:
        for _ in range(100):
            steps.sample()

    with pytest.raises(AssertionError, match=r"of 2 sequences decode|nothing to compute"):
        sample_beyond_their_end()
