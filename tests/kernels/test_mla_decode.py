import statistics
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from kernels.backend import BackendError
from kernels.mla_decode import (
    MlaDecode,
    MlaDecodeBySize,
    MlaDecodeShape,
    PlanLimits,
    ReferenceMlaDecode,
    TorchMlaDecode,
    create_mla_decode,
    prefers_triton,
    why_not_flashinfer,
)
from kernels.mla_decode._schedule import MAX_ITEMS, equal_shares, flashinfer_imbalance, most_items, replaces_work_of
from kernels.numerics import relative_error
from kernels.timing import compare_us
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, gpu_only, skip_unless_available

SHAPE = MlaDecodeShape(num_heads=3, kv_lora_rank=12, rope_dim=4, softmax_scale=0.3)
V3 = MlaDecodeShape(num_heads=128, kv_lora_rank=512, rope_dim=64, softmax_scale=0.1352)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
CPU = ["torch", "reference"]
Step = tuple[torch.Tensor, list[list[int]], torch.Tensor]


def make_step(
    shape: MlaDecodeShape, kv_lens: list[int], q_lens: list[int], page_size: int, dtype: torch.dtype, device: str, label: str = ""
) -> Step:
    """Pages of NaN with each request's entries written through a shuffled page table that ends in -1, and the queries."""
    rng = generator(f"{label}{shape}{kv_lens}{q_lens}{page_size}", "cpu")
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    free = torch.randperm(sum(counts) + 2, generator=rng).tolist()
    pages = torch.full((len(free), 2, page_size, shape.width), torch.nan, dtype=dtype)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for table, kv_len in zip(tables, kv_lens, strict=True):
        for i in range(0, kv_len, page_size):
            num = min(page_size, kv_len - i)
            pages[table[i // page_size], :, :num] = torch.randn(2, num, shape.width, generator=rng, dtype=torch.float64).to(dtype)
    q = torch.randn(sum(q_lens), shape.num_heads, shape.width, generator=rng, dtype=torch.float64).to(dtype)
    return pages.to(device), [[*table, -1] for table in tables], q.to(device)


def by_sdpa(shape: MlaDecodeShape, step: Step, kv_lens: list[int], q_lens: list[int], layer: int) -> torch.Tensor:
    """The same from gathered entries, in float64."""
    pages, tables, q = step
    outs, row = [], 0
    for table, kv_len, q_len in zip(tables, kv_lens, q_lens, strict=True):
        entries = pages[table[:-1], layer].flatten(0, 1)[:kv_len].double()  # [kv_len, width]
        queries = q[row : row + q_len].double().transpose(0, 1)  # [heads, q_len, width]
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)
        expand = partial(torch.Tensor.expand, size=(shape.num_heads, -1, -1))
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, expand(entries), expand(entries[:, : shape.kv_lora_rank]), attn_mask=mask, scale=shape.softmax_scale
        )
        outs.append(out.transpose(0, 1) if kv_len else torch.zeros_like(out).transpose(0, 1))
        row += q_len
    return torch.cat(outs)


def make(backend: str, shape: MlaDecodeShape, dtype: torch.dtype, limits: PlanLimits | None = None) -> MlaDecode:
    skip_unless_available(backend, dtype)
    return create_mla_decode(shape, backend=backend, device_type=DEVICE, dtype=dtype, limits=limits)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("kv_lens", [[1], [7], [8], [9], [16, 1, 17], [40, 8, 3, 25]], ids=str)
