"""What a folder's tensors must be for its config: missing, surplus, wrongly shaped, typed and sized ones, found by headers alone."""

import math
from pathlib import Path

from services.model.checkpoint import ITEM_BYTES, TensorEntry
from services.model.config import ModelConfig
from services.model.names import SCALE_SUFFIX, model_shapes, mtp_shapes, repeated_shapes
from services.runtime.errors import CheckpointError


def check_entries(entries: dict[str, TensorEntry], config: ModelConfig, folder: Path) -> None:
    """Refuse what does not fit; the MTP layer is there whole or not at all. Raises CheckpointError naming tensor and file."""
    required, mtp, repeated = model_shapes(config), mtp_shapes(config), repeated_shapes(config)
    if any(name in entries for name in mtp):
        required |= mtp
    for name in required:
        if name not in entries:
            raise CheckpointError(f"tensor {name} is missing from {folder}; fetch the checkpoint again or correct config.json")
    for name, entry in entries.items():
        if name.endswith(SCALE_SUFFIX):
            _check_scale(name, entry, entries)
        else:
            _check_tensor(name, entry, required.get(name) or repeated.get(name))
            if entry.dtype == "F8_E4M3":
                _check_blocks(name, entry, entries, config)
        _check_size(name, entry)


def _check_tensor(name: str, entry: TensorEntry, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        raise CheckpointError(f"tensor {name} of {entry.path} belongs to no part of the model that config.json describes")
    if entry.shape != shape:
        raise CheckpointError(f"tensor {name} of {entry.path} has shape {list(entry.shape)} but config.json asks for {list(shape)}")
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"tensor {name} of {entry.path} has dtype {entry.dtype} but only {', '.join(ITEM_BYTES)} are supported")


def _check_blocks(name: str, entry: TensorEntry, entries: dict[str, TensorEntry], config: ModelConfig) -> None:
    """An FP8 tensor has a scale a block."""
    if config.weight_block_size is None or len(entry.shape) != 2:
        raise CheckpointError(
            f"tensor {name} of {entry.path} is FP8 but config.json gives no weight_block_size for it in quantization_config"
        )
    scale = entries.get(name + SCALE_SUFFIX)
    if scale is None:
        raise CheckpointError(f"tensor {name + SCALE_SUFFIX} is missing though {name} of {entry.path} is FP8; fetch the checkpoint again")
    blocks = tuple(math.ceil(size / block) for size, block in zip(entry.shape, config.weight_block_size, strict=True))
    if scale.shape != blocks or scale.dtype != "F32":
        found, wanted = f"{scale.dtype} {list(scale.shape)}", f"F32 {list(blocks)}"
        raise CheckpointError(f"tensor {name + SCALE_SUFFIX} of {scale.path} is {found} but the blocks of {name} ask for {wanted}")


def _check_scale(name: str, entry: TensorEntry, entries: dict[str, TensorEntry]) -> None:
    if entry.dtype != "F32":
        raise CheckpointError(f"tensor {name} of {entry.path} has dtype {entry.dtype} but only F32 is supported for scales")
    weight = entries.get(name.removesuffix(SCALE_SUFFIX))
    if weight is None or weight.dtype != "F8_E4M3":
        raise CheckpointError(f"tensor {name} of {entry.path} scales no FP8 tensor; remove it or restore the weight")


def _check_size(name: str, entry: TensorEntry) -> None:
    needed, found = math.prod(entry.shape) * ITEM_BYTES[entry.dtype], entry.end - entry.begin
    if found != needed:
        raise CheckpointError(f"tensor {name} of {entry.path} has {found} bytes but {entry.dtype} {list(entry.shape)} needs {needed}")
