"""From logits to tokens: temperature, top-k, top-p, min-p, then the best of logits + Gumbel noise; and how many drafts that accepts.

Every filter keeps a head of the row's tokens in the order "higher logit first, of equal ones the lower id", and of equal scores the
lowest id wins. A row's token is a function of its own logits and parameters alone. Penalties and masks come before.
FlashInfer's filters promise nothing about equal logits, so they are a peer in the benchmark and no backend.
"""

import math
from typing import NamedTuple, Protocol

import torch

from kernels.backend import Backend, select
from kernels.sample.noise import gumbel_noise_torch

GREEDY_BELOW = 1e-5
MAX_TOP_LOGPROBS = 20


class SampleRows(NamedTuple):
    """What is known of each row, all on the logits' device, so that a captured graph reads what the host wrote last."""

    temperature: torch.Tensor  # [rows] fp32; below GREEDY_BELOW the best logit is taken as it is: no filter, no noise
    top_k: torch.Tensor  # [rows] int32; 0 or >= vocab: off, else exactly so many stay
    top_p: torch.Tensor  # [rows] fp32; >= 1: off, else a token stays while those before it hold less than this of what top-k left
    min_p: torch.Tensor  # [rows] fp32; 0: off, else a token stays if its probability is at least this share of the best one's
    seed: torch.Tensor  # [rows] int64 holding a u64's bits
    choice: torch.Tensor  # [rows] int64 < 2^32, which of the request's answers
    position: torch.Tensor  # [rows] int64 < 2^32, absolute index of the token being chosen
    active: torch.Tensor | None = None  # [rows] bool; rows where it is False are not read


class Sampled(NamedTuple):
    """The batch's tokens."""

    token_ids: torch.Tensor  # [rows] int64; -1 in rows that are not active
    logprobs: torch.Tensor | None  # [rows] fp32, log_softmax of the logits as they came; NaN in rows that are not active


class Accepted(NamedTuple):
    """What became of the drafts."""

    num_accepted: torch.Tensor  # [requests] int64; 0 for padding
    token_ids: torch.Tensor  # [requests, k + 1] int64: the num_accepted + 1 tokens that the request gains, then -1


def sample(logits: torch.Tensor, rows: SampleRows, *, logprobs: bool = False, backend: Backend = "auto") -> Sampled:
    """Choose the next token of each row.

    logits   [rows, vocab] fp32 or bf16, unit stride in the last dimension; not written to. A NaN takes part as the highest value, in its
             row only
    """
    assert logits.ndim == 2 and logits.stride(1) == 1 and logits.shape[1] > 0, f"{logits.shape=} {logits.stride()=}"
    for name, value in rows._asdict().items():
        assert value is None or (value.shape == logits.shape[:1] and value.is_contiguous()), f"{name} {value.shape} {logits.shape=}"
    return select(IMPLEMENTATIONS, backend, logits.device.type, logits.dtype).sample(logits, rows, logprobs)


