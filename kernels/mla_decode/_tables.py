"""A step's lengths and page numbers as the int32 arrays that kernels read: packed on the host, moved in one copy."""

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np
import torch

from kernels.mla_decode import MAX_Q_LEN, Lengths, PageTables

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


def to_ints(values: Lengths) -> Ints:
    """A list or a host tensor as int32."""
    return np.asarray(values, dtype=np.int32)


def check_spans(kv: Ints, q: Ints) -> None:
    """Assert what `MlaDecode.plan` asks of kv_lens and q_lens."""
    assert kv.shape == q.shape and ((q >= 1) & (q <= MAX_Q_LEN) & ((kv == 0) | (kv >= q))).all(), f"{kv=} {q=}"


def psum(counts: Ints) -> Ints:
    """[n] -> [n + 1], from 0."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


def flat_pages(page_tables: PageTables, counts: Ints) -> Ints:
    """The first counts[i] entries of each request's table, one after the other."""
    total = int(counts.sum())
    if isinstance(page_tables, torch.Tensor):
        width = int(counts.max(initial=0))
        return page_tables.numpy()[:, :width][np.arange(width) < counts[:, None]].astype(np.int32, copy=False)
    used = (islice(table, count) for table, count in zip(page_tables, counts.tolist(), strict=True))
    return np.fromiter(chain.from_iterable(used), dtype=np.int32, count=total)


class DeviceArrays:
    """Several int32 arrays in one device buffer, each at a fixed offset as long as none outgrows its capacity."""

    def __init__(self, device: torch.device, capacities: Sequence[int], *, fixed: bool) -> None:
        self._device, self._fixed = device, fixed
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(capacities)

    def _allocate(self, capacities: Sequence[int]) -> None:
        self._capacities = list(capacities)
        self._offsets = [0, *np.cumsum([-(-size // 4) * 4 for size in capacities]).tolist()]
        self._staging = torch.empty(self._offsets[-1], dtype=torch.int32, pin_memory=self._copied is not None)
        self._buffer = torch.empty(self._offsets[-1], dtype=torch.int32, device=self._device)
        self.views = [self._buffer[begin : begin + size] for begin, size in zip(self._offsets, self._capacities, strict=False)]

    def upload(self, arrays: Sequence[Ints]) -> None:
        """Copy to the device in stream order; `views` then begin with `arrays`."""
        if any(len(array) > size for array, size in zip(arrays, self._capacities, strict=True)):
            assert not self._fixed, f"a step of sizes {[len(array) for array in arrays]} exceeds its limits {self._capacities}"
            self._allocate([max(size, 2 * len(array)) for array, size in zip(arrays, self._capacities, strict=True)])
        if self._copied is not None:
            self._copied.synchronize()  # the pinned memory may still be read by the last plan's copy
        host = self._staging.numpy()
        for begin, array in zip(self._offsets, arrays, strict=False):
            host[begin : begin + len(array)] = array
        used = self._offsets[len(arrays) - 1] + len(arrays[-1])
        self._buffer[:used].copy_(self._staging[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
