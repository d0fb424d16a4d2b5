"""What the dashboard shows: rows of panels, each with its PromQL.

Series have the label `role` (router, prefill, decode) from the scrape. `baton_ranks` has one of its own, which a scrape then renames.
"""

from typing import NamedTuple

QUANTILES = (0.5, 0.9, 0.99)


class Panel(NamedTuple):
    """`queries`: PromQL, and the legend of its series."""

    title: str
    description: str
    unit: str  # Grafana's name of it
    queries: tuple[tuple[str, str], ...]
    is_stacked: bool = False


def rate(metric: str) -> str:
    """A second, over the interval that Grafana finds fit."""
    return f"rate({metric}[$__rate_interval])"


def quantiles(histogram: str, matchers: str = "") -> tuple[tuple[str, str], ...]:
    """Over all processes."""
    buckets = f"sum by (le) ({rate(f'{histogram}_bucket{matchers}')})"
    return tuple((f"histogram_quantile({quantile}, {buckets})", f"p{100 * quantile:g}") for quantile in QUANTILES)


def mean(histogram: str, by: str) -> str:
    """Of what a histogram observed."""
    return f"sum by ({by}) ({rate(f'{histogram}_sum')}) / sum by ({by}) ({rate(f'{histogram}_count')})"


def pages_by_state(role: str) -> tuple[tuple[str, str], ...]:
    """Every page of the role's ranks in one state."""
    return ((f'sum by (state) (baton_kv_pages{{role="{role}"}})', "{{state}}"),)


def hit_share(role: str) -> str:
    """Tokens that the role's prefix caches had, of all that were asked for."""
    hit, asked = (rate(f'baton_prefix_cache_{what}_tokens_total{{role="{role}"}}') for what in ("hit", "query"))
    return f"sum({hit}) / sum({asked})"


