"""Regions of stored tensors become fp32 in memory: read in pieces by several threads, each byte once.

Positioned reads, not maps: mapped pages count as the rank's memory and come in by faults of 4 KB, and a read can be counted.
A thread holds one piece (4 MB as stored), so the peak is what the rank keeps plus a few pieces.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.model.checkpoint import ITEM_BYTES, TensorEntry
from services.model.names import SCALE_SUFFIX
from services.model.placement import Destination
from services.model.split import Region
from services.runtime.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called in the caller's thread with (bytes read, bytes in all) after each piece."""

Array = NDArray[Any]  # of the stored type

_PIECE_BYTES = 1 << 22
_MAX_THREADS = 8
_STORED: dict[str, type[np.generic]] = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "F8_E4M3": np.uint8}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring rows of a destination."""

    name: str
    entry: TensorEntry
    scale: TensorEntry | None  # FP8 only
    region: Region
    out: NDArray[np.float32]  # [rows, columns] of the region
    num_bytes: int  # as stored, scales included


def read_tensors(
    entries: Mapping[str, TensorEntry],
    destinations: Mapping[str, Destination],
    block: tuple[int, int] | None,
    progress: Progress,
    num_threads: int | None = None,
) -> None:
    """Fill every destination; `block` is the size of FP8 blocks, `num_threads` one a core, 8 at most, by default."""
    names = sorted(destinations, key=lambda name: (entries[name].path, entries[name].begin))
    pieces = [piece for name in names for piece in _pieces(name, entries, destinations[name], block)]
    total, done = sum(piece.num_bytes for piece in pieces), 0
    threads = num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for entry in (entry for piece in pieces for entry in (piece.entry, piece.scale) if entry is not None):
            if entry.path not in files:
                files[entry.path] = os.open(entry.path, os.O_RDONLY)
                stack.callback(os.close, files[entry.path])
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="weights"))
        reader = _Reader(files, block)
        try:
            for future in as_completed([pool.submit(reader.read, piece) for piece in pieces]):
                done += future.result()
                progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the first error is the one to tell
            raise


def stored_bytes(entry: TensorEntry, region: Region, block: tuple[int, int] | None) -> int:
    """Bytes that a region of a tensor has in its file, those of its scales included."""
    size = region.num_values * ITEM_BYTES[entry.dtype]
    if entry.dtype == "F8_E4M3" and block is not None:
        size += region.blocks(block).num_values * ITEM_BYTES["F32"]
    return size


def _pieces(name: str, entries: Mapping[str, TensorEntry], to: Destination, block: tuple[int, int] | None) -> Iterator[_Piece]:
    """Cut at whole blocks of the stored tensor, so that no scale is read twice."""
    entry, region, out = entries[name], to.region, to.out.numpy()
    scale = entries[name + SCALE_SUFFIX] if entry.dtype == "F8_E4M3" else None
    step = max(1, _PIECE_BYTES // (len(region.columns) * ITEM_BYTES[entry.dtype]))
    if scale is not None and block is not None:
        step = max(step // block[0], 1) * block[0]
    begin = region.rows.start
    while begin < region.rows.stop:
        end = min((begin // step + 1) * step, region.rows.stop)
        part = Region(range(begin, end), region.columns)
        target = out[begin - region.rows.start : end - region.rows.start]
        yield _Piece(name, entry, scale, part, target, stored_bytes(entry, part, block))
        begin = end


class _Reader:
    """Reads pieces, in any thread."""

    def __init__(self, files: Mapping[Path, int], block: tuple[int, int] | None) -> None:
        self._files, self._block = files, block
        self._local = threading.local()  # each thread's buffer for bytes as stored

    def read(self, piece: _Piece) -> int:
        """Fill the piece's memory; returns the bytes read."""
        if piece.entry.dtype == "F32":
            self._read_region(piece.name, piece.entry, piece.region, piece.out)
            return piece.num_bytes
        stored = self._buffer(piece)
        self._read_region(piece.name, piece.entry, piece.region, stored)
        if piece.scale is None or self._block is None:
            widen(piece.out, stored)
            return piece.num_bytes
        blocks = piece.region.blocks(self._block)
        scale = np.empty((len(blocks.rows), len(blocks.columns)), dtype=np.float32)
        self._read_region(piece.name + SCALE_SUFFIX, piece.scale, blocks, scale)
        dequantise(piece.out, stored, scale, piece.region, self._block)
        return piece.num_bytes

    def _buffer(self, piece: _Piece) -> Array:
        """[rows, columns] of the stored type, this thread's own and reused: fresh memory would be faulted in for every piece."""
        dtype = np.dtype(_STORED[piece.entry.dtype])
        wanted = piece.region.num_values * dtype.itemsize
        held: NDArray[np.uint8] | None = getattr(self._local, "held", None)
        if held is None or len(held) < wanted:
            held = self._local.held = np.empty(max(wanted, _PIECE_BYTES), dtype=np.uint8)
        return held[:wanted].view(dtype).reshape(piece.out.shape)

    def _read_region(self, name: str, entry: TensorEntry, region: Region, out: Array) -> None:
        """out [rows, columns] of the stored type, contiguous; whole rows in one read, parts of rows in one each."""
        width, item = entry.shape[-1], out.itemsize
        whole = len(region.columns) == width
        for index in range(1 if whole else len(region.rows)):
            target = (out if whole else out[index]).data.cast("B")
            offset = entry.begin + ((region.rows.start + index) * width + region.columns.start) * item
            self._read_exactly(name, entry, target, offset)

    def _read_exactly(self, name: str, entry: TensorEntry, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._files[entry.path], [target[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"tensor {name} cannot be read from {entry.path}: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"tensor {name} of {entry.path} ends early: the file shrank while it was read; fetch it again")
            done += count


def widen(out: NDArray[np.float32], stored: Array) -> None:
    """Write bf16 (as uint16 bits) or fp16 `stored` into `out` of the same shape as fp32, exactly."""
    if stored.dtype == np.float16:
        np.copyto(out, stored)
        return
    bits = out.view(np.uint32)  # bf16 is the upper half of fp32
    np.copyto(bits, stored)
    np.left_shift(bits, 16, out=bits)


_E4M3_BITS = np.array(0x87F00000, dtype=np.uint32).view(np.int32)
_E4M3_BIAS = np.float32(2.0**120)
_E4M3_NAN = 0x7F


def dequantise(
    out: NDArray[np.float32], stored: Array, scale: NDArray[np.float32], region: Region, block: tuple[int, int]
) -> None:
    """Write FP8 (e4m3 codes as uint8) into `out` as fp32, each block times its scale.

    out, stored  [rows, columns] of `region`, which may begin and end inside a block
    scale        [row blocks, column blocks] fp32 that the region touches, the last of the tensor partial
    """
    # Four exact steps over bits: e4m3's exponent and mantissa put where fp32's are, then times 2 ** (127 - 7) for the bias,
    # which makes subnormals right too. Three times as fast as a table of 256 values, six times as torch's conversion.
    skipped = region.columns.start % block[1]
    per_column = scale.repeat(block[1], axis=1)[:, skipped : skipped + len(region.columns)]  # [row blocks, columns]
    first = region.rows.start // block[0]
    for index, factors in enumerate(per_column):
        begin = max((first + index) * block[0], region.rows.start) - region.rows.start
        end = min((first + index + 1) * block[0], region.rows.stop) - region.rows.start
        codes, values = stored[begin:end], out[begin:end]
        bits = values.view(np.int32)
        np.copyto(bits, codes.view(np.int8))
        np.left_shift(bits, 20, out=bits)
        np.bitwise_and(bits, _E4M3_BITS, out=bits)
        np.multiply(values, _E4M3_BIAS, out=values)
        values *= factors
        broken = (codes & _E4M3_NAN) == _E4M3_NAN
        if broken.any():
            values[broken] = np.nan
