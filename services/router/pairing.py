"""Finds the two ranks of an attempt: what the pool and the prefix index know, put before the policy."""

import random
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from services.router.metrics import ROUTING_SECONDS
from services.router.policy import choose_decode, choose_prefill
from services.router.pool import Model, Pool
from services.router.rank_state import RankState
from services.router.validate import Limits, Request
from services.runtime.errors import NoMember


class Need(NamedTuple):
    """What an attempt needs of its ranks."""

    digests: Sequence[bytes]
    num_prompt_tokens: int  # replayed tokens included
    num_total_tokens: int  # prompt and all of max_tokens
    has_decode: bool  # false when prefill's token is the last one
    model: tuple[str, Limits] | None  # of the tokens already sent; None = any
    avoid: Collection[str]  # instance ids that failed this request: only taken when there is no other


class Pair(NamedTuple):
    """Who serves an attempt, and how much it brings them."""

    prefill: RankState
    decode: RankState | None
    num_uncached_tokens: int  # believed
    reason: str


def need_of(request: Request, num_sent: int, model: tuple[str, Limits] | None, avoid: Collection[str]) -> Need:
    """What `request` needs after `num_sent` output tokens."""
    num_prompt_tokens, max_tokens = len(request.prompt_ids), request.params.max_tokens
    return Need(request.digests, num_prompt_tokens + num_sent, num_prompt_tokens + max_tokens, max_tokens - num_sent > 1, model, avoid)


def choose_pair(pool: Pool, need: Need) -> Pair:
    """Decode first, then prefill. Raises NoMember naming the pool that is empty."""
    began = time.perf_counter()
    models = _fitting(pool, need)
    if not models:
        raise _nobody(pool, need)
    draw, now = random.getrandbits(32), time.monotonic()
    hits = pool.index.hit_tokens(need.digests, now)
    decode, reason = None, "no decode"
    if need.has_decode:
        decode, why = _choose_decode(_joined([model.decodes for model in models]), hits, need, draw, now)
        models = [model for model in models if model.key == decode.model]
        reason = f"decode: {why}"
    prefills = _prefer(_joined([model.prefills for model in models]), need.avoid, now)
    choice = choose_prefill(prefills, [hits[state.slot] for state in prefills], need.num_prompt_tokens, draw)
    prefill = prefills[choice.position]
    pair = Pair(prefill, decode, need.num_prompt_tokens - hits[prefill.slot], f"prefill: {choice.reason}; {reason}")
    ROUTING_SECONDS.observe(time.perf_counter() - began)
    return pair


def choose_reader(pool: Pool, need: Need, exclude: Collection[str]) -> RankState | None:
    """A decode rank of `need.model` for pages that are there already, none of `exclude`; None when there is none."""
    models = [model for model in pool.models() if _fits(model, need)]
    decodes = [state for model in models for state in model.decodes if state.instance_id not in exclude]
    if not decodes:
        return None
    now = time.monotonic()
    return _choose_decode(decodes, pool.index.hit_tokens(need.digests, now), need, random.getrandbits(32), now)[0]


def _choose_decode(decodes: list[RankState], hits: Sequence[int], need: Need, draw: int, now: float) -> tuple[RankState, str]:
    """One of `decodes` (at least one), and why; `hits` by slot."""
    ranks = _prefer(decodes, need.avoid, now)
    choice = choose_decode(ranks, [hits[state.slot] for state in ranks], need.num_prompt_tokens, draw)
    return ranks[choice.position], choice.reason


def _joined(lists: list[list[RankState]]) -> list[RankState]:
    """All of `lists`, not to be written to: most often there is one, and 64 ranks need no copy."""
    return lists[0] if len(lists) == 1 else [state for each in lists for state in each]


def _fits(model: Model, need: Need) -> bool:
    fingerprint_and_limits = model.key
    return need.model in (None, fingerprint_and_limits) and fingerprint_and_limits[1].max_model_len >= need.num_total_tokens


def _fitting(pool: Pool, need: Need) -> list[Model]:
    """Models that fit and have the ranks that are needed. One without decode ranks is on its way up or down: it serves, what needs none,
    only when there is no other."""
    models = [model for model in pool.models() if model.prefills and (model.decodes or not need.has_decode) and _fits(model, need)]
    return [model for model in models if model.decodes] or models


def _nobody(pool: Pool, need: Need) -> NoMember:
    """Why no pair can be had."""
    models = [model for model in pool.models() if _fits(model, need)]
    empty = [] if any(model.prefills for model in models) else ["prefill"]
    if need.has_decode and not any(model.decodes for model in models):
        empty.append("decode")
    if not empty:
        return NoMember("no prefill rank and decode rank have one fingerprint and limits; run both pools with one model and release")
    names = f"the {' and the '.join(empty)} pool"
    if any(pool.is_draining(role) for role in empty):
        return NoMember(f"{names} drains before it stops and takes no new request; start another rank, or try again once one is up")
    return NoMember(f"{names} has no rank that could serve; start one or wait until one is ready")


def _prefer(ranks: list[RankState], avoid: Collection[str], now: float) -> list[RankState]:
    """Of `ranks` those that have not failed the request, of these those that do not cool down: each as long as anybody is left."""
    if avoid:
        ranks = [state for state in ranks if state.instance_id not in avoid] or ranks
    return [state for state in ranks if state.cool_down.until <= now] or ranks