TRAFFIC = (
    Panel("Requests by outcome", "Requests that ended, a second. Overloaded: refused with a retry hint", "reqps",
          ((f"sum by (outcome) ({rate('baton_requests_total')})", "{{outcome}}"),), is_stacked=True),
    Panel("Requests in the system", "Admitted and not over, and those that wait to be admitted", "short",
          (("sum(baton_requests_running)", "running"), ("sum(baton_requests_queued)", "queued"))),
    Panel("Tokens", "Prompt tokens, those of them that prefill's prefix cache had, and tokens given to clients, a second", "short",
          tuple((f"sum({rate(f'baton_{what}_tokens_total')})", what) for what in ("prompt", "cached", "output"))),
)
LATENCY = (
    Panel("Time to first token", "From reception by the router to the first token sent", "s", quantiles("baton_request_ttft_seconds")),
    Panel("Time between tokens", "As clients see it, once a token", "s", quantiles("baton_request_itl_seconds")),
    Panel("Whole requests", "From reception to the end, of requests that ended well", "s", quantiles("baton_request_seconds")),
    Panel("Wait to be admitted", "0 for requests that had not to wait", "s", quantiles("baton_request_queue_seconds")),
    Panel("Choice of ranks", "Prefix lookups included, once an attempt", "s", quantiles("baton_routing_seconds")),
)
POOLS = (
    Panel("Ranks", "That take new requests, by role, as the router that knows most of them sees it", "short",
          (('max by (role) (label_replace(baton_ranks, "role", "$1", "exported_role", "(.+)"))', "{{role}}"),)),
    Panel("Prefill: busy", "Share of each rank's time in steps: the first thing that prefill runs out of", "percentunit",
          ((rate('baton_engine_busy_seconds_total{role="prefill"}'), "{{instance}}"),)),
    Panel("Decode: busy", "Share of each rank's time in steps. 1 is no shortage by itself: ITL says", "percentunit",
          ((rate('baton_engine_busy_seconds_total{role="decode"}'), "{{instance}}"),)),
)
PREFILL = (
    Panel("Queued tokens", "Prompt tokens neither cached nor computed yet, by rank", "short",
          (("baton_prefill_queued_tokens", "{{instance}}"),)),
    Panel("Queue age", "How long the oldest waiting prompt has waited, and how many wait", "s",
          (("max(baton_prefill_queue_age_seconds)", "oldest"),)),
    Panel("Queued requests", "Prompts that wait for pages or their first step, by rank", "short",
          (("baton_prefill_queued_requests", "{{instance}}"),)),
    Panel("Leased pages", "Share of each rank's pages that only wait for a decode rank: high when decode is short", "percentunit",
          (("baton_prefill_leased_pages / on (instance) baton_kv_pages_capacity", "{{instance}}"),)),
    Panel("Computed tokens", "Prompt tokens a second, by rank", "short",
          ((rate("baton_prefill_computed_tokens_total"), "{{instance}}"),)),
    Panel("Step time", "Seconds of one forward", "s", quantiles("baton_step_seconds", '{role="prefill"}')),
    Panel("Pages", "All pages of the pool by state", "short", pages_by_state("prefill"), is_stacked=True),
)
DECODE = (
    Panel("Running and claims", "Requests with their pages here, requests booked, and the most that may run", "short",
          (("sum(baton_decode_running)", "running"), ("sum(baton_decode_claims)", "claims"),
           ('sum(baton_max_running{role="decode"})', "max_running"))),
    Panel("Used pages", "Share of each rank's pages neither free nor evictable", "percentunit",
          (("baton_decode_used_pages / on (instance) baton_kv_pages_capacity", "{{instance}}"),)),
    Panel("Time between steps", "Of a running request, once a request and step", "s", quantiles("baton_decode_itl_seconds")),
    Panel("Accept length", "Tokens that a request gets from a step, mean by rank: 1 without speculation", "short",
          ((mean("baton_decode_accept_length", "instance"), "{{instance}}"),)),
    Panel("Tokens", "A second, by rank", "short", ((rate("baton_decode_tokens_total"), "{{instance}}"),)),
    Panel("Preemptions", "Requests whose pages were taken for older ones, a second, by rank", "short",
          ((rate("baton_decode_preemptions_total"), "{{instance}}"),)),
    Panel("Step time", "Seconds of one forward", "s", quantiles("baton_step_seconds", '{role="decode"}')),
    Panel("KV tokens", "Of the requests that run, by rank", "short", (("baton_decode_running_tokens", "{{instance}}"),)),
    Panel("Pages", "All pages of the pool by state", "short", pages_by_state("decode"), is_stacked=True),
)
TRANSFER = (
    Panel("Bytes", "Read of other ranks' pages, a second, by reader", "Bps", ((rate("baton_transfer_bytes_total"), "{{instance}}"),)),
    Panel("Pages", "Read, a second, by reader", "short", ((rate("baton_transfer_pages_total"), "{{instance}}"),)),
    Panel("Transfer", "From a hand-off's first read to its last one verified", "s", quantiles("baton_transfer_seconds")),
    Panel("Exposed", "The part of it that the request waited for: the rest hid behind prefill", "s",
          quantiles("baton_transfer_exposed_seconds")),
)
CACHE = (
    Panel("Hits", "Share of tokens that a role's prefix caches had", "percentunit",
          ((hit_share("prefill"), "prefill"), (hit_share("decode"), "decode"))),
    Panel("Pages in the routers' index", "By how they know of them: events are exact", "short",
          (("max by (source) (baton_prefix_index_pages)", "{{source}}"),)),
    Panel("KV events missed", "Gaps a second, each of which was asked for again", "short",
          ((f"sum({rate('baton_kv_event_gaps_total')})", "gaps"),)),
)
FAULTS = (
    Panel("Recoveries", "Attempts after a request's first, a second, by path and by why the one before ended", "short",
          ((f"sum by (path, reason) ({rate('baton_recoveries_total')})", "{{path}} {{reason}}"),)),
    Panel("Incidents", "What was ignored, thrown away or given up, a second", "short",
          ((f"sum by (what, reason) ({rate('baton_incidents_total')})", "{{what}} {{reason}}"),)),
    Panel("Quarantined pages", "Kept from everybody because a late read may still land there, by rank", "short",
          (('baton_kv_pages{state="quarantined"}', "{{instance}}"),)),
)
PROCESSES = (
    Panel("CPU", "Cores that each process uses", "short", ((rate("process_cpu_seconds_total"), "{{instance}}"),)),
    Panel("Memory", "Resident", "bytes", (("process_resident_memory_bytes", "{{instance}}"),)),
    Panel("Versions", "Processes by what they run", "short", (("count by (version, role) (baton_build_info)", "{{role}} {{version}}"),)),
)
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Traffic and outcomes", TRAFFIC), ("Latency", LATENCY), ("Sizes of the pools", POOLS), ("Prefill", PREFILL), ("Decode", DECODE),
    ("Transfer", TRANSFER), ("Prefix cache", CACHE), ("Faults", FAULTS), ("Processes", PROCESSES),
)
