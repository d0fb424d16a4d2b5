"""Finds the two ranks of an attempt: what the pool and the prefix index know, put before the policy."""

import random
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from services.router.policy import DecodeView, PrefillView, choose_decode, choose_prefill
from services.router.pool import Pool, RankState
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
    prefills, decodes = _candidates(pool, need)
    index, draw, now = pool.index, random.getrandbits(32), time.monotonic()
    decode: RankState | None = None
    reason = "no decode"
    if need.has_decode:
        decode, why = _choose_decode(pool, decodes, need, draw, now)
        prefills = [state for state in prefills if state.model == decode.model]
        reason = f"decode: {why}"
    hits = {state.instance_id: index.num_hit_tokens(state.instance_id, need.digests, now) for state in prefills}
    candidates = _prefer(prefills, need.avoid)
    choice = choose_prefill(
        [PrefillView(state.instance_id, hits[state.instance_id], state.num_tokens, state.cool_down.is_on(now)) for state in candidates],
        need.num_prompt_tokens, draw,
    )
    prefill = next(state for state in prefills if state.instance_id == choice.instance_id)
    return Pair(prefill, decode, need.num_prompt_tokens - hits[prefill.instance_id], f"prefill: {choice.reason}; {reason}")


def choose_reader(pool: Pool, need: Need, exclude: Collection[str]) -> RankState | None:
    """A decode rank of `need.model` for pages that are there already, none of `exclude`; None when there is none."""
    decodes = [state for state in pool.usable("decode") if _fits(state, need) and state.instance_id not in exclude]
    return _choose_decode(pool, decodes, need, random.getrandbits(32), time.monotonic())[0] if decodes else None


def _choose_decode(pool: Pool, decodes: Sequence[RankState], need: Need, draw: int, now: float) -> tuple[RankState, str]:
    """One of `decodes` (at least one), and why."""
    views = [
        DecodeView(state.instance_id, state.group, pool.index.num_hit_tokens(state.instance_id, need.digests, now),
                   state.num_tokens, state.num_requests, state.max_running, state.cool_down.is_on(now))
        for state in _prefer(decodes, need.avoid)
    ]
    choice = choose_decode(views, need.num_prompt_tokens, draw)
    return next(state for state in decodes if state.instance_id == choice.instance_id), choice.reason


def _fits(state: RankState, need: Need) -> bool:
    return need.model in (None, state.model) and state.limits.max_model_len >= need.num_total_tokens


def _candidates(pool: Pool, need: Need) -> tuple[list[RankState], list[RankState]]:
    """Usable ranks of models that fit. Raises NoMember when a role that is needed has none."""
    prefills, decodes = (
        [state for state in pool.usable(role) if _fits(state, need)] for role in ("prefill", "decode")
    )
    empty = [role for role, ranks, needed in (("prefill", prefills, True), ("decode", decodes, need.has_decode)) if needed and not ranks]
    if empty:
        names = f"the {' and the '.join(empty)} pool"
        if any(pool.is_draining(role) for role in empty):
            raise NoMember(f"{names} drains before it stops and takes no new request; start another rank, or try again once one is up")
        raise NoMember(f"{names} has no rank that could serve; start one or wait until one is ready")
    if need.has_decode:
        models = {state.model for state in prefills} & {state.model for state in decodes}
        prefills, decodes = [s for s in prefills if s.model in models], [s for s in decodes if s.model in models]
        if not models:
            raise NoMember("no prefill rank and decode rank have one fingerprint and limits; run both pools with one model and release")
    return prefills, decodes


def _prefer(ranks: Sequence[RankState], avoid: Collection[str]) -> Sequence[RankState]:
    return [state for state in ranks if state.instance_id not in avoid] or ranks