def test_equals_sdpa_on_gathered_entries(backend: str, kv_lens: list[int]) -> None:
    q_lens = [1] * len(kv_lens)
    pages, tables, q = step = make_step(SHAPE, kv_lens, q_lens, 8, torch.float64, "cpu")
    mla = create_mla_decode(SHAPE, backend=backend)
    mla.plan(pages, tables, kv_lens)
    for layer in range(2):
        got = mla.run(q, layer)
        assert got.shape == (len(kv_lens), 3, 12)
        assert relative_error(got, by_sdpa(SHAPE, step, kv_lens, q_lens, layer)) < 1e-12


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("kv_lens,q_lens", [([4], [4]), ([9, 2], [2, 2]), ([40, 8, 3, 25], [1, 4, 2, 3]), ([17, 0, 5], [3, 1, 4])], ids=str)
def test_new_tokens_see_those_before_them(backend: str, kv_lens: list[int], q_lens: list[int]) -> None:
    pages, tables, q = step = make_step(SHAPE, kv_lens, q_lens, 8, torch.float64, "cpu")
    mla = create_mla_decode(SHAPE, backend=backend)
    mla.plan(pages, tables, kv_lens, q_lens)
    assert relative_error(mla.run(q, 1), by_sdpa(SHAPE, step, kv_lens, q_lens, 1)) < 1e-12


# heads, kv_lora_rank, rope_dim, page size, kv_lens, q_lens: dims that are powers of two and not, splits, several tiles of rows
SMALL = [
    (3, 12, 4, 8, [40, 8, 0, 25], [1, 4, 2, 3]),
    (5, 16, 16, 1, [130, 7], [2, 2]),
    (1, 24, 6, 5, [4, 64, 65], [4, 1, 1]),
    (20, 32, 8, 64, [300], [4]),
    (40, 16, 8, 16, [33, 90], [2, 1]),
]
LARGE = [
    (128, 512, 64, 64, [5000], [1]),
    (128, 512, 64, 64, [700, 64, 1, 0, 129, 4000], [2, 2, 1, 2, 4, 3]),
    (16, 512, 64, 64, [300, 2, 64], [1, 2, 1]),
    (3, 512, 64, 64, [1000, 77], [1, 4]),
    (24, 512, 64, 16, [500, 31], [2, 3]),
    (24, 512, 64, 64, [500, 31, 1000], [2, 3, 4]),
    (128, 512, 64, 128, [300, 129, 128], [2, 1, 1]),
    (128, 512, 64, 1, [200, 65], [1, 2]),
    (128, 384, 48, 64, [500, 31], [2, 3]),
    (7, 256, 32, 24, [1000, 500], [2, 3]),
    (128, 512, 64, 64, [257] * 150, [2] * 150),
    (64, 512, 64, 64, [0, 0], [1, 1]),
]


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("case", LARGE if ON_GPU else SMALL, ids=str)
def test_kernels_equal_the_formula(backend: str, case: tuple[int, int, int, int, list[int], list[int]]) -> None:
    """Unwritten entries, -1 pages and a padded request's queries are NaN or absurd, and reach nothing."""
    heads, rank, rope, page_size, kv_lens, q_lens = case
    shape = MlaDecodeShape(heads, rank, rope, 1.3 / (rank + rope) ** 0.5)
    if backend == "flashinfer" and why_not_flashinfer(shape, FLOAT):
        pytest.skip(why_not_flashinfer(shape, FLOAT))
    mla = make(backend, shape, FLOAT)
    pages, tables, q = step = make_step(shape, kv_lens, q_lens, page_size, FLOAT, DEVICE)
    row = 0
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        if not kv_len:
            q[row : row + q_len] = torch.nan
        row += q_len
    mla.plan(pages, tables, kv_lens, q_lens)
    for layer in range(2):
        expected = by_sdpa(shape, step, kv_lens, q_lens, layer)
        if expected.count_nonzero():
            assert relative_error(mla.run(q, layer), expected) < TOLERANCE[FLOAT]
        else:
            assert not mla.run(q, layer).count_nonzero()


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "torch"])
def test_strided_queries_and_tables_as_tensors(backend: str) -> None:
    shape = V3 if ON_GPU else SHAPE
    kv_lens, q_lens = [70, 0, 9], [2, 1, 1]
    mla = make(backend, shape, FLOAT)
    pages, tables, q = step = make_step(shape, kv_lens, q_lens, 8, FLOAT, DEVICE)
    wide = torch.full((len(q), shape.num_heads + 2, shape.width + 8), torch.nan, dtype=FLOAT, device=DEVICE)
    view = wide[:, 1:-1, 8:]
    view.copy_(q)
    longest = max(map(len, tables))
    padded = torch.tensor([[*table, *[-7] * (longest - len(table))] for table in tables], dtype=torch.int32)
    mla.plan(pages, padded, torch.tensor(kv_lens), torch.tensor(q_lens))
    assert relative_error(mla.run(view, 0), by_sdpa(shape, step, kv_lens, q_lens, 0)) < TOLERANCE[FLOAT]


