"""A model folder becomes the weights of one rank: checked by its headers first, then copied tensor by tensor.

Every tensor is read, not mapped, and dequantised straight into the place where it stays, so peak memory is what the rank
keeps plus one tensor as stored; bytes of experts that the rank does not own are never read.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch

from services.model.checkpoint import TensorEntry, read_entries, revision
from services.model.config import ModelConfig, load_config
from services.model.names import SCALE_SUFFIX, Shapes, model_shapes, mtp_shapes, repeated_shapes
from services.model.placement import Placement
from services.model.weights import ModelWeights
from services.runtime.errors import CheckpointError

__all__ = ["load_tensors", "load_weights", "no_progress", "revision", "show_progress"]

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) after each tensor."""

_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


def no_progress(_done: int, _total: int) -> None:
    """Say nothing."""


def load_weights(folder: Path, config: ModelConfig, progress: Progress = no_progress, experts: range | None = None) -> ModelWeights:
    """The model's layers as fp32 tensors on CPU, without the MTP layer.

    experts  contiguous range of routed experts to keep in every MoE layer (default: all); no byte of others is read
    Raises CheckpointError in one sentence naming tensor and file.
    """
    kept = range(config.n_routed_experts) if experts is None else experts
    if kept.step != 1 or not 0 <= kept.start < kept.stop <= config.n_routed_experts:
        raise CheckpointError(
            f"experts {kept.start} to {kept.stop - 1} were asked for but the model has 0 to {config.n_routed_experts - 1}"
        )
    entries = read_entries(folder)
    check_entries(entries, config, folder)
    placement = Placement(config, kept)
    _copy(entries, placement.destinations, config, progress)
    return placement.weights()


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder (the MTP layer's too) under its Hugging Face name, dequantised to fp32 on CPU."""
    config, entries = load_config(folder), read_entries(folder)
    check_entries(entries, config, folder)
    names = [name for name in entries if not name.endswith(SCALE_SUFFIX)]
    destinations = {name: torch.empty(entries[name].shape, dtype=torch.float32) for name in names}
    _copy(entries, destinations, config, no_progress)
    return destinations


def check_entries(entries: dict[str, TensorEntry], config: ModelConfig, folder: Path) -> None:
    """Refuse missing, surplus, wrongly shaped and wrongly typed tensors; the MTP layer is there whole or not at all."""
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
            _check_tensor(name, entry, entries, required | repeated if name in repeated else required, config)


def _check_tensor(name: str, entry: TensorEntry, entries: dict[str, TensorEntry], shapes: Shapes, config: ModelConfig) -> None:
    if name not in shapes:
        raise CheckpointError(f"tensor {name} of {entry.path} belongs to no part of the model that config.json describes")
    if entry.shape != shapes[name]:
        raise CheckpointError(f"tensor {name} of {entry.path} has shape {list(entry.shape)} but config.json asks for {list(shapes[name])}")
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"tensor {name} of {entry.path} has dtype {entry.dtype} but only {', '.join(_DTYPES)} are supported")
    if entry.dtype != "F8_E4M3":
        return
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
    weight = entries.get(name.removesuffix(SCALE_SUFFIX))
    if weight is None or weight.dtype != "F8_E4M3":
        raise CheckpointError(f"tensor {name} of {entry.path} scales no FP8 tensor; remove it or restore the weight")


def _copy(entries: dict[str, TensorEntry], destinations: dict[str, torch.Tensor], config: ModelConfig, progress: Progress) -> None:
    """Fill every destination from its file, in the order of the bytes."""
    names = sorted(destinations, key=lambda name: (entries[name].path, entries[name].begin))
    with ExitStack() as stack:
        files: dict[Path, BufferedReader] = {}
        for done, name in enumerate(names, start=1):
            entry, out, scale = entries[name], destinations[name], None
            if entry.dtype == "F8_E4M3":
                scale = torch.empty(entries[name + SCALE_SUFFIX].shape, dtype=torch.float32)
                _read_into(scale, name + SCALE_SUFFIX, entries[name + SCALE_SUFFIX], files, stack)
            if entry.dtype == "F32":
                _read_into(out, name, entry, files, stack)
            else:
                stored = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
                _read_into(stored, name, entry, files, stack)
                dequantise_into(out, stored, scale, config.weight_block_size)
            progress(done, len(names))


def _read_into(out: torch.Tensor, name: str, entry: TensorEntry, files: dict[Path, BufferedReader], stack: ExitStack) -> None:
    """Read one tensor's bytes into `out` (contiguous, of the stored dtype); files stay open until `stack` closes."""
    buffer = out.view(torch.uint8).numpy().data.cast("B")
    try:
        if entry.path not in files:
            files[entry.path] = stack.enter_context(entry.path.open("rb"))
        files[entry.path].seek(entry.begin)
        done = files[entry.path].readinto(buffer) if buffer.nbytes == entry.end - entry.begin else -1
    except OSError as error:
        raise CheckpointError(f"tensor {name} cannot be read from {entry.path}: {error.strerror}") from None
    if done != buffer.nbytes:
        have = entry.end - entry.begin
        raise CheckpointError(f"tensor {name} of {entry.path} has {have} bytes but {entry.dtype} {list(entry.shape)} needs {buffer.nbytes}")


def dequantise_into(out: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int] | None) -> None:
    """Write `stored` into `out` as fp32, each FP8 block times its scale.

    out, stored  [rows, columns] (any shape without a scale); out contiguous
    scale        [ceil(rows / block rows), ceil(columns / block columns)] fp32; the last blocks may be partial
    """
    if scale is None or block is None:
        out.copy_(stored)
        return
    # A table of the 256 codes in NumPy: far faster than torch's conversion, and no threads to wait for beside busy neighbours
    values, codes = out.numpy(), stored.view(torch.uint8).numpy()
    per_column = scale.numpy().repeat(block[1], axis=1)[:, : out.shape[1]]  # [row blocks, columns]
    for index, factors in enumerate(per_column):
        rows = slice(index * block[0], (index + 1) * block[0])
        np.take(_E4M3_VALUES, codes[rows], out=values[rows], mode="clip")
        values[rows] *= factors


def show_progress(label: str) -> Progress:
    """A rich bar on stderr for `load_weights`; it closes itself with the last tensor."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=None)

    def advance(done: int, total: int) -> None:
        if done == 1:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return advance
