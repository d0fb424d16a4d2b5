"""What a decode engine tells Prometheus besides services/kv/metrics.py. An autoscaler wants claims, used pages, ITL and accept length."""

from collections import Counter as CountOf
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from services.decode.messages import TransferTimes
from services.decode.request import Request
from services.kv.metrics import STEP_SECONDS
from services.runtime.histogram import ITL_BUCKETS, BatchCounter, BatchHistogram

_TRANSFER_BUCKETS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)

CLAIMS = Gauge("baton_decode_claims", "Requests booked here whose pages are not here yet")
RUNNING = Gauge("baton_decode_running", "Requests whose pages are here: they run, or wait while max_running do")
RUNNING_TOKENS = Gauge("baton_decode_running_tokens", "KV tokens of the requests that run")
USED_PAGES = Gauge("baton_decode_used_pages", "Pages neither free nor evictable, those reserved for reads under way included")
TOKENS = BatchCounter("baton_decode_tokens", "Tokens made by steps; a request's first one is prefill's")
ITL_SECONDS = BatchHistogram("baton_decode_itl_seconds", "Seconds between two steps of a running request", ITL_BUCKETS)
ACCEPT_LENGTH = BatchHistogram("baton_decode_accept_length", "Tokens that a request got from a step", (1.0, 2.0, 3.0, 4.0, 5.0))
PREEMPTIONS = Counter("baton_decode_preemptions", "Requests whose pages were taken for older ones; each is replayed")
TRANSFER_BYTES = Counter("baton_transfer_bytes", "Bytes read of other ranks' pages and epochs, by hand-offs that became ready")
TRANSFER_PAGES = Counter("baton_transfer_pages", "Pages read by hand-offs that became ready")
TRANSFER_SECONDS = BatchHistogram(
    "baton_transfer_seconds", "Seconds from a hand-off's first read to its last one verified; one that read nothing is not counted",
    _TRANSFER_BUCKETS,
)
TRANSFER_EXPOSED_SECONDS = BatchHistogram(
    "baton_transfer_exposed_seconds", "Of those, seconds after all was computed and announced: what a request waited for its pages alone",
    _TRANSFER_BUCKETS,
)


def stepped(requests: Sequence[Request], now: float, step_s: float) -> None:
    """Each of `requests` got a token from a step that is over `now`, after `step_s`."""
    STEP_SECONDS.observe(step_s)
    for last_at, number in CountOf([request.stepped_at for request in requests]).items():
        if last_at:  # nearly always the same for all of them
            ITL_SECONDS.observe(now - last_at, number)
    for request in requests:
        request.stepped_at = now
    ACCEPT_LENGTH.observe(1.0, len(requests))
    TOKENS.add(len(requests))


def transferred(times: TransferTimes) -> None:
    """A hand-off is ready."""
    TRANSFER_BYTES.inc(times.num_bytes)
    TRANSFER_PAGES.inc(times.num_pages)
    if times.num_pages:
        TRANSFER_SECONDS.observe(times.read_us / 1e6)
        TRANSFER_EXPOSED_SECONDS.observe(times.exposed_us / 1e6)
