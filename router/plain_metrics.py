"""Counters and histograms as plain numbers, made Prometheus' when scraped.

prometheus_client's own take a lock or two and a look at every bucket each time, which was a tenth
of all that is done for a token and a twentieth for a small request. Counted and scraped by one
thread.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily


class Count:
    """One series of a counter.

    Attributes:
        num: never made less.
    """

    __slots__ = ("num",)

    def __init__(self) -> None:
        self.num = 0


class Distribution:
    """One series of a histogram.

    Args:
        bounds: the highest value of each bucket, lowest first; one more has the rest.
    """

    __slots__ = ("_bounds", "nums", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.nums = [0] * (len(bounds) + 1)
        """Values in each bucket alone."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.nums[bisect_left(self._bounds, value)] += 1
        self.sum += value


_Series = TypeVar("_Series", Count, Distribution)


class _Plain(Generic[_Series]):
    """A metric with its series.

    Args:
        name: a counter's is without ``_total``.
        text: that explains it.
        model_name: the first label of every series.
        labels: names of the others.
    """

    def __init__(self, name: str, text: str, model_name: str, labels: Sequence[str] = ()) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._labels = ("model_name", *labels)
        self._series: dict[tuple[str, ...], _Series] = {}

    def of(self, *values: str) -> _Series:
        """The series in which the other labels have these values; from now on it is shown."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._new()
        return series

    def _new(self) -> _Series:
        raise NotImplementedError


class PlainCounter(_Plain[Count]):
    """A counter."""

    def _new(self) -> Count:
        return Count()

    def collect(self) -> Iterator[Metric]:
        """The metric, for the registry that calls it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._series.items():
            family.add_metric([self._model_name, *values], count.num)
        yield family


class PlainHistogram(_Plain[Distribution]):
    """A histogram; for its ``bounds`` see `Distribution`."""

    def __init__(
        self,
        name: str,
        text: str,
        model_name: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float],
    ) -> None:
        super().__init__(name, text, model_name, labels)
        self._bounds = bounds

    def _new(self) -> Distribution:
        return Distribution(self._bounds)

    def collect(self) -> Iterator[Metric]:
        """The metric, for the registry that calls it."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = (*map(str, map(float, self._bounds)), "+Inf")
        for values, found in self._series.items():
            buckets = list(zip(names, map(float, accumulate(found.nums)), strict=True))
            family.add_metric([self._model_name, *values], buckets, found.sum)
        yield family
