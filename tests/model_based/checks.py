"""What is true of a world after every event, whatever happened."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from proto.baton.v1 import common_pb2
from services.decode.request import Request, RequestState
from services.kv.lease import LeaseEnded, LeaseTable
from services.kv.local_transport import LocalFabric, LocalRead
from services.kv.messages import Announce, Done, HandoffState, Message, RenewAnswer, RequestKey, decode
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.kv.rank_kv import RankKv
from services.kv.transport import TransferState
from tests.model_based.observe import observe
from tests.model_based.scripted import PAGE

if TYPE_CHECKING:
    from tests.model_based.ranks import HolderRank, Rank, ReaderRank
    from tests.model_based.requests import Ask, Attempt

_IN_FLIGHT = {HolderKind.READ, HolderKind.QUARANTINE}


class Announced:
    """What one holder has announced of one key."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, int]] = {}  # index -> (page, epoch)
        self.num_tokens: int | None = None  # known with the last


class Checks:
    """Bookkeeping of what was promised, read and told, and the invariants over it."""

    def __init__(self, transitions: Counter[str]) -> None:
        self.transitions = transitions
        self.fabric = LocalFabric()
        self.is_calm = False
        self.flawless_from: int | None = None  # handle from which on attempts meet no fault
        self.not_told: set[RequestKey] = set()  # some message of theirs was lost or late
        self.violations: list[str] = []  # seen where an exception would be caught by the product
        self.touched: set[Rank] = set()
        self.buried: list[Rank] = []
        self.holders: list[HolderRank] = []
        self.readers: list[ReaderRank] = []
        self._tokens_of_page: dict[bytes, list[int]] = {}
        self._asks: dict[str, Ask] = {}
        self._announced: dict[tuple[str, RequestKey], Announced] = {}
        self._landings: dict[LocalRead, dict[int, list[int]]] = {}  # read -> local page -> epochs of its source as bytes landed
        self._last_read: dict[tuple[int, int], LocalRead] = {}  # (memory, local page) -> the page read that landed there last
        self._states: dict[tuple[LeaseTable, RequestKey], str] = {}  # of leases
        self._ended: list[Request] = []  # decode's, since the last check
        observe(self._observed)

    def _observed(self, kind: str, owner: Any, before: str, after: str) -> None:
        self.transitions[f"{kind} {before} -> {after}"] += 1
        if isinstance(owner, Request) and after in (RequestState.FINISHED, RequestState.ABORTED):
            self._ended.append(owner)

    def know(self, ask: "Ask") -> None:
        """Remember what its pages hold."""
        self._asks[ask.name] = ask
        for digest, index in ask.digests().items():
            self._tokens_of_page[digest] = ask.full[index * PAGE : (index + 1) * PAGE]

    # ---- hooks

    def check_sent(self, sender: str, payload: bytes) -> Message:
        """A message leaves its sender."""
        message = decode(payload)
        if isinstance(message, Announce):
            self._promise(message)
        elif isinstance(message, RenewAnswer):
            for announce in message.announcements:
                self._promise(announce)
        elif isinstance(message, Done):
            reader = next((rank for rank in self.readers if rank.id == sender), None)
            if reader is not None and reader.kv.pulls.state(message.key) is not PullState.READY:
                self.violations.append(f"{sender} says Done of {message.key} before it is verified")
        return message

    def _promise(self, announce: Announce) -> None:
        mine = self._announced.setdefault((announce.holder, announce.key), Announced())
        for page in announce.pages:
            if mine.pages.setdefault(page.index, (page.page, page.epoch)) != (page.page, page.epoch):
                self.violations.append(f"{announce.holder} announces {page} of {announce.key} after {mine.pages[page.index]}")
        if announce.state is not None:
            mine.num_tokens = announce.state.num_prompt_tokens

    def landed(self, read: LocalRead, pages: Sequence[int]) -> None:
        """Bytes are about to land."""
        if read.of_epochs:
            self._landings.setdefault(read, {}).update({page: [] for page in pages})
            return
        seen = self._landings.setdefault(read, {})
        epochs = read._source.epochs
        for local in pages:
            remote = read.remote_pages[read.local_pages.index(local)]
            seen.setdefault(local, []).append(int(epochs[remote]))
            self._last_read[id(read._target), local] = read

    def has_landed(self, read: LocalRead) -> bool:
        """Whether every byte of a read has arrived."""
        return set(self._landings.get(read, ())) == set(read.local_pages)

    def check_cached(self, rank: "Rank", digests: Sequence[bytes], pages: Sequence[int], what: str) -> None:
        """A page of a prefix cache holds the tokens of its digest."""
        for digest, page in zip(digests, pages, strict=True):
            ours = self._tokens_of_page.get(digest)
            if rank.stored(page) != ours:
                self.violations.append(f"page {page} of {rank.id} {what} with {rank.stored(page)} for {ours}")

    def check_ready(self, rank: "ReaderRank", request: Request) -> None:
        """A request is about to run: its pages are its own, and were read while their epochs were as announced."""
        stored = [value for page in request.pages for value in rank.stored(page)][: request.num_handed_over]
        if stored != request.token_ids[: request.num_handed_over]:
            self.violations.append(f"{request.key} is ready at {rank.id} with {stored}, not {request.token_ids}")
        announced = self._announced.get((request.spec.source.instance_id, request.key))
        for index in range(request.num_cached_pages, request.num_pages_handed_over):
            read = self._last_read.get((id(rank.memory), request.pages[index]))
            if read is None or announced is None or index not in announced.pages:
                self.violations.append(f"{request.key} is ready at {rank.id} without its page {index}")
                continue
            page, epoch = announced.pages[index]
            local = request.pages[index]
            remote = read.remote_pages[read.local_pages.index(local)]
            epochs = self._landings[read][local]
            if (read.peer, remote) != (request.spec.source.instance_id, page) or set(epochs) != {epoch}:
                self.violations.append(
                    f"{request.key} uses page {index}, announced as {page} at epoch {epoch}, read from {read.peer} {remote} at {epochs}"
                )

    def watch_leases(self, leases: LeaseTable, kv: RankKv) -> None:
        """Count what becomes of a rank's leases."""
        open_, announce, redirect, take_ended = leases.open, leases.announce, leases.redirect, leases.take_ended

        def watched_open(key: RequestKey, readers: Sequence[str]) -> None:
            open_(key, readers)
            self._lease_is(leases, key, "computing")

        def watched_announce(key: RequestKey, pages: Sequence[tuple[int, int]], state: HandoffState | None = None) -> None:
            announce(key, pages, state)
            if state is not None and leases.state(key) is not None:
                self._lease_is(leases, key, "leased")

        def watched_redirect(key: RequestKey, new_key: RequestKey, readers: Sequence[str]) -> bool:
            done = redirect(key, new_key, readers)
            if done:
                self._states[leases, new_key] = self._states.get((leases, key), "queued")
                self.transitions[f"redirect of {self._states[leases, new_key]}"] += 1
            return done

        def watched_ended() -> list[LeaseEnded]:
            ended = take_ended()
            for each in ended:
                self._lease_is(leases, each.key, each.state)
                if not kv.pool.pages.pages_of(Holder(HolderKind.LEASE, each.key)):
                    self._lease_is(leases, each.key, "free")
            return ended

        leases.open, leases.announce, leases.redirect = watched_open, watched_announce, watched_redirect  # type: ignore[method-assign]
        leases.take_ended = watched_ended  # type: ignore[method-assign]

    def _lease_is(self, leases: LeaseTable, key: RequestKey, state: str) -> None:
        before = self._states.get((leases, key), "queued")
        self._states[leases, key] = state
        self.transitions[f"lease {before} -> {state}"] += 1

    def check_failure(self, attempt: "Attempt", reason: int, message: str) -> None:
        """Nothing fails without a cause; a holder that has forgotten a request, and says so, is one."""
        self.transitions[f"failed {common_pb2.Reason.Name(reason)}"] += 1  # type: ignore[arg-type]
        is_silence = reason == common_pb2.LEASE_EXPIRED and "no longer knows" not in message
        if self.is_calm and is_silence and attempt.claim_over and attempt.is_intact:
            self.violations.append(f"{attempt.key} fails in calm times: {message}")
        is_flawless = self.flawless_from is not None and attempt.handle > self.flawless_from and not attempt.failed and attempt.is_intact
        if is_flawless and reason not in (common_pb2.PREEMPTED, common_pb2.OVERLOADED):
            self.violations.append(f"{attempt.key} fails though nothing went wrong: {common_pb2.Reason.Name(reason)}, {message}")
        if reason == common_pb2.INTERNAL:
            self.violations.append(f"{attempt.key} fails by a fault of ours: {message}")

    # ---- after every event

    def check(self) -> None:
        """All invariants of the ranks that the last event touched."""
        for rank in self.touched:
            rank.kv.check_integrity()
            rank.kv.told.number()
            assert rank.kv.told.digests == rank.kv.pool.cache.digests, f"events and prefix cache of {rank.id} differ"
        self._check_reads()
        self._check_leases()
        self._check_ended()
        self.touched.clear()
        assert not self.violations, self.violations

    def _check_reads(self) -> None:
        """A read in flight holds its destination."""
        for read in self.fabric.reads:
            rank = next((rank for rank in self.readers if rank.memory is read._target), None)
            if rank is None or read.state is not TransferState.RUNNING or read.is_fenced:
                continue
            for page in read.local_pages:
                kinds = {holder.kind for holder in rank.kv.pool.pages.holders_of(page)}
                assert kinds & _IN_FLIGHT, f"page {page} of {rank.id} is held by {kinds} while a read into it is in flight"
            if read.of_epochs:
                self._check_is_last(rank, read)

    def _check_is_last(self, rank: "Rank", epochs: LocalRead) -> None:
        """Epochs are read once every page is."""
        for read in self.fabric.reads:
            is_out = not read.of_epochs and read.state is TransferState.RUNNING and read._target is rank.memory
            assert not (is_out and set(read.local_pages) & set(epochs.local_pages)), f"{rank.id} verifies pages {read.local_pages} unread"

    def _check_leases(self) -> None:
        """A lease keeps its pages as they were announced."""
        ranks = {rank.id: rank for rank in (*self.holders, *self.readers)}
        for (instance, key), announced in list(self._announced.items()):
            rank = ranks.get(instance)
            if rank is None or rank.kv.leases.state(key) is None:
                continue
            full = self._asks[key.request_id].full
            for index, (page, epoch) in announced.pages.items():
                holders = rank.kv.pool.pages.holders_of(page)
                assert Holder(HolderKind.LEASE, key) in holders, f"{instance} leases page {page} of {key}, held by {holders}"
                assert rank.kv.pool.pages.epoch(page) == epoch, f"page {page} of {key} is leased and has a new epoch"
                stop = (index + 1) * PAGE if announced.num_tokens is None else min((index + 1) * PAGE, announced.num_tokens)
                ours = full[index * PAGE : stop]
                assert rank.stored(page)[: len(ours)] == ours, f"page {index} of {key} is {rank.stored(page)} at {instance}, not {ours}"

    def check_told(self) -> None:
        """In calm times whoever gave a hand-off up, or ended it, has told its holder: nothing waits for a timer.

        But for a claim that was refused since its holder is closed to this rank: the router tells that holder.
        """
        for ask in self._asks.values():
            for attempt in ask.attempts:
                is_over = attempt.claim_over or attempt.claim_cancelled
                if is_over and attempt.key not in self.not_told and attempt.is_intact and attempt.reason != common_pb2.PEER_GONE:
                    state = attempt.holder.kv.leases.state(attempt.key)
                    assert state is None, f"{attempt.holder.id} was not told that {attempt.key} is over: its lease is {state}"

    def _check_ended(self) -> None:
        """Whoever leaves gives all pages back at once; those of reads in flight are the reads' own."""
        for request in self._ended:
            for rank in self.readers:
                held = rank.kv.pool.pages.pages_of(request.holder)
                assert not held, f"{request.key} is {request.state} and holds pages {held} of {rank.id}"
            self.transitions[f"request {request.state} -> free"] += 1
        self._ended.clear()

    def check_nothing_left(self) -> None:
        """Conservation: everything is free or cached, no table knows a request, every caller had its one answer."""
        for rank in (*self.holders, *self.readers):
            pool = rank.kv.pool
            assert pool.num_available == pool.num_pages, f"{rank.id} keeps {pool.num_pages - pool.num_available} pages"
            tables = [rank.kv.leases, rank.kv.pulls]
            tables += [rank.engine, rank.engine.scheduler] if hasattr(rank, "engine") else [
                rank.fetcher._claims, rank.loop.scheduler, rank.loop._sampler, rank.loop._moves,  # type: ignore[attr-defined]
            ]
            for table in tables:
                left = {name: value for name, value in vars(table).items() if isinstance(value, dict | list | set | deque) and value}
                assert not left, f"{type(table).__name__} of {rank.id} keeps {left}"
        for ask in self._asks.values():
            for attempt in ask.attempts:
                leg = attempt.leg
                assert leg is None or leg.over, f"the Run of {attempt.key} was never answered"
                assert leg is None or leg.lease_over or not leg.leased, f"the lease of {attempt.key} was never over"
                assert attempt.claim_over or attempt.claim_cancelled, f"the claim of {attempt.key} never ended"
