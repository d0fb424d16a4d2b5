"""A checkpoint shared among ranks: every weight exactly as often as it should be, no byte of others' read, little memory beside."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from services.decode.absorb import AbsorbedOutput, AbsorbedQuery
from services.model.checkpoint import ITEM_BYTES, read_entries
from services.model.config import load_config
from services.model.loader import load_weights, stream_weights
from services.model.names import SCALE_SUFFIX, model_shapes
from services.model.split import Split
from services.model.weights import AttentionWeights, ModelWeights, MoeWeights
from services.runtime.errors import ConfigError
from tests.tiny_model import random_tensors, tiny_config, tiny_raw, write_checkpoint

ROOT = Path(__file__).parents[2]

# 24 and 28 values a head: no head begins at a block of 128, two ranks share one; hidden 160: partial last blocks
V3 = {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 12, "hidden_size": 160}
V2_LITE = V3 | {"model_type": "deepseek_v2", "architectures": None, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
                "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None, "num_nextn_predict_layers": 0, "n_shared_experts": 2}


def make(folder: Path, changes: dict[str, object], *, fp8: bool) -> Path:
    raw = {key: value for key, value in tiny_raw(**changes).items() if value is not None or key in ("q_lora_rank", "rope_scaling")}
    return write_checkpoint(folder, raw, random_tensors(tiny_config(**changes), seed=50), fp8=fp8, num_shards=3)


def flat(record: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a record with its path."""
    if isinstance(record, torch.Tensor):
        yield prefix, record
    elif isinstance(record, tuple):
        for i, item in enumerate(record):
            yield from flat(item, f"{prefix}.{i}")
    elif is_dataclass(record):
        for field in fields(record):
            yield from flat(getattr(record, field.name), f"{prefix}.{field.name}")


