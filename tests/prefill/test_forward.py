"""Prefill's forward: chunks and cached prefixes change nothing, requests do not touch each other, it equals the reference."""

from pathlib import Path

import pytest
import torch

from services.model.reference import Reference
from tests.forward_rig import ForwardRig
from tests.tiny_model import YARN

VARIANTS = {
    "plain": {},
    "yarn": {"rope_scaling": YARN, "v_head_dim": 12},
    "no_q_lora": {"q_lora_rank": None},
    "one_group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "no_shared": {"n_shared_experts": 0, "first_k_dense_replace": 0},
    "all_dense": {"first_k_dense_replace": 3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_equals_reference(tmp_path: Path, changes: dict[str, object]) -> None:
    rig = ForwardRig(tmp_path, **changes)
    ids = rig.ids(130)
    expected = Reference(rig.config, rig.tensors).forward(torch.tensor(ids))
    got = rig.prefill_all(ids, 65)
    assert (got - expected[[64, 129]]).abs().max() < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 127, 128, 129])
def test_page_edges_equal_reference(tmp_path: Path, num_tokens: int) -> None:
    rig = ForwardRig(tmp_path)
    ids = rig.ids(num_tokens)
    expected = Reference(rig.config, rig.tensors).forward(torch.tensor(ids))[-1]
    assert (rig.prefill_all(ids, num_tokens)[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 4, 5, 23, 64, 65])
def test_chunked_equals_one_shot_in_float64(tmp_path: Path, chunk: int) -> None:
    """B14: a prefix merged with the wrong base of logarithm shows here at once."""
    rig = ForwardRig(tmp_path, torch.float64, rope_scaling=YARN)
    ids = rig.ids(23 if chunk < 64 else 150)
    got = rig.prefill_all(ids, chunk)
    for i, logits in enumerate(got):
        expected = rig.one_shot(ids[: min((i + 1) * chunk, len(ids))])
        assert (logits - expected).abs().max() < 1e-9


@pytest.mark.parametrize("cached", [4, 8, 20, 64, 100, 128])
def test_cached_prefix_equals_one_shot_in_float64(tmp_path: Path, cached: int) -> None:
    rig = ForwardRig(tmp_path, torch.float64)
    ids = rig.ids(cached + 3)
    rig.prefill.run(rig.pages, [rig.chunk(ids, 0, cached, want_logits=False)])
    got = rig.prefill.run(rig.pages, [rig.chunk(ids, cached, cached + 3)])
    assert (got[0] - rig.one_shot(ids)).abs().max() < 1e-9


def test_long_prefix_is_merged_piece_by_piece_in_float64(tmp_path: Path) -> None:
    """More than one piece of 512 cached tokens, the last one ending inside a page."""
    rig = ForwardRig(tmp_path, torch.float64, requests=1)
    rig.reset(pages_each=10)
    ids = rig.ids(600)
    rig.prefill.run(rig.pages, [rig.chunk(ids, 0, 590, want_logits=False)])
    assert (rig.prefill.run(rig.pages, [rig.chunk(ids, 590, 600)])[0] - rig.one_shot(ids)).abs().max() < 1e-9


def test_ragged_batch_equals_each_alone(tmp_path: Path) -> None:
    """Chunks of four requests in one step, two of them continuing a prefix, one without logits, at their own positions."""
    rig = ForwardRig(tmp_path, torch.float64)
    prompts = [rig.ids(n) for n in (1, 70, 130, 9)]
    rig.prefill.run(rig.pages, [rig.chunk(prompts[1], 0, 64, 1, want_logits=False), rig.chunk(prompts[2], 0, 100, 2, want_logits=False)])
    starts = (0, 64, 100, 0)
    batch = [rig.chunk(ids, start, len(ids), i, want_logits=i != 3) for i, (ids, start) in enumerate(zip(prompts, starts, strict=True))]
    got = rig.prefill.run(rig.pages, batch)
    assert got.shape == (3, rig.config.vocab_size)
    for logits, ids in zip(got, prompts, strict=False):
        assert (logits - rig.one_shot(ids)).abs().max() < 1e-9


def test_writes_its_own_slots_only(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path)
    ids = rig.ids(70)
    rig.prefill_all(ids, 70)
    written = ~rig.pages.isnan().any(dim=-1)  # [num_pages, num_layers, page_size]
    expected = torch.zeros_like(written)
    expected[rig.tables[0][0]] = True
    expected[rig.tables[0][1], :, :6] = True
    assert torch.equal(written, expected)
    before = rig.pages[rig.tables[0][0]].clone()
    rig.prefill.run(rig.pages, [rig.chunk([*ids, 7], 70, 71)])
    assert torch.equal(rig.pages[rig.tables[0][0]], before)


def test_nan_of_one_request_stays_there(tmp_path: Path) -> None:
    """B16: a poisoned prefix ruins its own request, the others are as without it."""
    rig = ForwardRig(tmp_path)
    prompts = [rig.ids(n) for n in (30, 70, 20)]
    rig.prefill.run(rig.pages, [rig.chunk(prompts[1], 0, 64, 1, want_logits=False)])
    rig.pages[rig.tables[1][0], :, 3] = torch.nan
    got = rig.prefill.run(rig.pages, [rig.chunk(prompts[0], 0, 30, 0), rig.chunk(prompts[1], 64, 70, 1), rig.chunk(prompts[2], 0, 20, 2)])
    assert got[1].isnan().all()
    assert (got[0] - rig.one_shot(prompts[0])).abs().max() < 1e-5
    assert (got[2] - rig.one_shot(prompts[2])).abs().max() < 1e-5


def test_pages_of_bfloat16(tmp_path: Path) -> None:
    """Entries are rounded when stored: a cached prefix then answers within bf16's error, and the pages are half as large."""
    rig = ForwardRig(tmp_path)
    ids = rig.ids(100)
    exact = rig.one_shot(ids)
    rig.pages = rig.pages.to(torch.bfloat16)
    got = rig.prefill_all(ids, 64)[-1]
    assert rig.pages.dtype == torch.bfloat16
    assert 0 < (got - exact).norm() / exact.norm() < 0.02


def test_nobody_wants_logits(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path)
    assert rig.prefill.run(rig.pages, [rig.chunk(rig.ids(5), 0, 5, want_logits=False)]).shape == (0, rig.config.vocab_size)
    assert rig.prefill.run(rig.pages, []).shape == (0, rig.config.vocab_size)
