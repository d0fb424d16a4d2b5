"""Equal shares of a step's KV for FlashInfer's MLA kernel, whose own scheduler never splits a request shorter than a share.

With 128 requests of 1,000 to 9,000 entries its last clusters end a fifth later than the mean (768 us; with equal shares 641). Here,
as in `_triton.py`, the blocks of all requests stand in one line that is cut into equal parts; clusters form groups of as many as a
request has tiles of rows.
"""

import heapq
from typing import NamedTuple

import numpy as np

from kernels.mla_decode._tables import Ints, psum

BLOCK = 64
EVEN = 1.06
"""Imbalance up to which FlashInfer's schedule is kept. Equal shares split more requests, which costs 3 to 5 % where both are even;
the measured ratio of the two was 1.045 / imbalance within 4 % for batches of 8 to 128."""
MIN_SHARE = 8
"""Blocks of a share from which on equal shares pay; below, FlashInfer's schedule splits anyway."""
MAX_ITEMS = 1 << 14
"""Entries of each of FlashInfer's arrays; its planner writes beyond them unchecked."""
KNOWN_FLASHINFER = "0.6.13"
"""The version whose work list `Work` mirrors. Nothing of it is public, so that every other version keeps its own schedule."""
MIN_USED = 0.9
"""Share of the clusters' time that must be used: a group's clusters idle where requests have fewer new tokens than the longest."""


class Work(NamedTuple):
    """The kernel's work list; names are FlashInfer's. One entry a work item, in the order of clusters."""

    q_indptr: Ints
    kv_indptr: Ints
    partial_indptr: Ints  # -1: the item is a whole request's tile
    merge_packed_offset_start: Ints  # one a streaming multiprocessor, as the next four
    merge_packed_offset_end: Ints
    merge_partial_packed_offset_start: Ints
    merge_partial_packed_offset_end: Ints
    merge_partial_stride: Ints
    q_len: Ints
    kv_len: Ints
    q_start: Ints
    kv_start: Ints
    kv_end: Ints
    work_indptr: Ints  # [num_clusters + 1]


def replaces_work_of(version: str) -> bool:
    """Whether this FlashInfer's work list is the one we know; a local part such as +cu130 does not count."""
    return version.split("+")[0] == KNOWN_FLASHINFER


def most_items(q: Ints, *, num_heads: int, num_clusters: int, rows: int) -> int:
    """Work items that no schedule of the step exceeds, FlashInfer's or ours: a tile each, and a cut for each cluster's share."""
    return int((-(-q * num_heads // rows)).sum()) + num_clusters


def flashinfer_imbalance(q: Ints, kv: Ints, *, num_heads: int, num_clusters: int, rows: int) -> float:
    """Longest over mean work of a cluster when FlashInfer's MLAPlan hands out this step: requests in order, each to whoever has least."""
    tiles = [-(-length * num_heads // rows) for length in q.tolist()]
    lengths = kv.tolist()
    total = sum(count * length for count, length in zip(tiles, lengths, strict=True))
    mean = max(1, -(-total // num_clusters))
    limit = next((size for bound, size in ((8, 32), (16, 64), (32, 128), (64, 192)) if mean <= bound), -(-mean // 256) * 256)
    loads = [0] * num_clusters
    for count, length in zip(tiles, lengths, strict=True):
        pieces = [limit] * (length // limit) + [length % limit] * (length % limit > 0)
        for piece in pieces * count:
            heapq.heapreplace(loads, loads[0] + 2 * rows + piece)
    return max(loads) * num_clusters / max(1, sum(loads))


def equal_shares(q: Ints, kv: Ints, pages: Ints, *, num_heads: int, num_clusters: int, rows: int, num_sms: int) -> Work | None:
    """A step's work in equal shares, or None where they do not pay.

    q, kv, pages  a request each: new tokens, kv_len, pages; a cluster takes `rows` of the q * num_heads rows of a request
    """
    blocks = psum(-(-kv // BLOCK))
    tiles = -(-int(q.max()) * num_heads // rows)
    groups, total = num_clusters // tiles, int(blocks[-1])
    used = int((-(-kv // BLOCK) * -(-(q * num_heads) // rows)).sum())
    if groups < 2 or total < groups * MIN_SHARE or used < MIN_USED * total * tiles:
        return None
    bounds = np.arange(groups + 1, dtype=np.int64) * total // groups
    cuts = np.unique(np.concatenate([blocks, bounds]))
    begins, ends = cuts[:-1], cuts[1:]
    request = np.searchsorted(blocks, begins, side="right") - 1
    group = np.searchsorted(bounds, begins, side="right") - 1
    empty = np.flatnonzero(kv == 0)  # their rows are written too, as zeros
    request, group = np.concatenate([request, empty]), np.concatenate([group, np.zeros_like(empty)])
    kv_start = np.concatenate([begins, blocks[empty]]) - blocks[request]
    kv_end = np.minimum((np.concatenate([ends, blocks[empty]]) - blocks[request]) * BLOCK, kv[request])
    pieces = np.bincount(request, minlength=len(q))
    piece = np.arange(len(request)) - np.searchsorted(request[: len(begins)], request)  # of its request

    # every piece once a tile of rows that its request has; a tile's partial results stand together, piece after piece
    tile = np.repeat(np.arange(tiles), len(request))
    item = np.tile(np.arange(len(request)), tiles)
    keep = tile * rows < (q * num_heads)[request[item]]
    tile, item = tile[keep], item[keep]
    height = np.minimum(rows, (q * num_heads)[request[item]] - tile * rows)
    split = pieces[request[item]] > 1
    first_piece = split & (piece[item] == 0)
    sizes = np.where(first_piece, pieces[request[item]] * height, 0)
    starts = np.cumsum(sizes) - sizes
    key = tile * len(q) + request[item]
    first = np.zeros(tiles * len(q), dtype=np.int64)
    first[key[first_piece]] = starts[first_piece]
    base = first[key]
    q_begin = psum(q)

    merge = np.zeros((5, num_sms), dtype=np.int64)
    owners = np.flatnonzero(first_piece)
    if len(owners):
        parts = num_sms // len(owners)
        chunk = -(-height[owners] // parts)[:, None]
        offset = np.minimum(np.arange(parts)[None, :] * chunk, height[owners][:, None])
        until = np.minimum(offset + chunk, height[owners][:, None])
        row0 = (q_begin[request[item[owners]]] * num_heads + tile[owners] * rows)[:, None]
        last = (base[owners] + pieces[request[item[owners]]] * height[owners])[:, None]
        used = len(owners) * parts
        tables = (row0 + offset, row0 + until, base[owners][:, None] + offset, last + 0 * offset, height[owners][:, None] + 0 * offset)
        merge[:, :used] = np.stack([table.reshape(-1) for table in tables])

    cluster = group[item] * tiles + tile
    order = np.argsort(cluster, kind="stable")
    of = request[item]
    columns = (
        q_begin[of], psum(pages)[of], np.where(split, base + piece[item] * height, -1), *merge, q[of], kv[of], tile * rows,
        kv_start[item] * BLOCK, kv_end[item],
    )  # fmt: skip
    sorted_columns = [column if 3 <= i < 8 else column[order] for i, column in enumerate(columns)]
    work_indptr = psum(np.bincount(cluster, minlength=num_clusters).astype(np.int32))
    return Work._make([*(column.astype(np.int32) for column in sorted_columns), work_indptr])
