"""Loading: FP8 with partial blocks, shards, ranges of experts, broken folders in one sentence, the revision."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model.checkpoint import read_entries
from services.model.config import load_config
from services.model.loader import load_tensors, load_weights, no_progress, revision, show_progress
from services.model.names import SCALE_SUFFIX, expert_prefix
from services.model.placement import Placement
from services.model.reader import dequantise, read_tensors
from services.model.split import Region
from services.model.weights import MlpWeights, MoeWeights
from services.runtime.errors import CheckpointError
from tests.tiny_model import quantise, random_tensors, tiny_config, tiny_raw, write_checkpoint

ODD = {"hidden_size": 160, "moe_intermediate_size": 136}  # partial last blocks in rows and columns


def make(folder: Path, *, fp8: bool = False, num_shards: int = 1, mtp: bool = True, **changes: object) -> dict[str, torch.Tensor]:
    raw = tiny_raw(**changes)
    tensors = random_tensors(tiny_config(**changes), seed=30, mtp=mtp)
    write_checkpoint(folder, raw, tensors, fp8=fp8, num_shards=num_shards)
    return tensors


def dequantised(tensor: torch.Tensor) -> torch.Tensor:
    """Through FP8 and back, element by element."""
    stored, scale = quantise(tensor)
    rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
    return stored.float() * scale[rows][:, columns]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_weights_are_fused_stacked_and_dequantised(fp8: bool, num_shards: int, tmp_path: Path) -> None:
    tensors = make(tmp_path, fp8=fp8, num_shards=num_shards, **ODD)
    seen: list[tuple[int, int]] = []
    weights = load_weights(tmp_path, load_config(tmp_path), progress=lambda done, total: seen.append((done, total)))
    project = dequantised if fp8 else torch.Tensor.clone
    dense, moe = weights.layers[0].mlp, weights.layers[2].mlp
    assert isinstance(dense, MlpWeights) and isinstance(moe, MoeWeights) and moe.shared is not None and moe.bias is not None
    for prefix, gate_up, down in [
        ("model.layers.0.mlp.", dense.gate_up, dense.down),
        ("model.layers.2.mlp.shared_experts.", moe.shared.gate_up, moe.shared.down),
        *((expert_prefix(2, expert), moe.gate_up[expert], moe.down[expert]) for expert in range(8)),
    ]:
        parts = [project(tensors[f"{prefix}{name}_proj.weight"]) for name in ("gate", "up")]
        assert torch.equal(gate_up, torch.cat(parts)) and torch.equal(down, project(tensors[f"{prefix}down_proj.weight"]))
    attention = weights.layers[1].attention
    assert attention.q_a is not None and torch.equal(attention.q_a, project(tensors["model.layers.1.self_attn.q_a_proj.weight"]))
    assert torch.equal(attention.kv_a, project(tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]))
    assert torch.equal(moe.gate, tensors["model.layers.2.mlp.gate.weight"]) and torch.equal(weights.head, tensors["lm_head.weight"])
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(set(done)) and done[-1] == totals[0] and len(set(totals)) == 1 and len(weights.layers) == 3


def test_load_tensors_has_the_mtp_layer_and_no_scales(tmp_path: Path) -> None:
    tensors = make(tmp_path, fp8=True)
    loaded = load_tensors(tmp_path)
    assert set(loaded) == set(tensors) and all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert torch.equal(loaded["model.layers.3.eh_proj.weight"], dequantised(tensors["model.layers.3.eh_proj.weight"]))


def test_bf16_tied_and_without_mtp(tmp_path: Path) -> None:
    tensors = make(tmp_path, mtp=False, tie_word_embeddings=True, q_lora_rank=None, n_shared_experts=0)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, load_config(tmp_path))
    assert weights.head is weights.embed and weights.layers[0].attention.q_a is None
    assert torch.equal(weights.embed, tensors["model.embed_tokens.weight"].bfloat16().float())
    assert isinstance(weights.layers[1].mlp, MoeWeights) and weights.layers[1].mlp.shared is None


def rewrite(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **edit}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


NORM, KV_B = "model.norm.weight", "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ({NORM: None}, f"tensor {NORM} is missing from"),
        ({"model.layers.3.enorm.weight": None}, "tensor model.layers.3.enorm.weight is missing from"),
        ({KV_B + SCALE_SUFFIX: None}, f"tensor {KV_B}{SCALE_SUFFIX} is missing though {KV_B}"),
        ({"model.layers.1.extra.weight": torch.ones(2)}, "tensor model.layers.1.extra.weight of"),
        ({"model.layers.9.input_layernorm.weight": torch.ones(64)}, "belongs to no part of the model"),
        ({NORM: torch.ones(65)}, f"tensor {NORM} of"),
        ({NORM: torch.ones(64, dtype=torch.int32)}, "has dtype I32 but only F32, BF16, F16, F8_E4M3 are supported"),
        ({KV_B: torch.ones(128, 32)}, f"tensor {KV_B}{SCALE_SUFFIX} of"),
        ({KV_B: torch.ones(64, 32).to(torch.float8_e4m3fn)}, f"tensor {KV_B} of"),
        ({KV_B + SCALE_SUFFIX: torch.ones(2, 1)}, "is F32 [2, 1] but the blocks of"),
        ({NORM: torch.ones(64).to(torch.float8_e4m3fn)}, "is FP8 but config.json gives no weight_block_size for it"),
    ],
    ids=[
        "missing",
        "mtp_half",
        "scale_missing",
        "surplus",
        "surplus_layer",
        "shape",
        "dtype",
        "scale_of_nothing",
        "fp8_shape",
        "scale_shape",
        "fp8_norm",
    ],
)
def test_broken_tensors(edit: dict[str, torch.Tensor | None], sentence: str, tmp_path: Path) -> None:
    make(tmp_path, fp8=True)
    rewrite(tmp_path, edit)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, load_config(tmp_path))
    assert sentence in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [3, 100, -1], ids=["length", "header", "data"])
def test_truncated_file(cut: int, tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* (ends inside its header|truncated)"):
        load_weights(tmp_path, load_config(tmp_path))


def test_twice_and_of_another_size(tmp_path: Path) -> None:
    """The same tensor in two files, in one file twice, and bytes that are not those of its shape."""
    make(tmp_path, num_shards=2)
    config, shards = load_config(tmp_path), [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    first, second = (load_file(shard) for shard in shards)
    name = next(iter(first))
    save_file({**second, name: first[name]}, shards[1])
    with pytest.raises(CheckpointError, match=rf"tensor {name} is in .*00002-of-00002.safetensors and in .*00001-of"):
        load_weights(tmp_path, config)

    def edit_header(old: str, new: str) -> None:
        make(tmp_path / "one")
        path = tmp_path / "one" / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length].decode()
        assert old in header
        header = header.replace(old, new, 1)
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + length :])

    edit_header(f'"{KV_B}"', f'"{NORM}":{{"dtype":"F32","shape":[64],"data_offsets":[0,256]}},"{KV_B}"')
    with pytest.raises(CheckpointError, match=rf"tensor {NORM} is in .*model.safetensors twice"):
        load_weights(tmp_path / "one", config)
    edit_header('"dtype":"F32","shape":[64]', '"dtype":"BF16","shape":[64]')
    with pytest.raises(CheckpointError, match=r"tensor .* of .*model.safetensors has 256 bytes but BF16 \[64\] needs 128"):
        load_weights(tmp_path / "one", config)


def test_a_file_that_shrank_after_its_header_was_read(tmp_path: Path) -> None:
    make(tmp_path)
    config, entries, path = load_config(tmp_path), read_entries(tmp_path), tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    placement = Placement(config, range(8), range(4))
    placement.layer(2)
    with pytest.raises(CheckpointError, match=r"tensor .* of .*model.safetensors ends early"):
        read_tensors(entries, placement.destinations, None, no_progress)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_bit_pattern_of_a_plain_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """All 65,536 codes, infinities and NaNs too, come out as the numbers they are."""
    make(tmp_path, vocab_size=1024, mtp=False)
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(1024, 64)
    embed = codes.view(dtype) if dtype.itemsize == 2 else codes.view(torch.bfloat16).float()
    rewrite(tmp_path, {"model.embed_tokens.weight": embed})
    loaded = load_weights(tmp_path, load_config(tmp_path)).embed
    assert torch.equal(loaded.view(torch.int32)[~embed.isnan()], embed.float().view(torch.int32)[~embed.isnan()])
    assert torch.equal(loaded.isnan(), embed.isnan())


def test_every_fp8_code() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    out = np.empty((2, 128), dtype=np.float32)
    dequantise(out, codes, np.array([[0.3]], dtype=np.float32), Region(range(2), range(128)), (128, 128))
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * np.float32(0.3)
    np.testing.assert_array_equal(out, wanted.numpy())  # equal NaNs too


def test_power_of_two_scales(tmp_path: Path) -> None:
    """V3.1 (`scale_fmt: ue8m0`): a block whose largest value is 300 has scale 1 and holds 288, its nearest code; dividing by the
    exact scale before rounding it would store 448."""
    raw, tensors = tiny_raw(), random_tensors(tiny_config(), seed=31, mtp=False)
    block = torch.full((64, 32), 1.0)
    block[0, 0] = 300.0
    tensors[KV_B] = torch.cat((block, block))
    write_checkpoint(tmp_path, raw, tensors, fp8=True, power_of_two=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert float(stored[KV_B + SCALE_SUFFIX][0, 0]) == 1.0 and float(stored[KV_B][0, 0].float()) == 288.0
    scales = torch.cat([tensor.flatten() for name, tensor in stored.items() if name.endswith(SCALE_SUFFIX)])
    assert torch.equal(scales.log2(), scales.log2().round())
    config = load_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    kv_b = load_weights(tmp_path, config).layers[1].attention.kv_b
    assert float(kv_b[0, 0]) == 288.0 and float(kv_b[1, 0]) == 1.0


def test_what_the_config_already_says_may_be_stored_again(tmp_path: Path) -> None:
    """Moonlight and Kimi K2 store rotary frequencies; V3 repeats embedding and head in its MTP layer."""
    tensors = make(tmp_path)
    repeated = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    repeated |= {f"model.layers.3.{name}.weight": tensors["lm_head.weight"].clone() for name in ("embed_tokens", "shared_head.head")}
    rewrite(tmp_path, dict(repeated))
    assert torch.equal(load_weights(tmp_path, load_config(tmp_path)).head, tensors["lm_head.weight"])


def test_progress_shows_speed_and_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    advance = show_progress("weights")
    for done in (1 << 30, 3 << 30, 4 << 30):
        advance(done, 4 << 30)
    shown = capsys.readouterr().err
    assert "weights" in shown and "GB" in shown and "0:00:00" in shown


def test_broken_index_and_files(tmp_path: Path) -> None:
    make(tmp_path, num_shards=2)
    config, index = load_config(tmp_path), tmp_path / "model.safetensors.index.json"
    original = json.loads(index.read_text())

    def with_map(changes: dict[str, str]) -> None:
        index.write_text(json.dumps({"weight_map": original["weight_map"] | changes}))

    for changes, sentence in [
        ({"a.weight": "model-00001-of-00002.safetensors"}, "tensor a.weight is missing from"),
        ({NORM: "model-00009-of-00002.safetensors"}, "model-00009-of-00002.safetensors does not exist"),
        ({NORM: "../model.safetensors"}, "names the file '../model.safetensors'"),
        ({NORM: "long" * 1500 + ".safetensors"}, "does not exist"),
    ]:
        with_map(changes)
        with pytest.raises(CheckpointError, match=sentence.replace(".", r"\.")):
            load_weights(tmp_path, config)
    for text in ("[]", "[" * 100_000):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="is not a JSON object with weight_map"):
            load_weights(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load_weights(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"\x04" + 7 * b"\0" + b"oops")
    with pytest.raises(CheckpointError, match="has no readable safetensors header"):
        load_weights(tmp_path, config)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a file's header alone."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(("change", "sentence"), [
    ({"data_offsets": [0, 64]}, "overlap"),
    ({"data_offsets": [True, 64]}, "no readable safetensors header"),
    ({"data_offsets": [-64, 0]}, "no readable safetensors header"),
    ({"shape": [True]}, "no readable safetensors header"),
    ({"shape": [-16]}, "no readable safetensors header"),
], ids=str)
def test_damaged_header(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    """Two tensors in one place would load in silence, with wrong weights."""
    make(tmp_path)
    path = tmp_path / "model.safetensors"
    edit_header(path, lambda header: header["model.norm.weight"].update(change))
    with pytest.raises(CheckpointError, match=sentence):
        load_weights(tmp_path, load_config(tmp_path))


@pytest.mark.parametrize("dtype", ["I4", 5])
def test_scale_of_an_unknown_type(dtype: object, tmp_path: Path) -> None:
    make(tmp_path, fp8=True)

    def edit(header: dict[str, Any]) -> None:
        name = next(name for name in header if name.endswith(SCALE_SUFFIX))
        header[name]["dtype"] = dtype

    edit_header(tmp_path / "model.safetensors", edit)
    with pytest.raises(CheckpointError, match=r"dtype|F32"):
        load_weights(tmp_path, load_config(tmp_path))


def test_revision_follows_every_byte_and_is_cached(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder)
    first = revision(folder)
    cache = tmp_path / "model.revision.json"
    assert len(first) == 32 and json.loads(cache.read_text())["revision"] == first
    cache.write_text(cache.read_text().replace(first, "cached"))
    assert revision(folder) == "cached"
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)  # same size, another time of change
    assert revision(folder) not in (first, "cached")
    data[-1] ^= 1
    path.write_bytes(data)
    cache.unlink()
    cache.mkdir()  # cannot be written
    assert revision(folder) == first
