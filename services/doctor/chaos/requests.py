"""The requests of a chaos run: a few hundred different ones, drawn again and again, so that the oracle computes each once.

Prompts of 5 to 400 tokens, most of them with one of a few shared prefixes; 64 to 100 output tokens; greedy and sampled, with
penalties, logprobs, stop strings, sometimes two choices. A `tenant` of its own makes prefix caches miss, so that pages move.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proto.baton.v1 import generation_pb2
from services.model.params import SamplingParams

_FIRST_ID, _LAST_ID = 4, 4000  # ordinary tokens of the demo model
_BOS = 0
_RARE_STOPS = ("\x02\x03", "zqzq")  # begun now and then, never complete: the stop buffer is at work
_COMMON_STOPS = ("ing the", "ould", ". The")


@dataclass(frozen=True)
class Template:
    """One distinct request. `params` is what a sampler gets for it; `stops` belong to the router alone."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    num_choices: int = 1

    def message(self, tenant: str) -> generation_pb2.GenerateRequest:
        """As a client sends it."""
        params = self.params
        fields: dict[str, Any] = {name: getattr(params, name) for name in (
            "max_tokens", "temperature", "top_k", "top_p", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos")}
        message = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=self.prompt_ids), n=self.num_choices, stop=self.stops, tenant=tenant, **fields)
        if params.logprobs >= 0:
            message.logprobs = params.logprobs
        return message


@dataclass(frozen=True)
class Draw:
    """One request of the load and what its client will do."""

    template: Template
    tenant: str
    leaves_after: int | None = None  # tokens, then the client vanishes
    read_delay_s: float = 0.0  # after every message


@dataclass
class Deal:
    """Draws requests: `next()` for the closed loop, `long()` for a burst that wants many pages. A function of the seed."""

    seed: int
    num_templates: int = 300
    vanishing: float = 0.05
    fresh_tenants: float = 0.6
    two_choices: float = 0.06
    _draw: random.Random = field(init=False)
    _templates: list[Template] = field(init=False)
    _long: list[Template] = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        prefixes = [self._ids(length) for length in (64, 64, 130, 192, 256, 300)]
        self._templates = [self._template(prefixes) for _ in range(self.num_templates)]
        self._long = [Template((_BOS, *self._ids(40)), SamplingParams(max_tokens=400, seed=self._draw.getrandbits(63), ignore_eos=True))
                      for _ in range(6)]

    def next(self) -> Draw:
        """One request of the load."""
        template = self._draw.choice(self._templates)
        tenant = f"t{self._draw.getrandbits(48):x}" if self._draw.random() < self.fresh_tenants else ""
        leaves_after = self._draw.randrange(template.params.max_tokens) if self._draw.random() < self.vanishing else None
        return Draw(template, tenant, leaves_after)

    def long(self) -> Draw:
        """A request whose output alone fills six pages."""
        return Draw(self._draw.choice(self._long), f"t{self._draw.getrandbits(48):x}")

    def slow(self) -> Draw:
        """A request whose client reads slowly."""
        return Draw(self._draw.choice(self._templates), "", read_delay_s=0.15)

    def _ids(self, number: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(number))

    def _template(self, prefixes: Sequence[tuple[int, ...]]) -> Template:
        draw = self._draw
        prefix = draw.choice(prefixes) if draw.random() < 0.6 else ()
        prompt = (_BOS, *prefix, *self._ids(draw.randrange(4, 400 - len(prefix))))
        sampled = draw.random() < 0.6
        penalised = draw.random() < 0.3
        params = SamplingParams(
            max_tokens=draw.randrange(64, 101), seed=draw.getrandbits(63), ignore_eos=draw.random() < 0.9,
            temperature=draw.choice((0.75, 1.0, 1.25)) if sampled else 0.0,
            top_k=draw.choice((0, 0, 50)) if sampled else 0, top_p=draw.choice((1.0, 1.0, 0.875)) if sampled else 1.0,
            frequency_penalty=0.5 if penalised else 0.0, repetition_penalty=1.25 if penalised else 1.0,
            logprobs=draw.choice((-1, -1, 0, 3)),
        )
        stops = _COMMON_STOPS if (chance := draw.random()) < 0.05 else _RARE_STOPS if chance < 0.2 else ()
        return Template(prompt, params, stops, 2 if draw.random() < self.two_choices else 1)
