"""A decode rank without process or network: a scripted holder, a scripted model, a local fabric, a fake clock, one thread.

The scripted model's next token depends on everything in the pages: stored values are token ids, and
next = 2 + (sum of (position + 1) * id) % 250. So a wrong page, a lost append or a foreign write changes the text.
"""
import math
from collections.abc import Callable, Sequence

import torch

from proto.baton.v1 import common_pb2
from services.decode.fetch import Fetcher
from services.decode.forward import DecodeBatch
from services.decode.loop import DecodeLoop, Forward
from services.decode.messages import Cancel, Failed, Finished, Ready, RequestEvent, SessionLost, StepOut, Submit
from services.decode.request import Request, RequestSpec, RequestState
from services.kv.layout import PAGE_SIZE, Compatibility, KvLayout, num_pages_for
from services.kv.lease import LeaseEnded
from services.kv.local_transport import LocalFabric
from services.kv.messages import HandoffState, PeerRank, PenaltyCounts, RequestKey
from services.kv.pages import Holder, HolderKind
from services.kv.prefix import OnChange
from services.kv.rank_kv import RankKv, open_rank_kv
from services.model.params import SamplingParams
from services.runtime.engine import StepClock

VOCAB, EOS = 260, 1
LAYOUT = KvLayout(num_layers=2, kv_lora_rank=4, rope_dim=2, dtype="float32")
SAME = Compatibility({"model": "scripted"})


def next_token(token_ids: Sequence[int]) -> int:
    """The scripted model on plain token ids: the oracle."""
    return 2 + sum((position + 1) * token for position, token in enumerate(token_ids)) % 250


def mono(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The oracle's output."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(token_ids) :]


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, **fields)  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Prefill = Callable[[torch.Tensor, list[int], RequestSpec], int]
"""Fill the page table with the prompt's KV and choose the first token."""