@pytest.mark.parametrize("backend", ["triton", "flashinfer", *CPU])
def test_a_nan_stays_in_its_request(backend: str) -> None:
    """One request's entries and queries are NaN; its neighbours, which share a program or a split with it, are not."""
    shape = V3 if ON_GPU else SHAPE
    kv_lens, q_lens = [40, 300 if ON_GPU else 60, 40], [2, 2, 1]
    mla = make(backend, shape, FLOAT)
    pages, tables, q = step = make_step(shape, kv_lens, q_lens, 8, FLOAT, DEVICE)
    expected = by_sdpa(shape, step, kv_lens, q_lens, 1)
    pages[tables[1][:-1]] = torch.nan
    q[2:4] = torch.nan
    mla.plan(pages, tables, kv_lens, q_lens)
    got = mla.run(q, 1)
    assert got[2:4].isnan().all()
    keep = [0, 1, 4]
    assert relative_error(got[keep], expected[keep]) < TOLERANCE[FLOAT]


@pytest.mark.parametrize("backend", ["triton", "flashinfer", *CPU])
def test_entries_stored_after_the_plan_count(backend: str) -> None:
    shape = V3 if ON_GPU else SHAPE
    mla = make(backend, shape, FLOAT)
    pages, tables, q = step = make_step(shape, [8, 10], [1, 1], 8, FLOAT, DEVICE)
    entry = pages[tables[1][1], 0, 1].clone()
    pages[tables[1][1], 0, 1] = torch.nan
    mla.plan(pages, tables, [8, 10])
    pages[tables[1][1], 0, 1] = entry
    assert relative_error(mla.run(q, 0), by_sdpa(shape, step, [8, 10], [1, 1], 0)) < TOLERANCE[FLOAT]