def top_logprobs(
    logits: torch.Tensor, num_top: int, *, active: torch.Tensor | None = None, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_top` best tokens of each row by log_softmax of its logits, best first, of equal ones the lower id.

    logits   [rows, vocab] as in `sample`
    num_top  at most MAX_TOP_LOGPROBS and vocab
    active   [rows] bool or None
    returns  ids [rows, num_top] int64, logprobs [rows, num_top] fp32; -1 and NaN in rows that are not active
    """
    assert 0 < num_top <= min(MAX_TOP_LOGPROBS, logits.shape[1]) and logits.stride(1) == 1, f"{num_top=} {logits.shape=}"
    return select(IMPLEMENTATIONS, backend, logits.device.type, logits.dtype).top_logprobs(logits, num_top, active)


def accept_drafts(draft_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor, *, backend: Backend = "auto") -> Accepted:
    """A draft is accepted exactly when it and all drafts before it equal the tokens that `sample` gives at their positions.

    draft_ids   [requests, k]      int64, contiguous
    target_ids  [requests, k + 1]  int64, contiguous: the token after the last accepted one is among them
    num_drafts  [requests]         int64 <= k: how many drafts the request has; -1: the request is padding and gains no token
    """
    requests, k = draft_ids.shape
    assert target_ids.shape == (requests, k + 1) and num_drafts.shape == (requests,), f"{target_ids.shape=} {draft_ids.shape=}"
    assert draft_ids.is_contiguous() and target_ids.is_contiguous() and num_drafts.is_contiguous()
    return select(IMPLEMENTATIONS, backend, draft_ids.device.type).accept_drafts(draft_ids, target_ids, num_drafts)


class _Sample(Protocol):
    """A backend's three functions; the public ones above are their contracts."""

    def sample(self, logits: torch.Tensor, rows: SampleRows, logprobs: bool) -> Sampled: ...

    def top_logprobs(self, logits: torch.Tensor, num_top: int, active: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]: ...

    def accept_drafts(self, draft_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor) -> Accepted: ...


class _Reference:
    """Row by row, token by token."""

    def sample(self, logits: torch.Tensor, rows: SampleRows, logprobs: bool) -> Sampled:
        noise = gumbel_noise_torch(rows.seed, rows.choice, rows.position, logits.shape[1])
        ids = [self._row(logits[i].float(), rows, i, noise[i]) if _is_active(rows.active, i) else -1 for i in range(len(logits))]
        token_ids = torch.tensor(ids, dtype=torch.int64, device=logits.device)
        return Sampled(token_ids, _chosen_logprobs(logits, token_ids) if logprobs else None)

    def _row(self, x: torch.Tensor, rows: SampleRows, i: int, noise: torch.Tensor) -> int:
        top_k, top_p, min_p = (float(column[i]) for column in rows[1:4])
        if bool(rows.temperature[i] < GREEDY_BELOW):  # in fp32, as the other backends compare
            return int(x.argmax())
        scaled = x / rows.temperature[i]
        values = scaled.tolist()
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))
        if 0 < top_k < len(order):
            order = order[: int(top_k)]
        kept, before = list[int](), 0.0
        for token, p in zip(order, scaled[order].softmax(-1).tolist(), strict=True):
            if kept and before >= top_p and top_p < 1.0:
                break
            kept.append(token)
            before += p
        if min_p > 0.0:
            kept = [token for token in kept if values[token] >= values[kept[0]] + math.log(min_p)]
        scores = (scaled + noise).tolist()
        return min(kept, key=lambda token: (-scores[token], token))

    def top_logprobs(self, logits: torch.Tensor, num_top: int, active: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(logits), num_top), -1, dtype=torch.int64, device=logits.device)
        values = torch.full((len(logits), num_top), torch.nan, device=logits.device)
        for i, row in enumerate(logits.float().log_softmax(-1)):
            if _is_active(active, i):
                best = row.sort(descending=True, stable=True)
                ids[i], values[i] = best.indices[:num_top], best.values[:num_top]
        return ids, values

    def accept_drafts(self, draft_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor) -> Accepted:
        num_accepted, token_ids = torch.zeros_like(num_drafts), torch.full_like(target_ids, -1)
        for i, limit in enumerate(num_drafts.tolist()):
            accepted = 0
            while accepted < limit and draft_ids[i, accepted] == target_ids[i, accepted]:
                accepted += 1
            num_accepted[i] = accepted
            if limit >= 0:
                token_ids[i, : accepted + 1] = target_ids[i, : accepted + 1]
        return Accepted(num_accepted, token_ids)


class _Torch:
    """Batched, by one sort of each row; reads nothing back to the host."""

    def sample(self, logits: torch.Tensor, rows: SampleRows, logprobs: bool) -> Sampled:
        x, greedy = logits.float(), rows.temperature < GREEDY_BELOW
        scaled = x / torch.where(greedy, 1.0, rows.temperature)[:, None]
        scores = self._filter(scaled, rows) + gumbel_noise_torch(rows.seed, rows.choice, rows.position, x.shape[1])
        token_ids = torch.where(greedy, x.argmax(-1), scores.argmax(-1))
        if rows.active is not None:
            token_ids = token_ids.masked_fill(~rows.active, -1)
        return Sampled(token_ids, _chosen_logprobs(logits, token_ids) if logprobs else None)

    def _filter(self, x: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        vocab = x.shape[1]
        order = x.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.arange(vocab, device=x.device)
        top_k = torch.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)[:, None]
        falling = x.gather(1, order).masked_fill(rank >= top_k, -torch.inf)
        before = torch.nn.functional.pad(falling.softmax(-1).cumsum(-1)[:, :-1], (1, 0))
        dropped = (before >= rows.top_p[:, None]) & (rows.top_p < 1.0)[:, None] & (rank > 0)
        # p >= min_p * p_max, in logits: no normaliser, so the bound is exact
        dropped |= (falling < falling[:, :1] + rows.min_p.double().log().float()[:, None]) & (rows.min_p > 0.0)[:, None]
        return torch.empty_like(x).scatter_(1, order, falling.masked_fill(dropped, -torch.inf))

    def top_logprobs(self, logits: torch.Tensor, num_top: int, active: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
        values, ids = best.values[:, :num_top], best.indices[:, :num_top]
        return (ids, values) if active is None else (ids.masked_fill(~active[:, None], -1), values.masked_fill(~active[:, None], torch.nan))

    def accept_drafts(self, draft_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor) -> Accepted:
        place = torch.arange(target_ids.shape[1], device=draft_ids.device)
        same = (draft_ids == target_ids[:, :-1]) & (place[:-1] < num_drafts[:, None])
        num_accepted = same.long().cumprod(-1).sum(-1)
        gained = (place <= num_accepted[:, None]) & (num_drafts >= 0)[:, None]
        return Accepted(num_accepted, target_ids.masked_fill(~gained, -1))


class _Triton:
    """A scan of all tiles at memory speed, then one program a row that settles filters where there are any."""

    def sample(self, logits: torch.Tensor, rows: SampleRows, logprobs: bool) -> Sampled:
        from kernels.sample._triton import sample_triton

        return sample_triton(logits, rows, logprobs)

    def top_logprobs(self, logits: torch.Tensor, num_top: int, active: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        from kernels.sample._triton_more import top_logprobs_triton

        return top_logprobs_triton(logits, num_top, active)

    def accept_drafts(self, draft_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor) -> Accepted:
        from kernels.sample._triton_more import accept_drafts_triton

        return accept_drafts_triton(draft_ids, target_ids, num_drafts)


def _is_active(active: torch.Tensor | None, row: int) -> bool:
    return active is None or bool(active[row])


def _chosen_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """log_softmax of the logits at the tokens; NaN where there is none."""
    chosen = logits.float().log_softmax(-1).gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
    return chosen.masked_fill(token_ids < 0, torch.nan)


IMPLEMENTATIONS: dict[str, _Sample] = {"triton": _Triton(), "torch": _Torch(), "reference": _Reference()}