def joined(path: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The TP ranks' parts of one tensor as the whole."""
    name = path.rsplit(".", 1)[-1]
    if name in ("q_b", "kv_b", "o") and ".attention." in path:
        return torch.cat(parts, dim=1 if name == "o" else 0)
    assert all(torch.equal(part, parts[0]) for part in parts[1:]), path
    return parts[0]


@pytest.mark.parametrize(("changes", "fp8"), [(V3, True), (V3, False), (V2_LITE, False)], ids=["v3_fp8", "v3_fp32", "v2_lite"])
@pytest.mark.parametrize(("ep", "tp"), list(itertools.product((1, 2, 4), (1, 2))))
def test_ranks_together_hold_every_weight(ep: int, tp: int, changes: dict[str, object], fp8: bool, tmp_path: Path) -> None:
    """Experts once in the EP group, heads once in the TP group, all else on every rank."""
    config = load_config(make(tmp_path, changes, fp8=fp8))
    whole = load_weights(tmp_path, config)
    ranks = {(e, t): load_weights(tmp_path, config, split=Split(ep_rank=e, ep=ep, tp_rank=t, tp=tp)) for e in range(ep) for t in range(tp)}
    for path, tensor in flat(whole):
        routed = path.endswith((".mlp.gate_up", ".mlp.down")) and tensor.ndim == 3
        groups = [joined(path, [dict(flat(ranks[e, t]))[path] for t in range(tp)]) for e in range(ep)]
        if routed:
            assert all(len(group) == config.n_routed_experts // ep for group in groups)
            assert torch.equal(torch.cat(groups), tensor), path
        else:
            assert all(torch.equal(group, tensor) for group in groups), path


SPLITS = [Split(), Split(ep_rank=2, ep=4), Split(tp_rank=1, tp=2), Split(ep_rank=3, ep=4, tp_rank=1, tp=2)]
COUNT = """
import json, sys
from pathlib import Path
import services.model.loader as loader
from services.model.config import load_config
from services.model.split import Split
folder = Path(sys.argv[1]); config, entries = load_config(folder), loader.read_entries(folder)
loader.read_entries = lambda _: entries  # headers are not what is counted
def count():
    return int(open("/proc/self/io").read().split()[1])
for place in json.loads(sys.argv[2]):
    before = count()
    loader.load_weights(folder, config, split=Split(**place))
    print(count() - before)
"""


def as_json(splits: list[Split]) -> str:
    return json.dumps([{field.name: getattr(split, field.name) for field in fields(split)} for split in splits])


def test_only_what_the_rank_keeps_is_read(tmp_path: Path) -> None:
    """To the byte, by the kernel's own count; the sum it is compared with is made of names and shapes alone."""
    make(tmp_path, V3 | {"v_head_dim": 16}, fp8=True)
    command = [sys.executable, "-c", COUNT, str(tmp_path), as_json(SPLITS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    counted = [int(line) for line in run.stdout.split()]
    for split, number in zip(SPLITS, counted, strict=True):
        overhead = number - kept_bytes(tmp_path, split)
        assert 0 <= overhead < 600, f"{split}: {overhead}"  # reading the counter itself


def kept_bytes(folder: Path, split: Split) -> int:
    wanted = 0
    for name, entry in read_entries(folder).items():
        if name.startswith("model.layers.3.") or name.endswith(SCALE_SUFFIX):
            continue  # the MTP layer; scales are counted with their weights
        expert = int(name.split(".experts.")[1].split(".")[0]) if ".mlp.experts." in name else None
        if expert is not None and expert * split.ep // 8 != split.ep_rank:
            continue
        rows, columns = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
        first_row = first_column = 0
        if "q_b_proj" in name or "kv_b_proj" in name:
            rows //= split.tp
            first_row = rows * split.tp_rank
        elif "o_proj" in name:
            columns //= split.tp
            first_column = columns * split.tp_rank
        wanted += rows * columns * ITEM_BYTES[entry.dtype]
        if entry.dtype == "F8_E4M3":
            row_blocks = math.ceil((first_row + rows) / 128) - first_row // 128
            wanted += 4 * row_blocks * (math.ceil((first_column + columns) / 128) - first_column // 128)
    return wanted


def test_half_the_heads_are_half_the_attention_b58(tmp_path: Path) -> None:
    """FP8, heads across block borders: outputs of both TP ranks add up, in either form of attention."""
    config = load_config(make(tmp_path, V3, fp8=True))
    half = dataclasses.replace(config, num_attention_heads=4)

    def attention(weights: ModelWeights) -> AttentionWeights:
        layer = weights.layers[1].attention
        return dataclasses.replace(layer, **{f.name: getattr(layer, f.name).double() for f in fields(layer)})

    whole = attention(load_weights(tmp_path, config))
    parts = [attention(load_weights(tmp_path, config, split=Split(tp_rank=rank, tp=2))) for rank in range(2)]
    generator = torch.Generator().manual_seed(51)
    q = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    attended = torch.randn(5, 8, 32, generator=generator, dtype=torch.float64)
    queries = [AbsorbedQuery(half, part, "auto")(q) for part in parts]
    torch.testing.assert_close(torch.cat(queries, dim=1), AbsorbedQuery(config, whole, "auto")(q), atol=1e-12, rtol=0)
    outputs = [AbsorbedOutput(half, part, "auto")(attended[:, 4 * i : 4 * i + 4]) for i, part in enumerate(parts)]
    torch.testing.assert_close(sum(outputs), AbsorbedOutput(config, whole, "auto")(attended), atol=1e-12, rtol=0)


def test_splits_that_a_model_does_not_allow(tmp_path: Path) -> None:
    config = load_config(make(tmp_path, V3, fp8=False))
    for split, sentence in [
        (Split(ep=3), r"ep is 3 but it must divide n_routed_experts \(8\)"),
        (Split(tp=3), r"tp is 3 but it must divide num_attention_heads \(8\)"),
        (Split(ep=2, ep_rank=2), r"ep_rank is 2 but ranks go from 0 to ep - 1 \(1\)"),
        (Split(tp=0), "tp is 0 but it must divide"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            load_weights(tmp_path, config, split=split)
    moe = load_weights(tmp_path, config, split=Split(ep=4, ep_rank=1)).layers[1].mlp
    assert isinstance(moe, MoeWeights) and moe.down.shape == (2, 160, 32) and moe.gate.shape == (8, 160)


PEAK = """
import json, sys
from pathlib import Path
import torch
from services.decode.forward import DecodeForward
from services.model.config import load_config
from services.model.loader import load_weights, stream_weights
from services.model.split import Split
from services.prefill.forward import PrefillForward
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
folder = Path(sys.argv[1]); config = load_config(folder)
split = Split(**json.loads(sys.argv[2])[0])
forward = {"weights": None, "prefill": PrefillForward, "decode": DecodeForward}[sys.argv[3]]
open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
before = status("VmRSS")
if forward is None:
    kept = load_weights(folder, config, split=split, num_threads=8)
else:
    kept = forward(config, stream_weights(folder, config, num_threads=8))
print(json.dumps([before, status("VmHWM"), status("VmRSS")]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_peak_memory(fp8: bool, tmp_path: Path) -> None:
    """Hundreds of MB kept, 8 threads: at most 1.2 times that at the peak, of the weights alone and of a whole rank of either pool."""
    changes: dict[str, object] = {"hidden_size": 512, "moe_intermediate_size": 768, "n_routed_experts": 16, "num_hidden_layers": 10}
    config = tiny_config(**changes)
    tensors = {name: torch.ones(shape) for name, shape in model_shapes(config).items()}
    stored = tensors if fp8 else {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, tiny_raw(**changes), stored, fp8=fp8)
    for split, what in ((Split(ep_rank=1, ep=2, tp_rank=1, tp=2), "weights"), (Split(), "prefill"), (Split(), "decode")):
        command = [sys.executable, "-c", PEAK, str(tmp_path), as_json([split]), what]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        before, peak, after = json.loads(run.stdout)
        kept = after - before
        assert kept > 300e6 and peak - before < 1.2 * kept, f"{what}: kept {kept / 1e6:.0f} MB, peak {(peak - before) / 1e6:.0f} MB"


def test_layers_read_one_by_one_are_those_read_at_once(tmp_path: Path) -> None:
    config = load_config(make(tmp_path, V3, fp8=True))
    seen: list[tuple[int, int]] = []
    whole, stream = load_weights(tmp_path, config), stream_weights(tmp_path, config, lambda *both: seen.append(both))
    assert 0 < seen[-1][0] < seen[-1][1]  # the ends alone so far
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(flat(tuple(stream.layers)), flat(whole.layers), strict=True))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
