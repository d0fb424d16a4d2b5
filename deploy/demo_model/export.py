"""Between the training network and a checkpoint folder: V3's tensor names, FP8 block weights, two shards and their index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.demo_model.fp8 import dequantize_blocks, quantize_blocks
from deploy.demo_model.net import Net, Weight

SHARDS = 2
SCALE = "_scale_inv"


def checkpoint_tensors(net: Net) -> dict[str, Tensor]:
    """Every tensor under its published name. Matrices of `Weight` modules in FP8 with scales; gate biases fp32; all else bf16."""
    quantized = {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, Weight)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in net.state_dict().items():
        tensor = tensor.detach().float().cpu()
        if name not in quantized:
            tensors[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            continue
        data, scale = quantize_blocks(tensor)
        for published, index in published_names(name, tensor):
            tensors[published], tensors[published + SCALE] = data[index].contiguous(), scale[index].contiguous()
    return tensors


def published_names(name: str, tensor: Tensor) -> list[tuple[str, Any]]:
    """Our parameter -> (published name, index into our tensor): one entry, or one an expert for a stack."""
    if tensor.ndim < 3:
        return [(name, ...)]
    prefix, kind = name.rsplit(".mlp.", 1)
    return [(f"{prefix}.mlp.experts.{expert}.{kind}", expert) for expert in range(tensor.shape[0])]


def save_checkpoint(net: Net, folder: Path) -> int:
    """Writes `config.json`, the shards and their index. Returns the bytes of tensor data."""
    tensors = checkpoint_tensors(net)
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    written, shard = 0, 0
    for name, tensor in tensors.items():
        # A scale follows its data into the same shard: who reads one shard can use all of it.
        if not name.endswith(SCALE):
            shard = written * SHARDS // total
        shards[shard][name] = tensor
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard_tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        save_file(shard_tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(sorted(shard_tensors), file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(net.config, indent=2) + "\n")
    return total


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder under their published names, dequantised to fp32."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    raw: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        raw |= load_file(folder / file)
    plain = {name: tensor for name, tensor in raw.items() if not name.endswith(SCALE)}
    return {name: dequantize_blocks(t, raw[name + SCALE]) if name + SCALE in raw else t.float() for name, t in plain.items()}


def load_net(folder: Path) -> Net:
    """The network with exactly the values a server will use, for evaluation."""
    net = Net(json.loads((folder / "config.json").read_text()))
    tensors = read_tensors(folder)
    state: dict[str, Tensor] = {}
    for name, tensor in net.state_dict().items():
        parts = [tensors[published] for published, _ in published_names(name, tensor)]
        state[name] = torch.stack(parts) if tensor.ndim == 3 else parts[0]
    net.load_state_dict(state)
    return net.eval()
