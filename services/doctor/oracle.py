"""Equal to Mono, when floating point may differ (DESIGN.md section 7): one teacher-forced forward checks a whole stream.

At a position where the stream's token is not the oracle's, the difference is excused only if rounding can explain it: the
stream's token, let in by every filter whose cut lies within TOLERANCE, has a final score within TOLERANCE of the best. The
oracle then goes on with the stream's token. Over a run at most one token in EXCUSED_ONE_IN may be excused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import torch

from services.model.config import load_config
from services.model.loader import load_tensors
from services.model.params import SamplingParams
from services.model.penalties import PenaltyState
from services.model.philox import gumbel_noise
from services.model.reference import Reference
from services.model.sampling import RowState, adjust_logits, sample

TOLERANCE = 1e-4
EXCUSED_ONE_IN = 2000
DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
_CHUNK = 1024  # tokens a forward: attention scores of a long prompt stay small


@dataclass(frozen=True)
class Comparison:
    """One stream against the oracle."""

    num_tokens: int
    excused: tuple[int, ...]  # indices of output tokens
    wrong: tuple[str, ...]  # one sentence each
    logprobs: tuple[float, ...]  # the oracle's, of each token of the stream


@dataclass
class Tally:
    """All streams of a test."""

    num_tokens: int = 0
    num_excused: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def assert_equal(self) -> None:
        """No token wrong, and hardly any excused (a small run may have one)."""
        assert self.num_tokens > 0, "no token was compared"
        assert not self.wrong, f"{len(self.wrong)} of {self.num_tokens} tokens differ from Mono: " + "; ".join(self.wrong[:5])
        allowed = math.ceil(self.num_tokens / EXCUSED_ONE_IN)
        assert self.num_excused <= allowed, f"{self.num_excused} of {self.num_tokens} tokens excused, allowed {allowed}"


@cache
def demo_reference() -> Reference:
    """The bundled demo model, loaded once a run."""
    return Reference(load_config(DEMO_MODEL), load_tensors(DEMO_MODEL))


def check_stream(
    reference: Reference, prompt_ids: Sequence[int], params: SamplingParams, stream_ids: Sequence[int], tally: Tally, choice: int = 0
) -> Comparison:
    """Compare and add to `tally`."""
    comparison = compare(reference, tuple(prompt_ids), params, tuple(stream_ids), choice)
    tally.num_tokens += comparison.num_tokens
    tally.num_excused += len(comparison.excused)
    tally.wrong += comparison.wrong
    return comparison


@lru_cache(maxsize=4096)  # cold and warm runs of a test repeat the same streams
def compare(
    reference: Reference, prompt_ids: tuple[int, ...], params: SamplingParams, stream_ids: tuple[int, ...], choice: int = 0
) -> Comparison:
    """Check every token of `stream_ids` against what the reference says after the tokens before it, and where the stream ends."""
    logits = forced_logits(reference, prompt_ids, stream_ids)
    rows = [_row(reference, prompt_ids, params, stream_ids[:i], choice) for i in range(len(stream_ids))]
    tokens = sample(logits, rows).token_ids.tolist()
    excused, wrong = list[int](), list[str]()
    for i, (token, expected) in enumerate(zip(stream_ids, tokens, strict=True)):
        if token == expected:
            continue
        gap = flip_gap(logits[i], rows[i], token)
        if gap <= TOLERANCE:
            excused.append(i)
        else:
            wrong.append(f"output token {i} after a prompt of {len(prompt_ids)} is {token}, Mono's is {expected}, {gap:.3g} better")
    wrong += _wrong_end(reference, params, stream_ids)
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(stream_ids)[:, None])[:, 0].tolist()
    return Comparison(len(stream_ids), tuple(excused), tuple(wrong), tuple(logprobs))


def forced_logits(reference: Reference, prompt_ids: Sequence[int], stream_ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(stream_ids), vocab]; row i is for output token i after the prompt and the stream's tokens before it."""
    ids = torch.tensor([*prompt_ids, *stream_ids[:-1]])
    kv = reference.new_cache()
    hidden = torch.cat([reference.hidden(part, kv) for part in ids.split(_CHUNK)])
    return reference.logits(hidden[len(prompt_ids) - 1 :]).clone()


def flip_gap(logits: torch.Tensor, row: RowState, token: int) -> float:
    """By how much rounding would have to move scores and cuts for `token` to be chosen: inf when a filter clearly drops it.

    logits  [vocab] of the step; the filters are written out once more here, one row at a time, to be sure of them
    """
    x, params = adjust_logits(logits[None], [row])[0], row.params
    if params.is_greedy:
        return float(x.max() - x[token])
    x = x / params.temperature
    surely, maybe = _kept_sets(x, params)
    scores = x + gumbel_noise([params.seed], [row.choice], [row.position], len(x))[0]
    return math.inf if not maybe[token] else float(scores[surely].max() - scores[token])


def _kept_sets(x: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens [vocab] bool stay for certain, and which may stay, when cuts move by TOLERANCE."""
    surely, maybe = torch.ones(len(x), dtype=torch.bool), torch.ones(len(x), dtype=torch.bool)
    values, order = x.sort(descending=True, stable=True)
    num_kept = params.top_k if 0 < params.top_k < len(x) else len(x)
    if num_kept < len(x):
        surely, maybe = x > values[num_kept] + TOLERANCE, x >= values[num_kept - 1] - TOLERANCE
    if params.top_p < 1.0:
        probs = values[:num_kept].softmax(-1)
        before = torch.cat((torch.zeros(1), probs.cumsum(-1)[:-1]))
        first_out = values[min(int((before < params.top_p - TOLERANCE).sum()), len(x) - 1)]
        last_in = values[max(int((before < params.top_p + TOLERANCE).sum()) - 1, 0)]
        surely, maybe = surely & (x > first_out + TOLERANCE), maybe & (x >= last_in - TOLERANCE)
    if params.min_p > 0.0:
        cut = values[0] + math.log(params.min_p)
        surely, maybe = surely & (x > cut + TOLERANCE), maybe & (x >= cut - TOLERANCE)
    surely[order[0]] = True
    return surely, maybe


def _row(reference: Reference, prompt_ids: Sequence[int], params: SamplingParams, before: Sequence[int], choice: int) -> RowState:
    return RowState(
        params=params,
        position=len(prompt_ids) + len(before),
        num_output_tokens=len(before),
        eos_token_ids=reference.config.eos_token_ids,
        choice=choice,
        penalties=PenaltyState(prompt_ids, before) if params.has_penalties else None,
    )


def _wrong_end(reference: Reference, params: SamplingParams, stream_ids: Sequence[int]) -> list[str]:
    """Tokens after an end, or more than asked for. That a stream is long enough is the caller's to say: he knows the limits."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else reference.config.eos_token_ids)}
    early = [i for i, token in enumerate(stream_ids[:-1]) if token in ends]
    wrong = [f"output goes on after token {i}, which ends it" for i in early[:1]]
    if len(stream_ids) > params.max_tokens:
        wrong.append(f"output has {len(stream_ids)} tokens but max_tokens is {params.max_tokens}")
    return wrong
