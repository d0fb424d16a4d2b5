"""The sampler's state of the running requests, and one step's logits turned into tokens."""
import math
from collections.abc import Sequence

import msgspec
import torch

from services.decode.request import Request
from services.kv.messages import PenaltyCounts
from services.model.penalties import PenaltyState
from services.model.sampling import RowState, sample


class Chosen(msgspec.Struct, frozen=True):
    """One request's token; `logprob` is NaN and the lists are empty when it did not ask."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class BatchSampler:
    """Keeps penalty counts a request; everything else that a token depends on is in the request itself."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._penalties: dict[tuple[int, int], PenaltyState] = {}

    def __len__(self) -> int:
        return len(self._penalties)

    def add(self, request: Request) -> None:
        """Go on where the holder stopped: its counts hold the first token already."""
        assert request.handoff is not None
        if request.params.has_penalties:
            prompt_ids, counts = request.handoff.penalties.prompt_ids, request.handoff.penalties.output_counts
            self._penalties[request.id] = PenaltyState.restore(prompt_ids, list(counts), list(counts.values()))

    def counts(self, request: Request) -> PenaltyCounts:
        """Where another rank's `add` goes on."""
        state = self._penalties.get(request.id)
        return PenaltyCounts() if state is None else PenaltyCounts.of(*state.export())

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._penalties.pop(request.id, None)

    def sample(self, logits: torch.Tensor, batch: Sequence[Request]) -> list[Chosen | None]:
        """logits [b, vocab] fp32 of the tokens that follow `batch`'s last ones; None for a row with a NaN, which no sampler can use."""
        sampled = sample(logits, [self._row(request) for request in batch])
        is_broken: list[bool] = logits.isnan().any(-1).tolist()
        token_ids: list[int] = sampled.token_ids.tolist()
        logprobs: list[float] = [math.nan] * len(batch) if sampled.logprobs is None else sampled.logprobs.tolist()
        top_ids: list[list[int]] = [[]] * len(batch) if sampled.top_ids is None else sampled.top_ids.tolist()
        top_logprobs: list[list[float]] = [[]] * len(batch) if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
        chosen: list[Chosen | None] = []
        for i, request in enumerate(batch):
            if request.id in self._penalties:
                self._penalties[request.id].add(token_ids[i])
            k = max(request.params.logprobs, 0)
            chosen.append(None if is_broken[i] else Chosen(token_ids[i], logprobs[i], top_ids[i][:k], top_logprobs[i][:k]))
        return chosen

    def _row(self, request: Request) -> RowState:
        return RowState(
            params=request.params,
            position=len(request.token_ids),
            num_output_tokens=request.num_output_tokens,
            eos_token_ids=self._eos_token_ids,
            choice=request.key.choice,
            penalties=self._penalties.get(request.id),
        )
