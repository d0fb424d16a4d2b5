"""A Prometheus histogram and a counter that one thread fills, without a lock, for what happens once a token.

prometheus_client's own histogram takes a value at a time, at about a microsecond each; a decode step has one inter-token gap for all of its
requests, and a router one a token. These cost a quarter of that, whatever the number, and give a scrape the same samples.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# Steps of about 1.5: a quantile read by interpolation is right within a fifth; and usual targets (10, 20, 25, 50, 100 ms between tokens;
# 0.2, 0.5, 1, 2 s to the first one) are bounds themselves, so that the share of requests within a target is exact.
ITL_BUCKETS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0,
)
TTFT_BUCKETS = (
    0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0,
)


class BatchHistogram(Collector):
    """Counts by upper bound (inclusive) and a sum. One thread observes; any thread scrapes, without a lock."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry = REGISTRY) -> None:
        """`buckets`: upper bounds, ascending, without infinity."""
        assert list(buckets) == sorted(set(buckets)), f"bounds of {name} do not ascend: {buckets}"
        self._name, self._documentation, self._bounds = name, documentation, tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, number: int = 1) -> None:
        """`value` was seen `number` times."""
        self._counts[bisect_left(self._bounds, value)] += number
        self._sum += value * number

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry."""
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[Metric]:
        """The samples of a scrape. Counts are of one moment; the sum may be an observation ahead of them."""
        counts, total = list(self._counts), self._sum
        cumulative, buckets = 0, list[tuple[str, float]]()
        for bound, number in zip((*self._bounds, float("inf")), counts, strict=True):
            cumulative += number
            buckets.append((floatToGoString(bound), cumulative))
        return [HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)]


class BatchCounter(Collector):
    """One thread adds; any thread scrapes, without a lock."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name, self._documentation = name, documentation
        self._number = 0
        registry.register(self)

    def add(self, number: int) -> None:
        """So many more."""
        self._number += number

    def collect(self) -> Iterable[Metric]:
        """The sample of a scrape."""
        return [CounterMetricFamily(self._name, self._documentation, self._number)]
