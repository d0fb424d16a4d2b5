"""Safetensors files of a model folder, read by their headers alone: what is where, whether files are whole, the revision.

A file is `u64 header length | JSON header | tensor bytes`; only the headers are read here, so a folder of hundreds of
gigabytes is checked in moments and before any memory is taken. No torch.
"""

import contextlib
import hashlib
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from services.runtime.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
"""The element types that a checkpoint may have, and their size."""

_CHUNK_BYTES = 1 << 22
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    path: Path
    dtype: str  # safetensors' word: F32, BF16, F16, F8_E4M3
    shape: tuple[int, ...]
    begin: int  # bytes from the file's start
    end: int


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of `folder` by name, in file order; missing, truncated and contradictory files raise CheckpointError."""
    index = _read_index(folder)
    entries: dict[str, TensorEntry] = {}
    for path in shard_paths(folder):
        for name, entry in _read_header(path).items():
            if name in entries:
                raise CheckpointError(f"tensor {name} is in {path} and in {entries[name].path}; keep one of them")
            if index is not None and index.get(name) != path.name:
                raise CheckpointError(f"tensor {name} is in {path} but {INDEX_NAME} places it in {index.get(name)}; rebuild the index")
            entries[name] = entry
    for name, file in (index or {}).items():
        if name not in entries:
            raise CheckpointError(f"tensor {name} is missing from {folder / file}, where {INDEX_NAME} places it; fetch that file again")
    return entries


def shard_paths(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted by name: those of the index, or the single file."""
    index = _read_index(folder)
    paths = [folder / name for name in sorted(set(index.values()))] if index is not None else [folder / SINGLE_NAME]
    for path in paths:
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} does not exist; a model folder holds {SINGLE_NAME}, or {INDEX_NAME} and all files that it names")
    return paths


def revision(folder: Path) -> str:
    """Hex blake2b-128 over every shard (name order): length, then header and tensor bytes; the same weights, the same revision.

    Cached beside the folder as `<folder>.revision.json` under sizes and times of change; where that cannot be written
    it is computed on each call.
    """
    paths = shard_paths(folder)
    stamp = _stamp(paths)
    cache = _revision_cache(folder)
    cached = _read_cached_revision(cache, stamp)
    if cached is not None:
        return cached
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    value = digest.hexdigest()
    scratch = cache.with_name(f"{cache.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a read-only place costs time, not correctness
        scratch.write_text(json.dumps({"revision": value, "files": stamp}), encoding="utf-8")
        scratch.replace(cache)
    return value


def cached_revision(folder: Path) -> str | None:
    """The revision if it has been computed since the files last changed: in moments, whatever their size."""
    return _read_cached_revision(_revision_cache(folder), _stamp(shard_paths(folder)))


def _revision_cache(folder: Path) -> Path:
    resolved = folder.resolve()
    return resolved.with_name(resolved.name + ".revision.json")


def _stamp(paths: list[Path]) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}


def _read_cached_revision(cache: Path, stamp: dict[str, list[int]]) -> str | None:
    try:
        stored = json.loads(cache.read_text(encoding="utf-8"))
        return str(stored["revision"]) if stored["files"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not a JSON object with weight_map (tensor name to file name); rebuild the index") from None
    for file in index.values():
        if Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file!r} but files lie in the model folder itself; use bare file names")
    return index


def _read_header(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} has {size} bytes and ends inside its header; fetch it again")
        raw = file.read(length)
    try:
        pairs: list[tuple[str, object]] = json.loads(raw, object_pairs_hook=list)
        header = {name: dict(cast("list[tuple[str, object]]", value)) for name, value in pairs}
        entries: dict[str, TensorEntry] = {}
        for name, value in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in _sizes(value["data_offsets"]))
                entries[name] = TensorEntry(path, str(value["dtype"]), tuple(_sizes(value["shape"])), begin, end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} has no readable safetensors header; fetch it again") from None
    if len(header) != len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise CheckpointError(f"tensor {twice} is in {path} twice; fetch it again")
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(
                f"tensor {name} ends at byte {entry.end} of {path}, which has only {size}: the file is truncated; fetch it again"
            )
    in_order = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for (name, entry), (other, following) in itertools.pairwise(in_order):
        if entry.end > following.begin:
            raise CheckpointError(f"tensors {name} and {other} overlap in {path}: its header is damaged; fetch it again")
    return entries


def _sizes(value: object) -> list[int]:
    """A header's list of sizes or offsets. Raises TypeError or ValueError for what is none."""
    sizes = cast("list[int]", value)
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("no list of whole numbers")
    return sizes
