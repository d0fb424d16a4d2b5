"""What a router tells Prometheus, and how a request is counted by its outcome, once, whatever ends it.

No label's values are a client's choice: no tenant, no request id.
"""

import asyncio
import contextlib
import time
from collections.abc import Generator

from prometheus_client import Counter, Gauge

from services.router.prefix_index import SOURCES
from services.runtime.errors import BatonError, DeadlineExceeded, HandoffError, InvalidRequest, NoMember, Overloaded
from services.runtime.histogram import ITL_BUCKETS, TTFT_BUCKETS, BatchCounter, BatchHistogram

OUTCOMES = ("ok", "cancelled", "invalid", "overloaded", "unavailable", "deadline", "failed")
# A request counts once here, whatever its number of choices; exceptions: inter-token gaps and output tokens are of every choice.
REQUESTS = Counter("baton_requests", "Requests that ended, by how; cancelled: the client left", ["outcome"])
RUNNING = Gauge("baton_requests_running", "Requests admitted and not over")
QUEUED = Gauge("baton_requests_queued", "Requests that wait to be admitted")
QUEUE_SECONDS = BatchHistogram(
    "baton_request_queue_seconds", "Seconds that a request waited to be admitted, 0 when it had not to; refused ones are not counted",
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
)
TTFT_SECONDS = BatchHistogram("baton_request_ttft_seconds", "Seconds from a request's reception to its first token", TTFT_BUCKETS)
ITL_SECONDS = BatchHistogram(
    "baton_request_itl_seconds", "Seconds between two messages with tokens to a client, shared among the tokens of the later one",
    ITL_BUCKETS,
)
REQUEST_SECONDS = BatchHistogram(
    "baton_request_seconds", "Seconds from a request's reception to its end, of requests that ended ok",
    (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0),
)
PROMPT_TOKENS = Counter("baton_prompt_tokens", "Prompt tokens of requests that got a first token; replays count nothing")
CACHED_TOKENS = Counter("baton_cached_tokens", "Of those, tokens that prefill's prefix cache had")
OUTPUT_TOKENS = BatchCounter("baton_output_tokens", "Tokens given to clients, each once")
RANKS = Gauge("baton_ranks", "Ranks that take new requests, by role", ["role"])
ROUTING_SECONDS = BatchHistogram(
    "baton_routing_seconds", "Seconds to choose the ranks of an attempt, prefix lookups included",
    (0.00001, 0.00002, 0.00003, 0.00005, 0.000075, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01),
)
PREFIX_PAGES = Gauge("baton_prefix_index_pages", "Pages that the index believes ranks to hold, by how it knows", ["source"])
KV_EVENT_GAPS = Counter("baton_kv_event_gaps", "Times that KV events of a rank were missed and had to be asked for again")
# Everything tried again or moved. `path`: Recovery.Path in lower case; `reason`: why the attempt before it ended.
RECOVERIES = Counter("baton_recoveries", "Attempts after the first, by path and by why the one before ended", ["path", "reason"])

_ENDED = {outcome: REQUESTS.labels(outcome) for outcome in OUTCOMES}
for _role in ("prefill", "decode"):
    RANKS.labels(_role)
for _source in SOURCES:
    PREFIX_PAGES.labels(_source)


_ROUNDING, _ON_THE_WAY_S = 0.01, 0.05


@contextlib.contextmanager
def counted(deadline_s: float | None) -> Generator[None]:
    """Around a request's whole life: counts it by how the block ends. `deadline_s`: time that the client gives it, from now; None = any.

    gRPC cancels a call whose deadline has passed as it does one whose client has left: the clock tells them apart. The client's own runs
    ahead of ours by the way here and by gRPC's rounding, which is up.
    """
    received_at = time.monotonic()
    outcome = "failed"
    try:
        yield
        outcome = "ok"
        REQUEST_SECONDS.observe(time.monotonic() - received_at)
    except asyncio.CancelledError:
        is_late = deadline_s is not None and time.monotonic() - received_at >= deadline_s * (1 - _ROUNDING) - _ON_THE_WAY_S
        outcome = "deadline" if is_late else "cancelled"
        raise
    except BatonError as error:
        outcome = outcome_of(error)
        raise
    finally:
        _ENDED[outcome].inc()


def outcome_of(error: BatonError) -> str:
    """One of OUTCOMES."""
    match error:
        case InvalidRequest():
            return "invalid"
        case Overloaded():
            return "overloaded"
        case NoMember() | HandoffError():
            return "unavailable"
        case DeadlineExceeded():
            return "deadline"
        case _:
            return "failed"
