"""Loading: FP8 with partial blocks, shards, ranges of experts, broken folders in one sentence, the revision."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model import loader
from services.model.config import load_config
from services.model.loader import load_tensors, load_weights, revision
from services.model.names import SCALE_SUFFIX, expert_prefix
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
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))] and len(weights.layers) == 3


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


def test_only_owned_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make(tmp_path, num_shards=2)
    read: list[str] = []
    real_read = loader._read_into

    def spy(out: torch.Tensor, name: str, *rest: object) -> None:
        read.append(name)
        real_read(out, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "_read_into", spy)
    weights = load_weights(tmp_path, load_config(tmp_path), experts=range(2, 5))
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoeWeights) and moe.down.shape == (3, 64, 32) and moe.gate.shape == (8, 64)
    assert torch.equal(moe.down[1], tensors[f"{expert_prefix(1, 3)}down_proj.weight"])
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".mlp.experts." in name}
    assert experts == {2, 3, 4} and not any(name.startswith("model.layers.3.") for name in read)
    with pytest.raises(CheckpointError, match="experts 6 to 8 were asked for but the model has 0 to 7"):
        load_weights(tmp_path, load_config(tmp_path), experts=range(6, 9))


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
    ]:
        with_map(changes)
        with pytest.raises(CheckpointError, match=sentence.replace(".", r"\.")):
            load_weights(tmp_path, config)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is not a JSON object with weight_map"):
        load_weights(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load_weights(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"\x04" + 7 * b"\0" + b"oops")
    with pytest.raises(CheckpointError, match="has no readable safetensors header"):
        load_weights(tmp_path, config)


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
