"""Decode's absorbed forward: equals the MHA form and the reference, in bounded memory, and requests do not touch each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.model.reference import Reference
from tests.forward_rig import ForwardRig
from tests.tiny_model import YARN

VARIANTS = {
    "plain": {},
    "yarn_v12": {"rope_scaling": YARN, "v_head_dim": 12},
    "no_q_lora": {"q_lora_rank": None, "rope_scaling": YARN},
    "one_group": {"n_group": 1, "topk_group": 1},
    "no_shared": {"n_shared_experts": 0, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("prompt", [1, 60, 125])
def test_after_prefill_equals_reference(tmp_path: Path, changes: dict[str, object], prompt: int) -> None:
    """Eight tokens from a prefilled prompt on: positions 1..8, and across the page edges 63|64|65 and 127|128."""
    rig = ForwardRig(tmp_path, **changes)
    ids = rig.ids(prompt + 8)
    expected = Reference(rig.config, rig.tensors).forward(torch.tensor(ids))
    rig.prefill_all(ids[:prompt], prompt)
    for position in range(prompt, prompt + 8):
        got = rig.decode_step({0: (ids[position], position)})
        assert (got[0] - expected[position]).abs().max() < 1e-4


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_absorbed_equals_mha_in_float64(tmp_path: Path, changes: dict[str, object], fp8: bool) -> None:
    """B58: the same weights in both forms; kv_b is split per head as [nope | value], whatever the two sizes are."""
    rig = ForwardRig(tmp_path, torch.float64, fp8=fp8, **changes)
    ids = rig.ids(130)
    for position in (1, 17, 63, 64, 65, 127, 128):
        rig.reset()
        rig.prefill_all(ids[:position], position)
        assert (rig.decode_step({0: (ids[position], position)})[0] - rig.one_shot(ids[: position + 1])).abs().max() < 1e-10


def test_position_0_needs_no_prefill(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path, torch.float64)
    assert (rig.decode_step({0: (7, 0)})[0] - rig.one_shot([7])).abs().max() < 1e-10


def test_ragged_batch_equals_each_alone(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path, torch.float64)
    prompts = [rig.ids(n) for n in (3, 64, 127, 200)]
    for request, ids in enumerate(prompts):
        rig.prefill_all(ids[:-1], 200, request)
    order = (2, 0, 3, 1)
    got = rig.decode_step({request: (prompts[request][-1], len(prompts[request]) - 1) for request in order})
    for row, request in enumerate(order):
        assert (got[row] - rig.one_shot(prompts[request])).abs().max() < 1e-10


def test_fp32_batch_mates_change_rounding_only(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path, requests=20)
    prompts = [rig.ids(5 + 3 * i) for i in range(20)]
    for request, ids in enumerate(prompts):
        rig.prefill_all(ids[:-1], 100, request)
    together = rig.decode_step({i: (ids[-1], len(ids) - 1) for i, ids in enumerate(prompts)})
    for i, ids in enumerate(prompts):
        alone = rig.decode_step({i: (ids[-1], len(ids) - 1)})
        assert (together[i] - alone[0]).abs().max() < 1e-5


def test_unwritten_memory_is_never_read(tmp_path: Path) -> None:
    """B16: pages start as NaN, and so does every slot behind a request's last token, a freed token's included."""
    rig = ForwardRig(tmp_path)
    ids = rig.ids(70)
    rig.prefill_all(ids[:66], 66)
    assert rig.decode_step({0: (ids[66], 66)}).isfinite().all()
    written = ~rig.pages.isnan().any(dim=-1)
    assert int(written.sum()) == 67 * rig.config.num_hidden_layers


def test_nan_of_one_request_stays_there(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path)
    prompts = [rig.ids(n) for n in (30, 70, 20)]
    for request, ids in enumerate(prompts):
        rig.prefill_all(ids[:-1], 100, request)
    tokens = {i: (ids[-1], len(ids) - 1) for i, ids in enumerate(prompts)}
    clean = rig.decode_step(tokens)
    rig.pages[rig.tables[1][0], :, 3] = torch.nan
    got = rig.decode_step(tokens)
    assert got[1].isnan().all()
    # the NaN row is routed elsewhere, so its mates' experts see other numbers of rows: equal up to rounding
    assert torch.allclose(got[[0, 2]], clean[[0, 2]], rtol=1e-5, atol=1e-5)


def test_reused_page_is_read_anew(tmp_path: Path) -> None:
    """A page that another request wrote before must not be remembered in any form."""
    rig = ForwardRig(tmp_path)
    first, second = rig.ids(65), rig.ids(65)
    rig.prefill_all(first[:64], 64)
    rig.decode_step({0: (first[64], 64)})
    rig.prefill_all(second[:64], 64)
    assert (rig.decode_step({0: (second[64], 64)})[0] - rig.one_shot(second)).abs().max() < 1e-5


def test_second_pool_is_not_mixed_with_the_first(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path)
    ids = rig.ids(65)
    rig.prefill_all(ids[:64], 64)
    expected = rig.decode_step({0: (ids[64], 64)})
    rig.pages, old = rig.pages.clone(), rig.pages
    old.fill_(torch.nan)
    assert torch.equal(rig.decode_step({0: (ids[64], 64)}), expected)


class LargestTensor(TorchDispatchMode):
    """Watches every op's outputs that own their memory; views of the pool are not built, only looked through."""

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__()
        self.pool, self.largest, self.name, self.num_ops = pool.untyped_storage().data_ptr(), 0, "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_ops += 1
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.pool and tensor.numel() > self.largest:
                self.largest, self.name = tensor.numel(), str(func)
        return result