def scripted_prefill(pages: torch.Tensor, page_table: list[int], spec: RequestSpec) -> int:
    for position, token in enumerate(spec.token_ids):
        pages[page_table[position // PAGE_SIZE], :, position % PAGE_SIZE, :] = float(token)
    return next_token(spec.token_ids)


class ScriptedForward:
    """Like DecodeForward; `fail_with` raises once, `nan_for` poisons the rows that feed these tokens, `row` replaces the logits."""

    def __init__(self) -> None:
        self.batches: list[DecodeBatch] = []
        self.fail_with: Exception | None = None
        self.nan_for: set[int] = set()
        self.row: torch.Tensor | None = None

    def run(self, pages: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        self.batches.append(batch)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        logits = torch.zeros(len(batch.token_ids), VOCAB)
        for row, (token, position, table) in enumerate(zip(batch.token_ids, batch.positions, batch.page_tables, strict=True)):
            pages[table[position // PAGE_SIZE], :, position % PAGE_SIZE, :] = float(token)
            stored = torch.cat([pages[page, 0, :, 0] for page in table])[: position + 1].double()
            assert (torch.cat([pages[page, -1, :, -1] for page in table])[: position + 1] == stored).all(), "layers differ"
            total = int((stored * torch.arange(1, position + 2, dtype=torch.float64)).sum())
            logits[row, 2 + total % 250] = 5.0
            if self.row is not None:
                logits[row] = self.row
            if token in self.nan_for:
                logits[row, 7] = math.nan
        return logits


class ScriptedHolder:
    """A prefill rank's side of hand-offs."""

    def __init__(
        self, fabric: LocalFabric, clock: Clock, compatibility: Compatibility = SAME, layout: KvLayout = LAYOUT,
        prefill: Prefill = scripted_prefill,
    ) -> None:
        self.kv = open_rank_kv(layout=layout, num_pages=64, transport="local", compatibility=compatibility, fabric=fabric, clock=clock)
        self._prefill = prefill
        self._pages: dict[RequestKey, list[int]] = {}
        self._first_tokens: dict[RequestKey, int] = {}

    def rank(self, address: str = "prefill:1") -> PeerRank:
        return PeerRank(self.kv.instance_id, address, 0, self.kv.transport.metadata())

    def open(self, spec: RequestSpec, reader: RankKv) -> None:
        """Compute the prompt and open the lease; announces nothing."""
        self.kv.transport.add_peer(reader.transport.metadata())
        pages = self.kv.pool.take(num_pages_for(len(spec.token_ids)), Holder(HolderKind.REQUEST, spec.key))
        self._first_tokens[spec.key] = self._prefill(self.kv.memory.pages, pages, spec)
        self._pages[spec.key] = pages
        self.kv.leases.open(spec.key, [reader.instance_id])

    def announce(self, spec: RequestSpec, start: int = 0, stop: int | None = None) -> None:
        self.kv.leases.announce(spec.key, [(index, page) for index, page in enumerate(self._pages[spec.key])][start:stop])

    def announce_last(self, spec: RequestSpec, start: int = 0, first_token: int | None = None) -> None:
        """The rest of the pages and the state; the request lives on in its lease."""
        token = self._first_tokens[spec.key] if first_token is None else first_token
        prompt = spec.token_ids[: len(spec.token_ids) - spec.num_output_tokens]
        counts: dict[int, int] = {}
        for output in [*spec.token_ids[len(prompt) :], token]:
            counts[output] = counts.get(output, 0) + 1
        state = HandoffState(
            first_token=token, first_logprob=-0.5 if spec.params.logprobs >= 0 else None, num_prompt_tokens=len(spec.token_ids),
            penalties=PenaltyCounts(tuple(sorted(set(prompt))), counts), num_output_tokens=spec.num_output_tokens + 1,
        )
        pages = [(index, page) for index, page in enumerate(self._pages[spec.key])][start:]
        self.kv.leases.announce(spec.key, pages, state)
        self.drop(spec)

    def drop(self, spec: RequestSpec) -> None:
        """The request's own hold on its pages."""
        del self._pages[spec.key], self._first_tokens[spec.key]
        self.kv.pool.release(Holder(HolderKind.REQUEST, spec.key))

    def hand_off(self, spec: RequestSpec, reader: RankKv, first_token: int | None = None) -> None:
        """All in one announcement."""
        self.open(spec, reader)
        self.announce_last(spec, first_token=first_token)


class Rig:
    """The rank under test and one holder; `beside` another rank, they share holder, fabric and clock."""

    def __init__(self, *, num_pages: int = 32, max_running: int = 8, max_claims: int = 16, max_model_len: int = 2048,
                 layout: KvLayout = LAYOUT, prefill: Prefill = scripted_prefill, forward: Forward | None = None,
                 beside: "Rig | None" = None, on_change: OnChange | None = None) -> None:
        self.clock, self.fabric = (beside.clock, beside.fabric) if beside else (Clock(), LocalFabric())
        self.holder = beside.holder if beside else ScriptedHolder(self.fabric, self.clock, layout=layout, prefill=prefill)
        self.kv = open_rank_kv(
            layout=layout, num_pages=num_pages, transport="local", compatibility=SAME, fabric=self.fabric, clock=self.clock,
            on_change=on_change,
        )
        self.forward = ScriptedForward()
        self.events: list[RequestEvent] = []
        self.delivered: list[Request] = []
        self.fetcher = Fetcher(
            self.kv, max_claims=max_claims, max_model_len=max_model_len, emit=self.events.append, deliver=self._deliver, clock=self.clock
        )
        self.loop = DecodeLoop(
            forward or self.forward, self.kv, max_running=max_running, eos_token_ids=(EOS,), emit=self.events.append, clock=StepClock(),
            num_claims=lambda: self.fetcher.num_claims, now=self.clock,
        )
        self._num_requests = 0

    def _deliver(self, item: Request | LeaseEnded) -> None:
        if isinstance(item, Request):
            self.delivered.append(item)
        self.loop.inbox.put(item)

    # ---- doing

    def spec(self, token_ids: Sequence[int], params: SamplingParams, **fields: object) -> RequestSpec:
        self._num_requests += 1
        key = RequestKey(f"r{self._num_requests}", 0, 0)
        return RequestSpec(**{"key": key, "token_ids": list(token_ids), "params": params, "source": self.holder.rank()} | fields)  # type: ignore[arg-type]

    def submit(self, spec: RequestSpec, handle: int, session: int = 1) -> None:
        self.fetcher.submit(Submit(session, handle, spec))

    def start(self, token_ids: Sequence[int], params: SamplingParams, handle: int, session: int = 1, **fields: object) -> RequestSpec:
        """Submit, and hand everything over."""
        spec = self.spec(token_ids, params, **fields)
        self.submit(spec, handle, session)
        self.holder.hand_off(spec, self.kv)
        return spec

    def exchange(self) -> None:
        """Every thread but the main loop, a few turns."""
        for _ in range(4):
            self.fetcher.tick()
            self.holder.kv.exchange.tick()
            self.check()

    def step(self) -> None:
        """One turn of the main loop."""
        assert self.loop.take_waiting()
        self.check()
        self.loop.step()
        self.check()

    def run(self, num_steps: int = 400) -> None:
        """Until nothing is left to do."""
        for _ in range(num_steps):
            self.exchange()
            self.step()
            if not len(self.loop.scheduler) and not self.fetcher.num_claims:
                return
        raise AssertionError(f"{len(self.loop.scheduler)} requests and {self.fetcher.num_claims} claims are left after {num_steps} steps")

    def cancel(self, handle: int, session: int = 1) -> None:
        """As the handoff thread does it."""
        command = Cancel(session, handle, common_pb2.CANCELLED)
        if not self.fetcher.cancel(command):
            self.loop.inbox.put(command)

    def lose_session(self, session: int) -> None:
        """As the handoff thread does it."""
        self.fetcher.session_lost(SessionLost(session))
        self.loop.inbox.put(SessionLost(session))

    # ---- seeing

    def of(self, kind: type, handle: int | None = None) -> list:
        return [event for event in self.events if isinstance(event, kind) and (handle is None or event.handle == handle)]

    def tokens(self, handle: int, session: int = 1) -> list[int]:
        """Output tokens told so far, the first one too; their indices have no gap."""
        found = [(event.position, event.first_token.token_id) for event in self.of(Ready, handle) if event.session == session]
        for event in self.of(StepOut):
            if event.session == session and handle in event.handles:
                row = event.handles.index(handle)
                found.append((event.first_index[row], event.token_ids[row]))
        assert [index for index, _ in found] == list(range(found[0][0], found[0][0] + len(found))) if found else True
        return [token for _, token in found]

    def end(self, handle: int) -> Finished | Failed:
        (event,) = [event for event in self.of(Finished | Failed) if event.handle == handle]  # type: ignore[arg-type]
        return event

    def check(self) -> None:
        self.kv.check_integrity()
        self.holder.kv.check_integrity()

    def assert_conserved(self) -> None:
        """Nothing of any request is left but cached pages."""
        self.check()
        for kv in (self.kv, self.holder.kv):
            assert kv.pool.num_available == kv.pool.num_pages, "pages are held by nobody's request"
            assert not len(kv.pulls) and not kv.pulls.num_reads and not len(kv.leases)
        assert not len(self.loop.scheduler) and not self.fetcher.num_claims and not self.loop.num_penalty_states and not self.loop.num_moves
        assert all(request.state in (RequestState.FINISHED, RequestState.ABORTED) for request in self.delivered)
