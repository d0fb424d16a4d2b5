"""Compares streams with the oracle: the worker process of a chaos run.

    python -m services.doctor.chaos.verify        one Job a line of JSON in, one Verdict a line out

A stream that begins another one of the same request already found right needs no computing.
"""

import math
import sys

import msgspec
import torch

from services.doctor.chaos.worker import Job, Verdict
from services.doctor.oracle import DEMO_MODEL, Comparison, compare, demo_reference
from services.router.text import TextStream
from services.router.tokenizer import load_tokenizer

_LOGPROB_BOUND = 1e-3


class Verifier:
    """The worker's work."""

    def __init__(self) -> None:
        self._reference = demo_reference()
        tokenizer = load_tokenizer(DEMO_MODEL, self._reference.config.bos_token_id)
        self._token_bytes = tokenizer.token_bytes
        self._ends = self._reference.config.eos_token_ids
        self._right: dict[tuple[tuple[int, ...], int, int], list[tuple[tuple[int, ...], Comparison]]] = {}

    def check(self, job: Job) -> Verdict:
        """Tokens, logprobs, text and end."""
        comparison = self._compare(job)
        wrong = [*comparison.wrong, *self._wrong_logprobs(job, comparison), *self._wrong_end(job)]
        excused = tuple(index for index in comparison.excused if index < len(job.token_ids))
        return Verdict(job.number, len(job.token_ids), excused, tuple(wrong))

    def _compare(self, job: Job) -> Comparison:
        known = self._right.setdefault((job.prompt_ids, job.params.seed, job.choice), [])
        for ids, comparison in known:
            if ids[: len(job.token_ids)] == job.token_ids:
                return comparison
        comparison = compare(self._reference, job.prompt_ids, job.params, job.token_ids, job.choice)
        if not comparison.wrong:
            known.append((job.token_ids, comparison))
        return comparison

    def _wrong_logprobs(self, job: Job, comparison: Comparison) -> list[str]:
        if job.params.logprobs < 0:
            return []
        if len(job.logprobs) != len(job.token_ids):
            return [f"{len(job.token_ids)} tokens came with {len(job.logprobs)} logprobs"]
        for index, (ours, theirs) in enumerate(zip(job.logprobs, comparison.logprobs, strict=False)):
            if not math.isclose(ours, theirs, abs_tol=_LOGPROB_BOUND):
                return [f"logprob of output token {index} is {ours:.5f}, Mono's is {theirs:.5f}"]
        return []

    def _wrong_end(self, job: Job) -> list[str]:
        """Whether text and reason are what these tokens give."""
        if not job.reason:
            return []
        stream = TextStream(self._token_bytes, job.stops)
        is_end = job.token_ids[-1:] and job.token_ids[-1] in (*job.params.stop_token_ids, *(() if job.params.ignore_eos else self._ends))
        text = "".join(map(stream.feed, job.token_ids[:-1] if is_end else job.token_ids)) + stream.flush()
        reason = "STOP" if is_end or stream.matched else "LENGTH"
        wrong: list[str] = []
        if text != job.text:
            wrong.append(f"the text is {job.text!r} but the tokens give {text!r}")
        if reason != job.reason:
            wrong.append(f"it ended with {job.reason} but the tokens give {reason}")
        if reason == "LENGTH" and len(job.token_ids) != job.params.max_tokens:
            wrong.append(f"it ended with LENGTH after {len(job.token_ids)} of {job.params.max_tokens} tokens")
        return wrong


def main() -> None:
    """Until stdin ends."""
    torch.set_num_threads(1)
    verifier = Verifier()
    for line in sys.stdin.buffer:
        verdict = verifier.check(msgspec.json.decode(line, type=Job))
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
