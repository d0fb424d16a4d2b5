"""The verifying process seen from the run: streams go in, verdicts come out. Niced, so that it takes what the cluster leaves."""

import asyncio
import subprocess
import sys
from collections.abc import Callable

import msgspec

from services.model.params import SamplingParams


class Job(msgspec.Struct, frozen=True):
    """One stream of one choice, as its client saw it. `reason`: "STOP", "LENGTH", or "" when the stream had no end."""

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stops: tuple[str, ...]
    text: str
    reason: str


class Verdict(msgspec.Struct, frozen=True):
    """`wrong`: one sentence each; `excused`: indices of output tokens."""

    number: int
    num_tokens: int
    excused: tuple[int, ...]
    wrong: tuple[str, ...]


class Worker:
    """The process, seen from the run. `on_verdict` runs in the event loop."""

    def __init__(self, on_verdict: Callable[[Verdict], None]) -> None:
        self._on_verdict = on_verdict
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.num_pending = 0

    async def start(self) -> None:
        """Start the process; it loads while the cluster does."""
        self._process = await asyncio.create_subprocess_exec(
            "nice", "-n", "19", sys.executable, "-m", "services.doctor.chaos.verify", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            limit=2**24, start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())

    def put(self, job: Job) -> None:
        """Queue one stream."""
        assert self._process is not None and self._process.stdin is not None
        self.num_pending += 1
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.num_pending -= 1
            self._on_verdict(msgspec.json.decode(line, type=Verdict))

    async def finish(self) -> int:
        """Wait for all verdicts; returns how many streams got none because the process ended."""
        assert self._process is not None and self._process.stdin is not None and self._reader is not None
        self._process.stdin.close()
        await self._reader
        await self._process.wait()
        return self.num_pending

    def kill(self) -> None:
        """End at once; without effect after finish()."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
