"""From claim to READY: pages are taken strictly first come first served, pulled and verified. Runs on the handoff thread alone.

1 submit    the holder becomes a peer, the claim is booked and listens for announcements        -> CLAIMED
2 serve     the first claim with an announcement pins its prefix hits and takes all pages it lacks, or waits   -> FETCHING
            a move's needs no announcement: its holder runs it, and begins to announce once the router heard `granted`
3 settle    every read is verified: the holder hears Done, the router `ready`, the main loop runs it   -> READY
4 fail      whatever goes wrong is typed, told to holder and router, and gives every page back  -> ABORTED
"""
import logging
import time
from collections.abc import Callable

from proto.baton.v1 import common_pb2
from services.decode.claims import Claims, pages_wanted
from services.decode.messages import (
    Cancel,
    CaughtUp,
    Claimed,
    Failed,
    Finished,
    FirstToken,
    Granted,
    MoveStart,
    Ready,
    RequestEvent,
    Resumed,
    SessionLost,
    Submit,
    TransferTimes,
)
from services.decode.metrics import transferred
from services.decode.request import Request, RequestState
from services.kv.layout import PAGE_SIZE
from services.kv.lease import LeaseEnded
from services.kv.messages import HandoffState
from services.kv.metrics import HIT_TOKENS, QUERY_TOKENS
from services.kv.peers import Peers
from services.kv.pull import PullState, PullStats
from services.kv.puller import PullCaughtUp, PullEnded
from services.kv.rank_kv import RankKv
from services.runtime.errors import HandoffError

_DEADLINE_S = 0.05  # how often deadlines are looked at

_log = logging.getLogger(__name__)


