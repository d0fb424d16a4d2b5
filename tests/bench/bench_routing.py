"""Time of a choice of ranks: `python -m tests.bench.bench_routing`.

A prompt of 4,096 token ids, 10,000 pages known of every rank from events, a system prompt of 20 pages on all of them, the prompt's own
pages to a different depth on each, loads that differ. R-EXCL: from page digests to the rank among 64 prefill ranks; R-INCL: from token ids.
R-PAIR-*: both ranks of a request. Medians; the speculative entries of earlier requests are there and end as in a running router.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable

import grpc.aio

from proto.baton.v1 import common_pb2, registry_pb2
from services.kv.hash import page_digests
from services.router import pool as pool_module
from services.router.pairing import Need, choose_pair
from services.router.pool import Pool
from services.runtime.config import SecuritySection
from services.runtime.security import Security
from services.runtime.serve import WIRE_VERSION
from tests.bench import kv_burst
from tests.bench.report import Row, report

NUM_TOKENS = 4096
NUM_PAGES = 10_000  # a rank
ROUNDS = 4000


class OpenSession:
    """In place of a connected one: this is about the choice."""

    is_usable = True

    def __init__(self, *_: object) -> None: ...

    async def close(self) -> None: ...


def pool_of(num_prefills: int, num_decodes: int, prompt: list[int], rng: random.Random) -> Pool:
    """Ranks that hold pages and have work."""
    pool_module.Session = OpenSession
    pool = Pool("bench", Security.of(SecuritySection(insecure=True)))
    digests = page_digests(prompt)
    for role, number in (("prefill", num_prefills), ("decode", num_decodes)):
        for i in range(number):
            name = f"{role}-{i}"
            rank = common_pb2.Rank(instance_id=name, role=role, pool_address=f"10.0.0.{i + 1}:5000", rank=0)
            limits = registry_pb2.Limits(max_model_len=8192, vocab_size=129280, page_size=64, num_pages=NUM_PAGES, max_running=256)
            pool.join(registry_pb2.Member(front_id=f"front-{name}", role=role, address=rank.pool_address, fingerprint="fp", model="m",
                                          wire_version=WIRE_VERSION, limits=limits, ranks=[rank], tp=1, ep=1))
            pool.report(registry_pb2.Load(instance_id=name, num_queued_tokens=rng.randrange(20_000), num_running=rng.randrange(200),
                                          num_running_tokens=rng.randrange(500_000)))
            pool.index.stored(name, [rng.randbytes(16) for _ in range(NUM_PAGES - 64)])
            pool.index.stored(name, digests[: rng.randrange(20, 50)])
            pool.index.set_exact(name, True)
    return pool


def median_us(choose: Callable[[], object], after: Callable[[], object]) -> float:
    """Median of `choose`, after each of which `after` runs, not counted."""
    times: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        choose()
        times.append(time.perf_counter() - began)
        after()
    return 1e6 * statistics.median(times[ROUNDS // 10 :])


def measure(num_prefills: int, num_decodes: int) -> tuple[float, float]:
    """Microseconds from digests, and from token ids, to the rank or ranks."""
    rng = random.Random(0)
    prompt = [rng.randrange(129280) for _ in range(NUM_TOKENS)]
    pool = pool_of(num_prefills, num_decodes, prompt, rng)
    names = [state.instance_id for role in ("prefill", "decode") for state in pool.usable(role)]
    others = [page_digests([*prompt[:1280], *(rng.randrange(129280) for _ in range(1024))]) for _ in range(200)]

    def need(digests: list[bytes]) -> Need:
        return Need(digests, NUM_TOKENS, NUM_TOKENS + 512, num_decodes > 0, None, ())

    def send() -> None:
        """What begin() and book() do of another prompt that was sent somewhere."""
        pool.index.expect(rng.choice(names), rng.choice(others), time.monotonic())

    digests = page_digests(prompt)
    excluded = median_us(lambda: choose_pair(pool, need(digests)), send)
    included = median_us(lambda: choose_pair(pool, need(page_digests(prompt))), send)
    return excluded, included


async def choice_rows() -> list[Row]:
    """In a loop, since channels need one."""
    rows: list[Row] = []
    for name, prefills, decodes in (("", 64, 0), ("PAIR-32-", 32, 32), ("PAIR-64-", 64, 64)):
        excluded, included = measure(prefills, decodes)
        ranks = f"{prefills} prefill ranks" + (f" and {decodes} decode ranks" if decodes else "")
        how = f"{NUM_TOKENS} tokens, {ranks}, {NUM_PAGES} pages a rank; median of {ROUNDS}"
        for kind, value, base, aim in (("INCL", included, 200, 110), ("EXCL", excluded, 60, 30)):
            bars = (base, aim) if decodes != 64 else (None, None)
            words = "from token ids" if kind == "INCL" else "from digests"
            rows.append(Row(f"R-{name}{kind}", value, "us", "lower", *bars, f"{words}; {how}"))
    return rows


def burst_rows() -> list[Row]:
    """R-BURST: what events cost the streams; no bar, but the same without them in the same run."""
    quiet, busy, cpu = kv_burst.measure()
    rate = f"{kv_burst.PAGES_PER_S} pages/s from one rank, {kv_burst.BATCH_PAGES} a batch"
    return [
        Row("R-BURST", busy, "us", "lower", None, None, f"p99 of a task's lateness in the loop under {rate}; {quiet:.0f} us without"),
        Row("R-BURST-CPU", cpu, "cores", "lower", None, None, f"{rate}; the ticking that measures it included"),
    ]


if __name__ == "__main__":
    grpc.aio.init_grpc_aio()
    report("routing", [*asyncio.run(choice_rows()), *burst_rows()])
