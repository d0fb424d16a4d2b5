import pytest
import torch

from kernels.mla_decode import MlaDecodeShape, create_mla_decode

BACKENDS = ["torch", "reference"]
SHAPE = MlaDecodeShape(num_heads=3, kv_lora_rank=12, rope_dim=4, softmax_scale=0.3)
PAGE_SIZE, NUM_LAYERS = 8, 2


def make_case(kv_lens: list[int]) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    """Pages of NaN with each request's entries written through a shuffled page table, and a query a request."""
    generator = torch.Generator().manual_seed(sum(kv_lens))
    counts = [-(-kv_len // PAGE_SIZE) for kv_len in kv_lens]
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    pages = torch.full((len(free), NUM_LAYERS, PAGE_SIZE, SHAPE.width), torch.nan, dtype=torch.float64)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for table, kv_len in zip(tables, kv_lens, strict=True):
        for i in range(kv_len):
            pages[table[i // PAGE_SIZE], :, i % PAGE_SIZE] = torch.randn(NUM_LAYERS, SHAPE.width, generator=generator, dtype=torch.float64)
    q = torch.randn(len(kv_lens), SHAPE.num_heads, SHAPE.width, generator=generator, dtype=torch.float64)
    return pages, tables, q


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_lens", [[1], [7], [8], [9], [16, 1, 17], [40, 8, 3, 25]], ids=str)
def test_equals_sdpa_on_gathered_entries(backend: str, kv_lens: list[int]) -> None:
    pages, tables, q = make_case(kv_lens)
    mla = create_mla_decode(SHAPE, backend=backend)
    mla.plan(pages, tables, kv_lens)
    for layer in range(NUM_LAYERS):
        got = mla.run(q, layer)
        assert got.shape == (len(kv_lens), SHAPE.num_heads, SHAPE.kv_lora_rank)
        for i, (table, kv_len) in enumerate(zip(tables, kv_lens, strict=True)):
            entries = pages[table, layer].flatten(0, 1)[:kv_len]
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[i, :, None], entries.expand(3, -1, -1), entries[:, :12].expand(3, -1, -1), scale=0.3
            )
            assert torch.allclose(got[i], expected[:, 0], atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_stored_after_the_plan_count(backend: str) -> None:
    pages, tables, q = make_case([8, 10])
    entry = pages[tables[1][1], 0, 1].clone()
    pages[tables[1][1], 0, 1] = torch.nan
    mla = create_mla_decode(SHAPE, backend=backend)
    mla.plan(pages, tables, [8, 10])
    pages[tables[1][1], 0, 1] = entry
    got = mla.run(q, 0)
    reference = create_mla_decode(SHAPE, backend="reference")
    reference.plan(pages, tables, [8, 10])
    assert torch.allclose(got, reference.run(q, 0), atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_follow_each_other_and_other_pools(backend: str) -> None:
    mla = create_mla_decode(SHAPE, backend=backend)
    for kv_lens in ([16, 9], [17, 10], [3]):
        pages, tables, q = make_case(kv_lens)
        mla.plan(pages, tables, kv_lens)
        reference = create_mla_decode(SHAPE, backend="reference")
        reference.plan(pages, tables, kv_lens)
        assert torch.allclose(mla.run(q, 1), reference.run(q, 1), atol=1e-12)


def test_large_scores_do_not_overflow() -> None:
    pages, tables, q = make_case([20])
    mla = create_mla_decode(SHAPE, backend="torch")
    mla.plan(pages, tables, [20])
    assert mla.run(q * 1e4, 0).isfinite().all()
