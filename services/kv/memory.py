"""The memory of one rank's KV pool: pages, epoch words and the landing place of epoch reads, all page aligned host memory.

    memory = KvMemory(layout, num_pages=1024)
    memory.pages      torch  [num_pages, num_layers, PAGE_SIZE, width], contiguous; all zero at first: read only what was written
    memory.epochs     numpy uint64 [num_pages]; raised by PagePool.take alone; peers read it
    memory.landing    numpy uint64 [num_pages]; word i receives the epoch of the remote page that is read into local page i, so whoever
                      holds page i holds word i too, and quarantine covers both
"""
import mmap

import numpy as np
import torch

from services.kv.layout import PAGE_SIZE, KvLayout

_HUGE_PAGE = 2 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvMemory:
    """Owns the mappings; lives as long as the transport that registered them."""

    def __init__(self, layout: KvLayout, num_pages: int) -> None:
        assert num_pages > 0, f"{num_pages=}"
        self.layout = layout
        self.num_pages = num_pages
        raw = _aligned_bytes(num_pages * layout.page_bytes, _HUGE_PAGE)
        raw[:: mmap.PAGESIZE] = 0  # have it all now: a first touch amid a read would cost more than the copy (355 MB took over 1 s)
        shape = (num_pages, layout.num_layers, PAGE_SIZE, layout.width)
        self.pages = torch.from_numpy(raw).view(_DTYPES[layout.dtype]).view(shape)
        self.epochs = _aligned_bytes(8 * num_pages, mmap.PAGESIZE).view(np.uint64)
        self.landing = _aligned_bytes(8 * num_pages, mmap.PAGESIZE).view(np.uint64)

    def page_address(self, page: int) -> int:
        """Address of the first byte of `page`."""
        return self.pages.data_ptr() + page * self.layout.page_bytes

    def page_bytes_view(self) -> np.ndarray:
        """[num_pages, page_bytes] uint8 over the same memory."""
        return self.pages.view(torch.uint8).view(self.num_pages, self.layout.page_bytes).numpy()


def _aligned_bytes(size: int, alignment: int) -> np.ndarray:
    """`size` zero bytes whose address is a multiple of `alignment`; physical memory comes only when touched."""
    region = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE if alignment == _HUGE_PAGE else mmap.MADV_NORMAL)  # a peer's copy walks 500 times fewer pages
    whole = np.frombuffer(region, dtype=np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + size]
