"""Two decode ranks side by side and a router's part in between, done by hand: a request runs on `source` and moves to `target`."""
from collections.abc import Sequence
from typing import Any

import msgspec

from services.decode.messages import (
    CaughtUp,
    Failed,
    Finished,
    Granted,
    MovePause,
    MoveResume,
    MoveStart,
    Ready,
    StepOut,
)
from services.decode.request import RequestSpec
from services.kv.messages import PeerRank
from services.model.params import SamplingParams
from tests.decode.rig import Rig

HANDLE = 1


class MoveRig:
    """`dead` ranks are ticked no more, and what they hold is nobody's."""

    def __init__(self, *, target_pages: int = 32, **fields: Any) -> None:
        self.source = Rig(**fields)
        self.target = Rig(**(fields | {"num_pages": target_pages}), beside=self.source)
        self.clock, self.fabric = self.source.clock, self.source.fabric
        self.dead: set[str] = set()
        self.spec: RequestSpec | None = None

    # ---- doing

    def start(self, prompt: Sequence[int], params: SamplingParams, num_tokens: int = 1, **fields: object) -> None:
        """Run the request on the source until it has told `num_tokens` tokens."""
        self.spec = self.source.start(prompt, params, HANDLE, **fields)
        for _ in range(4):
            self.source.exchange()
        assert self.source.loop.take_waiting()
        while len(self.source.tokens(HANDLE)) < num_tokens:
            self.source.step()

    def submit(self, attempt: int = 1, behind: int = 0, **fields: Any) -> RequestSpec:
        """The router claims the target; it has not seen the source's last `behind` tokens yet."""
        assert self.spec is not None
        told = self.source.tokens(HANDLE)
        told = told[: max(len(told) - behind, 1)]
        source = PeerRank(self.source.kv.instance_id, "decode:1", 0, self.source.kv.transport.metadata())
        spec = RequestSpec(**{  # type: ignore[arg-type]
            "key": msgspec.structs.replace(self.spec.key, attempt=attempt), "token_ids": [*self.spec.token_ids, *told],
            "num_output_tokens": len(told), "params": self.spec.params, "source": source, "is_move": True,
        } | fields)
        self.target.submit(spec, attempt)
        return spec

    def begin(self, attempt: int = 1) -> None:
        """START, as the source's handoff thread takes it."""
        reader = PeerRank(self.target.kv.instance_id, "decode:2", 0, self.target.kv.transport.metadata())
        command = MoveStart(1, HANDLE, attempt, reader)
        if self.source.fetcher.meet_reader(command):
            self.command(command)

    def under_way(self, prompt: Sequence[int], params: SamplingParams, num_tokens: int) -> RequestSpec:
        """A request that has told `num_tokens` tokens, the target granted, the source announcing. Returns what the target was asked for."""
        self.start(prompt, params, num_tokens)
        spec = self.submit()
        self.step()
        self.begin()
        return spec

    def pause(self, attempt: int = 1) -> None:
        self.command(MovePause(1, HANDLE, attempt))

    def resume(self, attempt: int = 1) -> None:
        self.command(MoveResume(1, HANDLE, attempt))

    def command(self, command: MoveStart | MovePause | MoveResume) -> None:
        self.source.loop.inbox.put(command)
        assert self.source.loop.take_waiting()
        self.check()

    def exchange(self) -> None:
        """The handoff threads of both ranks, a few turns."""
        for _ in range(4):
            for rig in self.alive:
                rig.fetcher.tick()
            self.source.holder.kv.exchange.tick()
        self.check()

    def settle(self) -> None:
        """The handoff threads, and what the main loops hear from them; no step."""
        self.exchange()
        for rig in self.alive:
            assert rig.loop.take_waiting()
            rig.check()

    def step(self) -> None:
        """A turn of every thread."""
        self.exchange()
        for rig in self.alive:
            rig.step()

    def run(self, num_steps: int = 400) -> None:
        """Until nothing is left to do on either rank."""
        for _ in range(num_steps):
            self.step()
            if not any(len(rig.loop.scheduler) or rig.fetcher.num_claims for rig in self.alive):
                self.settle()
                return
        raise AssertionError(f"requests are left after {num_steps} steps")

    def move(self, attempt: int = 1, behind: int = 0) -> None:
        """All of it, the source stepping in between as long as it may."""
        self.submit(attempt, behind)
        self.step()
        assert self.target.of(Granted, attempt)
        self.begin(attempt)
        for _ in range(20):
            self.step()
            if self.target.of(CaughtUp, attempt):
                break
        self.pause(attempt)
        self.settle()

    def let(self, seconds: float, stride: float = 1.0) -> None:
        """Time goes by while every thread goes on."""
        for _ in range(int(seconds / stride)):
            self.clock.now += stride
            self.step()

    def part(self) -> None:
        """Nothing goes between the two ranks any more."""
        pair = {self.source.kv.instance_id, self.target.kv.instance_id}
        self.fabric.hold_reads = True
        self.fabric.on_notify = lambda sender, receiver, payload: [] if {sender, receiver} == pair else [payload]

    def heal(self) -> None:
        """Reads end at their next poll, messages arrive."""
        self.fabric.hold_reads, self.fabric.on_notify = False, None

    def kill(self, rig: Rig) -> None:
        self.fabric.kill(rig.kv.instance_id)
        self.dead.add(rig.kv.instance_id)

    def cancel(self, rig: Rig, handle: int) -> None:
        rig.cancel(handle)
        assert rig.loop.take_waiting()

    # ---- seeing

    @property
    def alive(self) -> list[Rig]:
        return [rig for rig in (self.source, self.target) if rig.kv.instance_id not in self.dead]

    def text(self, attempt: int = 1) -> list[int]:
        """Output tokens of both ranks by index: no gap, and where both told one it is the same."""
        by_index: dict[int, int] = {}
        for rig, handle in ((self.source, HANDLE), (self.target, attempt)):
            tokens = rig.tokens(handle)
            start = rig.of(Ready, handle)[0].position if tokens else 0
            for index, token in enumerate(tokens, start):
                assert by_index.setdefault(index, token) == token, f"token {index} differs between the ranks"
        assert sorted(by_index) == list(range(len(by_index)))
        return [by_index[index] for index in sorted(by_index)]

    def columns(self, attempt: int = 1) -> dict[int, tuple[float, list[int], list[float]]]:
        """Logprob and top list of every output token but the first, by index."""
        found: dict[int, tuple[float, list[int], list[float]]] = {}
        for rig, handle in ((self.source, HANDLE), (self.target, attempt)):
            for event in rig.of(StepOut):
                row = event.handles.index(handle)
                top = (event.top_ids[row], event.top_logprobs[row]) if event.top_ids else ([], [])
                found[event.first_index[row]] = (event.logprobs[row], *top)
        return found

    def of(self, kind: type, handle: int = HANDLE) -> list[Any]:
        """Events of the request on the source."""
        return self.source.of(kind, handle)

    def ends(self, rig: Rig, handle: int) -> list[Finished | Failed]:
        return [*rig.of(Finished, handle), *rig.of(Failed, handle)]

    def check(self) -> None:
        for rig in self.alive:
            rig.check()

    def assert_conserved(self) -> None:
        for rig in self.alive:
            rig.assert_conserved()