@pytest.mark.parametrize("backend", ["triton", "flashinfer", *CPU])
def test_plans_follow_each_other_and_other_pools(backend: str) -> None:
    """Also with more requests and pages than the first buffers hold, and without a request."""
    shape = V3 if ON_GPU else SHAPE
    mla = make(backend, shape, FLOAT)
    for kv_lens in ([16, 9], [17, 10], [3], [], [5] * (300 if ON_GPU else 3)):
        q_lens = [1] * len(kv_lens)
        pages, tables, q = step = make_step(shape, kv_lens, q_lens, 8, FLOAT, DEVICE)
        mla.plan(pages, tables, kv_lens)
        got = mla.run(q, 1)
        assert got.shape == (len(kv_lens), shape.num_heads, shape.kv_lora_rank)
        if kv_lens:
            assert relative_error(got, by_sdpa(shape, step, kv_lens, q_lens, 1)) < TOLERANCE[FLOAT]


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "torch"])
def test_large_scores_do_not_overflow(backend: str) -> None:
    shape = V3 if ON_GPU else SHAPE
    mla = make(backend, shape, FLOAT)
    pages, tables, q = make_step(shape, [150], [1], 8, FLOAT, DEVICE)
    mla.plan(pages, tables, [150])
    assert mla.run(q * 1e4, 0).isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_offsets_beyond_32_bits(backend: str) -> None:
    """Pages that lie beyond 2^32 elements; on CPU, beyond 2^31, the pool is virtual memory of which a few pages are touched."""
    shape = V3 if ON_GPU else SHAPE
    page_size, layers = (64, 61) if ON_GPU else (64, 1 << 12)
    num_pages = (5 << 32 if ON_GPU else 5 << 29) // (layers * page_size * shape.width) + 3  # 43 GB, 11 GB
    mla = make(backend, shape, FLOAT)
    pages = torch.empty(num_pages, layers, page_size, shape.width, dtype=FLOAT, device=DEVICE)
    chosen = [num_pages - 1, 0, num_pages // 2, num_pages - 3]
    entries = torch.randn(4, page_size, shape.width, generator=generator(backend), device=DEVICE).to(FLOAT)
    for page, values in zip(chosen, entries, strict=True):
        pages[page, layers - 1] = values
    q = torch.randn(3, shape.num_heads, shape.width, generator=generator("q"), device=DEVICE).to(FLOAT)
    mla.plan(pages, [chosen[:3], chosen[3:]], [130, 60], [2, 1])
    got = mla.run(q, layers - 1)
    del pages
    step = entries[:, None], [[0, 1, 2, -1], [3, -1]], q
    assert relative_error(got, by_sdpa(shape, step, [130, 60], [2, 1], 0)) < TOLERANCE[FLOAT]


@pytest.mark.parametrize("backend", ["torch", "reference", "triton", "flashinfer"])
def test_rejects_lengths_that_the_contract_excludes(backend: str) -> None:
    shape = V3 if ON_GPU else SHAPE
    pages, tables, _ = make_step(shape, [8], [1], 8, FLOAT, DEVICE)
    mla = make(backend, shape, FLOAT)
    for kv_len, q_len in ((8, 0), (8, 5), (8, 9), (1, 2), (-1, 1)):
        with pytest.raises(AssertionError):
            mla.plan(pages, tables, [kv_len], [q_len])
    mla.plan(pages, tables, [4], [4])


@pytest.mark.parametrize("backend", CPU)
def test_a_pool_is_more_than_its_address_and_shape(backend: str) -> None:
    """Every second layer, after the first half of them: both views begin at the same entry."""
    pool = torch.randn(3, 4, 8, SHAPE.width, generator=generator("views", "cpu"))
    q = torch.randn(1, 3, SHAPE.width, generator=generator("views q", "cpu"))
    mla = create_mla_decode(SHAPE, backend=backend)
    for pages in (pool[:, :2], pool[:, ::2]):
        mla.plan(pages, [[2, 0, -1]], [11])
        assert relative_error(mla.run(q, 1), by_sdpa(SHAPE, (pages, [[2, 0, -1]], q), [11], [1], 1)) < 1e-5


def test_rejects_dims_that_flashinfer_lacks() -> None:
    with pytest.raises(BackendError, match="kv_lora_rank 512"):
        create_mla_decode(SHAPE, backend="flashinfer", device_type="cuda", dtype=torch.bfloat16)
    assert "bfloat16" in why_not_flashinfer(V3, torch.float32) and not why_not_flashinfer(V3, torch.bfloat16)


@pytest.mark.parametrize("heads,clusters,rows", [(128, 66, 128), (64, 132, 64), (20, 132, 64)])
@pytest.mark.parametrize("lengths", ["equal", "uneven"])
def test_equal_shares_cover_every_entry_once(heads: int, clusters: int, rows: int, lengths: str) -> None:
    """Every tile of a request's rows has all its KV, its partial results their own memory, merged by somebody; nobody works long."""
    kv = np.array([5000] * 60 if lengths == "equal" else [0, 1, *range(100, 9000, 150), 2], dtype=np.int32)
    q, pages = np.full(len(kv), 1 if lengths == "uneven" else 2, dtype=np.int32), -(-kv // 64)
    work = equal_shares(q, kv, pages, num_heads=heads, num_clusters=clusters, rows=rows, num_sms=132)
    assert work is not None
    assert len(work.q_indptr) <= most_items(q, num_heads=heads, num_clusters=clusters, rows=rows) <= MAX_ITEMS
    cluster = np.repeat(np.arange(clusters), np.diff(work.work_indptr))
    load = np.bincount(cluster, weights=work.kv_end - work.kv_start, minlength=clusters)
    tiles = -(-int(q[0]) * heads // rows)
    assert load.max() < 1.06 * kv.sum() / (clusters // tiles)
    merged = [range(a, b) for a, b in zip(work.merge_packed_offset_start, work.merge_packed_offset_end, strict=True)]
    rows_merged, partial_rows, rows_split = sorted(row for span in merged for row in span), set[int](), list[int]()
    for request in range(len(kv)):
        for tile in range(0, int(q[request]) * heads, rows):
            items = np.flatnonzero((work.q_indptr == q[:request].sum()) & (work.q_start == tile))
            items = items[np.argsort(work.kv_start[items])]
            assert (work.kv_indptr[items] == pages[:request].sum()).all() and (work.kv_len[items] == kv[request]).all()
            begins, ends, partial = work.kv_start[items], work.kv_end[items], work.partial_indptr[items]
            assert begins[0] == 0 and ends[-1] == kv[request] and (begins[1:] == ends[:-1]).all() and (begins % 64 == 0).all()
            height = min(rows, int(q[request]) * heads - tile)
            assert partial[0] == -1 if len(items) == 1 else (np.diff(partial) == height).all()
            if len(items) > 1:
                rows_split += range(int(q[:request].sum()) * heads + tile, int(q[:request].sum()) * heads + tile + height)
                mine = set(range(partial[0], partial[-1] + height))
                assert not mine & partial_rows
                partial_rows |= mine
                at = np.flatnonzero(work.merge_packed_offset_start == rows_split[-height])[0]
                assert work.merge_partial_packed_offset_start[at] == partial[0] and work.merge_partial_stride[at] == height
                assert work.merge_partial_packed_offset_end[at] == partial[-1] + height
    assert rows_merged == sorted(rows_split) and max(partial_rows) < 2 * clusters * rows


def test_work_items_beyond_flashinfers_arrays_are_foreseen() -> None:
    q, kv = np.full(5000, 4, np.int32), np.full(5000, 700, np.int32)
    work = equal_shares(q, kv, -(-kv // 64), num_heads=128, num_clusters=66, rows=128, num_sms=132)
    assert work is not None
    assert MAX_ITEMS < len(work.q_indptr) <= most_items(q, num_heads=128, num_clusters=66, rows=128)


def test_equal_shares_are_for_the_flashinfer_that_is_known() -> None:
    assert all(map(replaces_work_of, ("0.6.13", "0.6.13+cu130")))
    assert not any(map(replaces_work_of, ("0.6.12", "0.6.14", "0.6.130", "0.6.13.post1", "0.6.13rc1", "0.7.0", "0.0.0+unknown", "")))


@pytest.mark.parametrize("kv_lens,q_lens,large", [([9] * 64, [2] * 64, True), ([9] * 63, [2] * 63, False), ([9] * 64, None, False)])
def test_a_step_goes_to_the_faster_backend(kv_lens: list[int], q_lens: list[int] | None, large: bool) -> None:
    """On tiny pages, with the torch form as Triton's stand-in and the reference as FlashInfer's."""
    shape = MlaDecodeShape(128, 4, 2, 0.3)
    assert prefers_triton(shape, len(kv_lens), sum(q_lens or [1] * len(kv_lens))) == large
    ours, theirs = TorchMlaDecode(shape), ReferenceMlaDecode(shape)
    pages = torch.randn(2, 1, 64, shape.width, generator=generator("by size", "cpu"))
    mla = MlaDecodeBySize(shape, theirs, ours)
    mla.plan(pages, [[1]] * len(kv_lens), kv_lens, q_lens)
    assert mla._planned is (ours if large else theirs)
    mla.plan(pages[:, :, ::2], [[1]] * len(kv_lens), kv_lens, q_lens)
    assert mla._planned is theirs
    if large:
        q = torch.randn(128, 128, shape.width, generator=generator("by size q", "cpu"))
        mla.plan(pages, [[1]] * 64, kv_lens, q_lens)
        assert mla.run(q, 0).shape == (128, 128, 4)


def test_imbalance_is_that_of_flashinfer() -> None:
    """Four rounds of 66 clusters for 256 tiles; lengths in random order; a remainder of 136 entries a request."""
    uneven = np.random.default_rng(0).permutation(np.linspace(1000, 9000, 128).astype(np.int32))
    for kv, q_len, low, high in ((np.full(128, 5000), 2, 1.03, 1.04), (uneven, 2, 1.15, 1.25), (np.full(64, 5000), 1, 1.2, 1.3)):
        got = flashinfer_imbalance(np.full(len(kv), q_len, np.int32), kv.astype(np.int32), num_heads=128, num_clusters=66, rows=128)
        assert low < got < high


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_limits_are_kept(backend: str) -> None:
    shape = V3 if ON_GPU else SHAPE
    mla = make(backend, shape, FLOAT, PlanLimits(max_requests=2, max_pages=4))
    for kv_lens, fits in (([16, 16], True), ([16, 17], False), ([1, 1, 1], False)):
        pages, tables, _ = make_step(shape, kv_lens, [1] * len(kv_lens), 8, FLOAT, DEVICE)
        if fits:
            mla.plan(pages, tables, kv_lens)
        else:
            with pytest.raises(AssertionError, match="limits"):
                mla.plan(pages, tables, kv_lens)


@gpu_only
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("heads", [128, 16])
def test_a_captured_run_follows_later_plans(backend: str, heads: int) -> None:
    """One graph for (requests, queries); lengths, page tables, padding and the spread of queries change between replays."""
    if not ON_GPU:
        pytest.skip("captures CUDA graphs")
    shape = MlaDecodeShape(heads, 512, 64, 0.1)
    mla = make(backend, shape, FLOAT, PlanLimits(max_requests=6, max_pages=6 * 128))
    lengths = [[100, 7, 2000, 64], [5000, 4000, 3000, 8000], [0, 3, 0, 65]]
    plans = [*((kv_lens, [2] * 4) for kv_lens in lengths), ([9, 900, 77, 1], [4, 2, 1, 1])]
    pool = torch.empty(512, 2, 64, shape.width, dtype=FLOAT, device=DEVICE)
    q = torch.empty(8, heads, shape.width, dtype=FLOAT, device=DEVICE)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0)
    for i, (kv_lens, q_lens) in enumerate(plans):
        pages, tables, queries = step = make_step(shape, kv_lens, q_lens, 64, FLOAT, DEVICE, label=str(i))
        pool.fill_(torch.nan)
        pool[: len(pages)] = pages
        q.copy_(queries)
        mla.plan(pool, tables, kv_lens, q_lens)
        if i == 0:
            mla.run(q, 1)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = mla.run(q, 1)
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, by_sdpa(shape, step, kv_lens, q_lens, 1)) < TOLERANCE[FLOAT], (kv_lens, q_lens)


NUM_PAGES, LAYERS, PAGE = 10112, 61, 64
PEAK, BANDWIDTH = 989e12, 4.3e12


def _tables(kv_lens: list[int]) -> torch.Tensor:
    """Shuffled pages for every request; more pages than the pool holds begin again."""
    counts = [-(-kv_len // PAGE) for kv_len in kv_lens]
    order = torch.randperm(NUM_PAGES, generator=generator("tables", "cpu")).to(torch.int32).repeat(2)
    table, at = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32), 0
    for i, count in enumerate(counts):
        table[i, :count] = order[at : at + count]
        at = (at + count) % NUM_PAGES
    return table


def _flops(kv_lens: list[int], q_len: int) -> float:
    return 2.0 * q_len * V3.num_heads * sum(kv_lens) * (V3.width + V3.kv_lora_rank)


def _plan_us(mla: MlaDecode, *args: object) -> float:
    samples = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        mla.plan(*args)  # type: ignore[arg-type]
        samples.append((time.perf_counter() - began) * 1e6)
    return statistics.median(samples)


def bench_mla_decode() -> Iterator[Row]:
    """Page-major pool of 45 GB, layers rotated, so that each call's KV is cold."""
    rng = generator("bench")
    pages = torch.empty(NUM_PAGES, LAYERS, PAGE, V3.width, dtype=torch.bfloat16, device="cuda")
    for layer in range(0, LAYERS, 20):
        pages[:, layer] = torch.randn(NUM_PAGES, PAGE, V3.width, generator=rng, device="cuda", dtype=torch.bfloat16)
    layers = list(range(0, LAYERS, 20))
    contiguous = [pages[:, layer].contiguous() for layer in layers]
    backends = ["flashinfer", "triton"]

    def planned(backend: str, pool: torch.Tensor, kv_lens: list[int], q_len: int) -> MlaDecode:
        mla = create_mla_decode(V3, backend=backend, device_type="cuda", dtype=torch.bfloat16)
        mla.plan(pool, _tables(kv_lens), kv_lens, [q_len] * len(kv_lens))
        return mla

    def queries(batch: int, q_len: int) -> torch.Tensor:
        return torch.randn(batch * q_len, V3.num_heads, V3.width, generator=rng, device="cuda", dtype=torch.bfloat16)

    def times(kv_lens: list[int], q_len: int, with_contiguous: bool = False) -> dict[str, float]:
        q, variants, outs = queries(len(kv_lens), q_len), {}, {}
        for backend in backends:
            mla = planned(backend, pages, kv_lens, q_len)
            outs[backend] = mla.run(q, layers[1])
            variants[backend] = [partial(mla.run, q, layer) for layer in layers]
        assert relative_error(outs["triton"], outs["flashinfer"]) < 1e-2
        if with_contiguous:
            planners = [planned("flashinfer", pool[:, None], kv_lens, q_len) for pool in contiguous]
            variants["contiguous"] = [partial(mla.run, q, 0) for mla in planners]
        return compare_us(variants, replays=20)

    uniform = [5000] * 128
    k1 = times(uniform, 2, with_contiguous=True)
    best = "triton" if prefers_triton(V3, 128, 256) else "flashinfer"  # what "auto" takes
    ours = k1[best]
    rate = _flops(uniform, 2) / ours / 1e6
    told = f"flashinfer {k1['flashinfer']:.0f} us, triton {k1['triton']:.0f} us, flashinfer contiguous {k1['contiguous']:.0f} us"
    yield Row("K1", ours / k1["contiguous"], "x", "lower", 1.03, 0.92, f"B128 q2 KV 5000, page-major {best} / contiguous; {told}")
    floor = _flops(uniform, 2) / PEAK * 1e6
    yield Row("K1-us", ours, "us", "lower", None, 540, f"{best}, {rate:.0f} TFLOP/s; floor {floor:.0f} us at 989 TFLOP/s")
    ragged = torch.linspace(1000, 9000, 128).int()[torch.randperm(128, generator=generator("ragged", "cpu"))].tolist()
    k1b = times(ragged, 2)
    share = {name: 100 * _flops(ragged, 2) / k1b[name] / 1e6 / rate for name in backends}
    told = ", ".join(f"{name} {k1b[name]:.0f} us, {share[name]:.0f} %" for name in backends)
    yield Row("K1b", share[best], "%", "higher", 85, 95, f"KV 1k-9k, mean 5k, of K1's rate; {told}")
    for batch in (1, 16, 64, 128):
        for q_len in (1, 2):
            kv_lens = [5000] * batch
            found = times(kv_lens, q_len) if (batch, q_len) != (128, 2) else k1
            floor = max(_flops(kv_lens, q_len) / PEAK, batch * 5000 * V3.width * 2 / BANDWIDTH) * 1e6
            told = ", ".join(f"{name} {found[name]:.1f} us" for name in backends)
            value, told = found["flashinfer"] / found["triton"], f"KV 5000, flashinfer / our triton: {told}; floor {floor:.0f} us"
            yield Row(f"K9-mla_decode-B{batch}q{q_len}", value, "x", "higher", None, None, told)
    lists = [row[:79].tolist() for row in _tables(uniform)]
    for backend in backends:
        mla = create_mla_decode(V3, backend=backend, device_type="cuda", dtype=torch.bfloat16)
        host = [_plan_us(mla, pages, tables, uniform, [2] * 128) for tables in (_tables(uniform), lists)]
        told = f"{backend}, host, 128 requests of 79 pages, page table as a tensor; as lists {host[1]:.0f} us"
        yield Row(f"mla_decode-plan-{backend}", host[0], "us", "lower", None, None, told)
