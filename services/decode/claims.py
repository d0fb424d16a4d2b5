"""Claims of one rank: requests booked first come first served, and those whose pages are on their way. Pure bookkeeping.

A claim is a number for load and admission; it pins nothing until its pages are taken.
"""
from collections.abc import Callable, Iterator

from services.decode.request import Request, RequestState
from services.kv.messages import RequestKey

MOVE_RESERVE = 2  # pages beyond what the router knows of a request that moves here
RESERVE_ALL_AFTER = 2  # preemptions, after which a request comes back only with pages for all its max_tokens


def pages_wanted(request: Request) -> int:
    """Length of the page table with which a request starts: what is handed over and one page to go on with, or all it may ever need.

    A request that moves here runs on while it is pulled; should it outgrow its reserve, the move fails.
    """
    if request.spec.num_preemptions >= RESERVE_ALL_AFTER:
        return request.max_pages
    return min(request.num_pages_handed_over + (MOVE_RESERVE if request.spec.is_move else 1), request.max_pages)


class Claims:
    """CLAIMED requests in their order, and FETCHING ones."""

    def __init__(self, max_claims: int) -> None:
        self._max_claims = max_claims
        self._claimed: dict[tuple[int, int], Request] = {}
        self._fetching: dict[tuple[int, int], Request] = {}
        self._by_key: dict[RequestKey, Request] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_key.values()))

    @property
    def is_full(self) -> bool:
        """Whether no further claim is booked."""
        return len(self) >= self._max_claims

    def first(self, is_admitted: Callable[[Request], bool]) -> Request | None:
        """The claim to be served next: nobody overtakes it among those that their holders have admitted.

        The others must be passed: a holder that is full of leases for later claims admits them only once those are read.
        """
        return next((request for request in self._claimed.values() if is_admitted(request)), None)

    def book(self, request: Request) -> None:
        """Append a CLAIMED request."""
        assert request.key not in self._by_key and request.id not in self._claimed and request.id not in self._fetching
        self._claimed[request.id] = request
        self._by_key[request.key] = request

    def start_fetching(self, request: Request) -> None:
        """The claim has its pages now."""
        del self._claimed[request.id]
        self._fetching[request.id] = request
        request.state = RequestState.FETCHING

    def get(self, session: int, handle: int) -> Request | None:
        """The request of that name, if it is here."""
        return self._claimed.get((session, handle)) or self._fetching.get((session, handle))

    def by_key(self, key: RequestKey) -> Request | None:
        """The request of that key, if it is here."""
        return self._by_key.get(key)

    def of_session(self, session: int) -> list[Request]:
        """All requests of a session."""
        return [request for request in self._by_key.values() if request.session == session]

    def remove(self, request: Request) -> None:
        """The request leaves, whatever its state."""
        del self._by_key[request.key]
        self._claimed.pop(request.id, None)
        self._fetching.pop(request.id, None)
