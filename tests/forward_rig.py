"""Rig T for the two forwards: random weights through the real loader, page memory full of NaN, shuffled page tables."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from services.decode.forward import DecodeBatch, DecodeForward
from services.model.config import ModelConfig, load_config
from services.model.loader import load_weights
from services.model.weights import ModelWeights
from services.prefill.forward import PrefillChunk, PrefillForward
from tests.tiny_model import random_tensors, tiny_config, tiny_raw, write_checkpoint

PAGE_SIZE = 64
PAGES_EACH = 4


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every tensor below `value` (records, tuples) in another precision."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: cast(getattr(value, field.name), dtype) for field in fields(value)})
    return value


class ForwardRig:
    """One tiny model with both forwards and a pool of pages; request i owns its own shuffled pages."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 0, fp8: bool = False, requests: int = 4, **changes: object
    ) -> None:
        changes = {"max_position_embeddings": 1024, **changes}
        torch.set_num_threads(1)  # ops this small only wait for a second thread
        self.tensors = random_tensors(tiny_config(**changes), seed)
        write_checkpoint(folder, tiny_raw(**changes), self.tensors, fp8=fp8)
        self.config: ModelConfig = load_config(folder)
        self.weights: ModelWeights = cast(load_weights(folder, self.config), dtype)
        self.prefill, self.decode = PrefillForward(self.config, self.weights), DecodeForward(self.config, self.weights)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.dtype, self.requests, self.pages_each = dtype, requests, PAGES_EACH
        self.reset()

    def reset(self, pages_each: int = PAGES_EACH) -> None:
        """Fresh memory, nothing of it written."""
        num_pages = self.requests * pages_each + 1
        shape = (num_pages, self.config.num_hidden_layers, PAGE_SIZE, self.config.latent_width)
        self.pages = torch.full(shape, torch.nan, dtype=self.dtype)
        order = torch.randperm(num_pages, generator=self.generator).tolist()
        self.tables = [order[i * pages_each : (i + 1) * pages_each] for i in range(self.requests)]

    def ids(self, num_tokens: int) -> list[int]:
        """Random token ids."""
        return torch.randint(0, self.config.vocab_size, (num_tokens,), generator=self.generator).tolist()

    def chunk(self, ids: list[int], start: int, stop: int, request: int = 0, *, want_logits: bool = True) -> PrefillChunk:
        """The tokens start .. stop - 1 of the prompt `ids`; the page table ends with the chunk's last page."""
        table = self.tables[request][: -(-stop // PAGE_SIZE)]
        return PrefillChunk(ids[start:stop], start, table, want_logits)

    def prefill_all(self, ids: list[int], chunk: int, request: int = 0) -> torch.Tensor:
        """Prefill `ids` in chunks of `chunk` tokens -> the logits at each chunk's end [num_chunks, vocab]."""
        starts = range(0, len(ids), chunk)
        return torch.cat(
            [self.prefill.run(self.pages, [self.chunk(ids, s, min(s + chunk, len(ids)), request)]) for s in starts]
        )

    def one_shot(self, ids: list[int]) -> torch.Tensor:
        """Logits after the last of `ids`, computed in one chunk in memory of its own: [vocab]."""
        num_pages = -(-len(ids) // PAGE_SIZE)
        pages = self.pages.new_full((num_pages, *self.pages.shape[1:]), torch.nan)
        return self.prefill.run(pages, [PrefillChunk(ids, 0, list(range(num_pages)), True)])[0]

    def decode_step(self, tokens: dict[int, tuple[int, int]]) -> torch.Tensor:
        """request -> (token id, position), one decode step -> [batch, vocab] in the dict's order."""
        batch = DecodeBatch(
            [token for token, _ in tokens.values()],
            [position for _, position in tokens.values()],
            [self.tables[request][: position // PAGE_SIZE + 1] for request, (_, position) in tokens.items()],
        )
        return self.decode.run(self.pages, batch)
