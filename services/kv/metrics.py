"""What engines of both roles tell Prometheus. Imported by engine processes alone: whatever is defined here is in their /metrics."""

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kv.layout import PAGE_SIZE
from services.kv.pages import PageCounts
from services.runtime.histogram import BatchHistogram

MAX_RUNNING = Gauge("baton_max_running", "Most requests that this rank runs at once, as configured")
BUSY_SECONDS = Counter("baton_engine_busy_seconds", "Seconds that the main loop spent in steps that computed something")
STEP_SECONDS = BatchHistogram(
    "baton_step_seconds", "Seconds of one forward with its sampling",
    (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0),
)
HIT_TOKENS = Counter("baton_prefix_cache_hit_tokens", "Tokens of requests that got their pages here which the prefix cache had")
QUERY_TOKENS = Counter("baton_prefix_cache_query_tokens", "All tokens of those requests: prompts, and what was replayed or moved here")


class RankCollector(Collector):
    """Gauges that belong together: a scrape sees all of one moment, and takes no lock for it.

    The names beginning with vllm: are those that llm-d's endpoint picker and the Gateway API's inference extension read of a model server.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._shown = PageCounts(0, 0, 0, 0, 0), 0, 0
        registry.register(self)

    def show(self, pages: PageCounts, num_waiting: int, num_running: int) -> None:
        """The rank's state from now on; requests that wait for pages or a place, requests that take part in steps."""
        self._shown = pages, num_waiting, num_running

    def collect(self) -> Iterable[Metric]:
        """The samples of a scrape."""
        pages, num_waiting, num_running = self._shown
        capacity = sum(pages)
        by_state = GaugeMetricFamily("baton_kv_pages", "KV pages by state, each page in one", labels=["state"])
        for state, number in zip(PageCounts._fields, pages, strict=True):
            by_state.add_metric([state], number)
        usage = pages.used / capacity if capacity else 0.0
        return [
            by_state,
            GaugeMetricFamily("baton_kv_pages_capacity", f"All KV pages of this rank, {PAGE_SIZE} tokens each", capacity),
            GaugeMetricFamily("vllm:num_requests_waiting", "Alias for gateways: requests that wait for pages or a place", num_waiting),
            GaugeMetricFamily("vllm:num_requests_running", "Alias for gateways: requests that take part in steps", num_running),
            GaugeMetricFamily("vllm:kv_cache_usage_perc", "Alias for gateways: pages neither free nor evictable, 1 = all", usage),
            InfoMetricFamily("vllm:cache_config", "Alias for gateways: size of a page in tokens, and pages", {
                "block_size": str(PAGE_SIZE), "num_gpu_blocks": str(capacity),
            }),
        ]


RANK = RankCollector()