@pytest.mark.parametrize(("heads", "batch"), [(4, 1), (4, 3), (2, 1), (16, 2)])
def test_never_builds_keys_of_all_heads(tmp_path: Path, heads: int, batch: int) -> None:
    """No tensor of kv_len x num_heads x 64 elements or more a request, however few heads there are."""
    rig = ForwardRig(
        tmp_path, requests=batch, num_attention_heads=heads, num_key_value_heads=heads, qk_nope_head_dim=64, v_head_dim=64,
        kv_lora_rank=256, qk_rope_head_dim=64,
    )  # fmt: skip
    rig.reset(pages_each=16)
    kv_len = 1000
    ids = rig.ids(kv_len)
    for request in range(batch):
        rig.prefill.run(rig.pages, [rig.chunk(ids, 0, kv_len - 1, request, want_logits=False)])
    with LargestTensor(rig.pages) as watch:
        rig.decode_step(dict.fromkeys(range(batch), (ids[-1], kv_len - 1)))
    assert watch.num_ops > 50
    assert watch.largest < kv_len * heads * 64, f"{watch.name} built {watch.largest} elements"
    assert watch.largest <= max(kv_len * heads * batch, batch * rig.config.vocab_size, batch * heads * rig.config.latent_width)


def test_watch_sees_an_up_projection(tmp_path: Path) -> None:
    """The test above can fail: prefill's MHA form does build such keys."""
    rig = ForwardRig(tmp_path, requests=1, qk_nope_head_dim=64, v_head_dim=64)
    ids = rig.ids(200)
    with LargestTensor(rig.pages) as watch:
        rig.prefill_all(ids, 200)
    assert watch.largest >= 200 * 4 * 64


def test_pages_of_bfloat16(tmp_path: Path) -> None:
    """What prefill and decode store rounded, decode reads back within bf16's error."""
    rig = ForwardRig(tmp_path)
    ids = rig.ids(67)
    exact = rig.one_shot(ids)
    rig.pages = rig.pages.to(torch.bfloat16)
    rig.prefill_all(ids[:65], 64)
    rig.decode_step({0: (ids[65], 65)})
    got = rig.decode_step({0: (ids[66], 66)})[0]
    assert 0 < (got - exact).norm() / exact.norm() < 0.02


def test_empty_batch(tmp_path: Path) -> None:
    rig = ForwardRig(tmp_path)
    assert rig.decode_step({}).shape == (0, rig.config.vocab_size)

