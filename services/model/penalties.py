"""Token counts behind the repetition, frequency and presence penalties: small, and exact as plain ints for the hand-off."""

from collections.abc import Sequence

import torch

from services.model.params import SamplingParams


class PenaltyState:
    """Which tokens a request's prompt holds, and how often its output holds each.

    A pool adds a token once, when it samples it. The hand-off carries `export()`, in which the first token is counted
    already: whoever restores it must not add that token again.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        self._prompt_ids = sorted(set(prompt_ids))
        self._output_counts: dict[int, int] = {}
        for token in output_ids:
            self.add(token)

    def add(self, token_id: int) -> None:
        """Count one output token."""
        self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1

    @property
    def num_output_tokens(self) -> int:
        """Output tokens counted so far."""
        return sum(self._output_counts.values())

    def export(self) -> tuple[list[int], list[int], list[int]]:
        """(distinct prompt ids, distinct output ids, count of each output id)."""
        return list(self._prompt_ids), list(self._output_counts), list(self._output_counts.values())

    @classmethod
    def restore(cls, prompt_ids: Sequence[int], output_ids: Sequence[int], output_counts: Sequence[int]) -> "PenaltyState":
        """The state that `export` gave."""
        state = cls(prompt_ids)
        state._output_counts = dict(zip(output_ids, output_counts, strict=True))
        return state

    def apply(self, logits: torch.Tensor, params: SamplingParams) -> None:
        """Penalise one request's logits [vocab] fp32 in place: repetition over prompt and output, the other two over output only."""
        output = torch.tensor(list(self._output_counts), dtype=torch.int64)
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self._prompt_ids, *self._output_counts}), dtype=torch.int64)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            counts = torch.tensor(list(self._output_counts.values()), dtype=torch.float32)
            logits[output] -= params.frequency_penalty * counts + params.presence_penalty