class Fetcher:
    """Owns this rank's requests until they are READY.

    `emit` takes events for the front, `deliver` READY requests and the ends of leases for the main loop.
    """

    def __init__(
        self, kv: RankKv, *, max_claims: int, max_model_len: int,
        emit: Callable[[RequestEvent], None], deliver: Callable[[Request | LeaseEnded], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._max_model_len = max_model_len
        self._emit, self._deliver, self._clock = emit, deliver, clock
        self._claims = Claims(max_claims)
        self._peers = Peers(lambda: kv.transport)
        self._in_vain: tuple[tuple[int, int], int, int] | None = None  # claim, free pages and cached pages of the last failed attempt
        self._deadlines_checked_at = 0.0

    @property
    def num_claims(self) -> int:
        """Requests booked and not READY yet."""
        return len(self._claims)

    @property
    def is_busy(self) -> bool:
        """Whether anything may move without a command: claims, leases, or reads that nobody waits for any more."""
        return bool(self._claims) or len(self._kv.leases) > 0 or self._kv.pulls.num_reads > 0

    def submit(self, command: Submit) -> None:
        """Book a claim, or refuse it with a typed reason that holder and router hear."""
        request = Request(command.session, command.handle, command.spec, max_model_len=self._max_model_len, now=self._clock())
        if self._claims.by_key(request.key) is not None:  # the holder must not hear of it: the claim that exists goes on
            self._say_failed(request, common_pb2.STALE_ATTEMPT, f"{request.key} is claimed already; an attempt is submitted once")
            return
        try:
            self._peers.meet(command.spec.source)
            self._check(request)
            with self._kv.lock:
                self._kv.pulls.claim(request.key, command.spec.source.instance_id)
                cached = self._kv.pool.cache.match(request.digests)
        except HandoffError as error:
            with self._kv.lock:
                self._kv.pulls.refuse(request.key, command.spec.source.instance_id, error.reason, str(error))
            self._say_failed(request, error.reason, str(error))
            return
        self._claims.book(request)
        self._emit(Claimed(request.session, request.handle, len(cached) * PAGE_SIZE))

    def cancel(self, command: Cancel) -> bool:
        """Forget a request that is not READY yet; False when it is not here."""
        request = self._claims.get(command.session, command.handle)
        if request is not None:
            self._abort(request, command.reason or common_pb2.CANCELLED, "cancelled by the router")
        return request is not None

    def session_lost(self, command: SessionLost) -> None:
        """Forget all requests of a session."""
        for request in self._claims.of_session(command.session):
            self._abort(request, common_pb2.SESSION_LOST, "the router's session broke")

    def meet_reader(self, command: MoveStart) -> bool:
        """Make a move's reader a peer; False when it cannot be used: the router hears that the request runs on."""
        try:
            self._peers.meet(command.reader)
        except HandoffError as error:
            self._emit(Resumed(command.session, command.handle, error.reason, str(error)))
            return False
        return True

    def close(self) -> None:
        """The rank stops: holders and router hear that nothing will be read any more."""
        for request in self._claims:
            message = "the decode rank stops"
            self._abort(request, common_pb2.DRAINING, message)
            self._say_failed(request, common_pb2.DRAINING, message)

    def tick(self) -> None:
        """Move every hand-off on; never blocks."""
        self._serve()
        for event in self._kv.exchange.tick():
            if isinstance(event, LeaseEnded):  # of a request that moves away: the main loop's
                self._deliver(event)
            elif (request := self._claims.by_key(event.key)) is None:
                continue
            elif isinstance(event, PullCaughtUp):
                self._emit(CaughtUp(request.session, request.handle))
            else:
                self._settle(request, event)
        self._check_deadlines()

    # ---- booking

    def _check(self, request: Request) -> None:
        num_pages = self._kv.pool.num_pages
        if request.max_pages > num_pages:
            raise HandoffError(
                common_pb2.TOO_LARGE,
                f"request needs {request.max_pages} pages for prompt and max_tokens but this rank has {num_pages}; ask for fewer tokens",
            )
        if self._claims.is_full:
            raise HandoffError(common_pb2.OVERLOADED, f"{len(self._claims)} claims are booked, the most of this rank; try another")

    # ---- pages

    def _serve(self) -> None:
        """Take pages for the first claim that its holder has admitted, as long as they are free; never for one behind it."""
        while True:
            with self._kv.lock:
                request = self._claims.first(self._is_admitted)
                if request is None or not self._take_pages(request):
                    return
                self._begin(request)
            self._claims.start_fetching(request)
            if request.spec.is_move:
                self._emit(Granted(request.session, request.handle))

    def _is_admitted(self, request: Request) -> bool:
        return request.spec.is_move or self._kv.pulls.is_announced(request.key)

    def _begin(self, request: Request) -> None:
        room = len(request.pages) if request.spec.is_move else None
        lacking = range(request.num_cached_pages, request.num_pages_handed_over if room is None else room)
        destinations = {index: request.pages[index] for index in lacking}
        self._kv.pulls.begin(request.key, destinations, request.check_handoff, room=room)

    def _take_pages(self, request: Request) -> bool:
        """Pin the prefix hits and take all other pages at once, or hold nothing."""
        pool = self._kv.pool
        situation = request.id, pool.num_available, len(pool.cache)
        if situation == self._in_vain:  # asked thousands of times a second while the claim waits
            return False
        cached = pool.match(request.digests, request.holder)
        num_wanted = pages_wanted(request) - len(cached)
        if num_wanted > pool.num_available:
            pool.release(request.holder)
            self._in_vain = situation
            return False
        request.pages = cached + pool.take(num_wanted, request.holder)
        request.num_cached_pages = len(cached)
        HIT_TOKENS.inc(PAGE_SIZE * len(cached))
        QUERY_TOKENS.inc(request.num_handed_over)
        return True

    # ---- ends

    def _settle(self, request: Request, ended: PullEnded) -> None:
        if ended.state is PullState.READY and ended.handoff is not None:
            self._ready(request, ended.handoff, ended.stats)
        elif ended.reason == common_pb2.REASON_UNSPECIFIED:  # it ended at the holder, who tells the router its last token
            self._leave(request, RequestState.FINISHED)
            num_output_tokens = request.num_output_tokens + (0 if request.spec.is_move else 1)
            self._emit(Finished(request.session, request.handle, common_pb2.FINISH_UNSPECIFIED, num_output_tokens, 0, 0))
        else:
            self._fail(request, ended.reason, ended.message)

    def _ready(self, request: Request, handoff: HandoffState, stats: PullStats) -> None:
        request.take_over(handoff)
        with self._kv.lock:  # verified pages only: what was read is as good as computed here
            self._kv.pool.insert(request.digests, request.pages[: len(request.digests)], request.token_ids)
        request.state, request.ready_at = RequestState.READY, self._clock()
        self._claims.remove(request)
        first = FirstToken(handoff.first_token, handoff.first_logprob, handoff.top_ids, handoff.top_logprobs)
        times = TransferTimes(
            num_pages=stats.num_pages, num_cached_pages=request.num_cached_pages, num_bytes=stats.num_bytes,
            read_us=int(stats.read_s * 1e6), wait_us=int(stats.wait_s * 1e6),
            exposed_us=int(min(stats.exposed_s, stats.read_s) * 1e6),  # a wait for pages is no transfer
            transport=self._kv.transport.stats.ucx,
        )
        self._emit(Ready(request.session, request.handle, request.num_output_tokens - 1, first, times))
        transferred(times)
        self._deliver(request)

    def _check_deadlines(self) -> None:
        now = self._clock()
        if now - self._deadlines_checked_at < _DEADLINE_S:
            return
        self._deadlines_checked_at = now
        for request in self._claims:
            if request.deadline is not None and now >= request.deadline:
                message = "the request's deadline passed before its pages were here"
                self._abort(request, common_pb2.DEADLINE, message)
                self._say_failed(request, common_pb2.DEADLINE, message)

    def _abort(self, request: Request, reason: int, message: str) -> None:
        with self._kv.lock:
            self._kv.pulls.cancel(request.key, reason, message)
        self._leave(request, RequestState.ABORTED)

    def _fail(self, request: Request, reason: int, message: str) -> None:
        self._leave(request, RequestState.ABORTED)
        self._say_failed(request, reason, message)

    def _leave(self, request: Request, state: RequestState) -> None:
        request.state = state
        self._claims.remove(request)
        with self._kv.lock:
            self._kv.pool.release(request.holder)

    def _say_failed(self, request: Request, reason: int, message: str) -> None:
        _log.info("hand-off failed: %s", message, extra={"request_id": request.key.request_id, "reason": reason})
        self._emit(Failed(request.session, request.handle, reason, message))
