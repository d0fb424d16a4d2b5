"""A model folder becomes the weights of one rank: checked by its headers first, then only what the rank keeps is read."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from services.model.checkpoint import read_entries, revision
from services.model.config import ModelConfig, load_config
from services.model.contents import check_entries
from services.model.names import SCALE_SUFFIX, model_shapes
from services.model.placement import Destination, Placement
from services.model.reader import Progress, read_tensors, stored_bytes
from services.model.split import Region, Split, kept_region
from services.model.weights import LayerWeights, ModelWeights

__all__ = ["load_tensors", "load_weights", "no_progress", "revision", "show_progress", "stream_weights"]


def no_progress(_done: int, _total: int) -> None:
    """Say nothing."""


def load_weights(
    folder: Path, config: ModelConfig, progress: Progress = no_progress, split: Split = Split(), *, num_threads: int | None = None
) -> ModelWeights:
    """The model's layers as fp32 tensors on CPU, without the MTP layer.

    split  the rank's place among those that share experts and heads (default: it has all); no byte of others' is read
    Raises CheckpointError in one sentence naming tensor and file, ConfigError for a split that the model does not allow.
    """
    weights = stream_weights(folder, config, progress, split, num_threads=num_threads)
    return dataclasses.replace(weights, layers=tuple(weights.layers))


def stream_weights(
    folder: Path, config: ModelConfig, progress: Progress = no_progress, split: Split = Split(), *, num_threads: int | None = None
) -> ModelWeights:
    """As `load_weights`, but `layers` is read as it is iterated, once: who lays weights out anew never holds more than one layer twice."""
    experts, heads = split.experts(config), split.heads(config)
    entries = read_entries(folder)
    check_entries(entries, config, folder)
    regions = {name: kept_region(config, name, shape, experts, heads) for name, shape in model_shapes(config).items()}
    total = sum(stored_bytes(entries[name], region, config.weight_block_size) for name, region in regions.items() if region is not None)
    done = 0

    def read(placement: Placement) -> None:
        nonlocal done
        before = done

        def advance(part: int, _part_total: int) -> None:
            nonlocal done
            done = before + part
            progress(done, total)

        read_tensors(entries, placement.destinations, config.weight_block_size, advance, num_threads)

    def layers() -> Iterator[LayerWeights]:
        for index in range(config.num_hidden_layers):
            placement = Placement(config, experts, heads)
            layer = placement.layer(index)
            read(placement)
            del placement  # with its views of the layer
            yield layer
            del layer

    placement = Placement(config, experts, heads)
    embed, norm, head = placement.ends()
    read(placement)
    return ModelWeights(embed=embed, layers=layers(), norm=norm, head=head)


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder (the MTP layer's too) under its Hugging Face name, dequantised to fp32 on CPU."""
    config, entries = load_config(folder), read_entries(folder)
    check_entries(entries, config, folder)
    tensors = {
        name: torch.empty(entry.shape, dtype=torch.float32) for name, entry in entries.items() if not name.endswith(SCALE_SUFFIX)
    }
    destinations: dict[str, Destination] = {}
    for name, tensor in tensors.items():
        rows = tensor.view(-1, tensor.shape[-1])
        destinations[name] = Destination(rows, Region(range(rows.shape[0]), range(rows.shape[1])))
    read_tensors(entries, destinations, config.weight_block_size, no_progress)
    return tensors


def show_progress(label: str) -> Progress:
    """A rich bar on stderr for `load_weights`: bytes, bytes a second, time left; it closes itself with the last byte."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=None)

    def advance(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return advance
