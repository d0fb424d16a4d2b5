"""The scripted model, its oracle, and what keeps a world cheap: pages of four tokens, memory that is used again.

A stored value is a token's id, and the next token depends on every stored value: next = 2 + (sum of (position + 1) * id) % 250. So a wrong
page, a lost append or a foreign write changes the text.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import services.decode.engine
import services.decode.fetch
import services.decode.loop
import services.prefill.engine  # noqa: F401  every module that has PAGE_SIZE is to be patched
from services.decode.forward import DecodeBatch
from services.kv.layout import Compatibility, KvLayout
from services.kv.memory import KvMemory
from services.prefill.forward import PrefillChunk

PAGE = 4  # tokens of a page here: requests cross pages in a few steps
VOCAB, EOS = 256, 1
LAYOUT = KvLayout(num_layers=1, kv_lora_rank=1, rope_dim=1, dtype="float32")
SAME = Compatibility({"model": "scripted"})
GARBAGE = -7.0  # what memory holds before it is written


@contextmanager
def small_pages() -> Iterator[None]:
    """Pages of PAGE tokens everywhere in the product."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("services.") and hasattr(module, "PAGE_SIZE"):
                patch.setattr(module, "PAGE_SIZE", PAGE)
        patch.setattr("services.kv.rank_kv._LINGER_S", 0.0)  # there is no wire on which anything could linger
        yield


def next_token(token_ids: Sequence[float] | np.ndarray) -> int:
    """The scripted model on plain token ids: the oracle."""
    return 2 + int(sum((position + 1) * token for position, token in enumerate(token_ids))) % 250


def mono(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The oracle's output."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(token_ids) :]


_stock: dict[int, list[KvMemory]] = {}


def borrow_memory(num_pages: int) -> KvMemory:
    """Memory full of garbage whose epochs start anew; mapping it afresh would cost more than a whole example."""
    stock = _stock.setdefault(num_pages, [])
    memory = stock.pop() if stock else KvMemory(LAYOUT, num_pages)
    memory.pages.fill_(GARBAGE)
    memory.epochs[:] = 0
    memory.landing[:] = 0
    return memory


def give_memory_back(memory: KvMemory) -> None:
    """Nothing uses it any more."""
    _stock[memory.num_pages].append(memory)


Written = Callable[[int], None]
"""A forward is about to write into this page."""


class ScriptedPrefill:
    """Like PrefillForward; `during` runs amid a forward, when the other thread may do anything."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self.during: Callable[[], None] | None = None

    def run(self, pages: torch.Tensor, batch: Sequence[PrefillChunk]) -> torch.Tensor:
        view, rows = pages.numpy(), []
        for chunk in batch:
            for offset, token in enumerate(chunk.token_ids):
                page, slot = divmod(chunk.start + offset, PAGE)
                if slot == 0 or offset == 0:
                    self._written(chunk.page_table[page])
                view[chunk.page_table[page], 0, slot] = token
            if chunk.want_logits:
                stop = chunk.start + len(chunk.token_ids)
                rows.append(next_token(view[list(chunk.page_table), 0, :, 0].ravel()[:stop]))
        if self.during is not None:
            self.during()
        logits = torch.zeros(len(rows), VOCAB)
        for row, token in enumerate(rows):
            logits[row, token] = 5.0
        return logits


class ScriptedDecode:
    """Like DecodeForward; `seen(page_table, stored)` hears what each row computes from."""

    def __init__(self, written: Written, seen: Callable[[list[int], list[float]], None]) -> None:
        self._written, self._seen = written, seen
        self.during: Callable[[], None] | None = None

    def run(self, pages: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        view = pages.numpy()
        logits = torch.zeros(len(batch.token_ids), VOCAB)
        for row, (token, position, table) in enumerate(zip(batch.token_ids, batch.positions, batch.page_tables, strict=True)):
            page = table[position // PAGE]
            self._written(page)
            view[page, 0, position % PAGE] = token
            stored = view[list(table), 0, :, 0].ravel()[: position + 1].tolist()
            self._seen(table, stored)
            logits[row, next_token(stored)] = 5.0
        if self.during is not None:
            self.during()
        return logits
