"""Who takes part in the next step, who gives its pages up, and when a request is over. Pure: no torch, no clock, no network."""
from collections import deque
from collections.abc import Collection

from proto.baton.v1 import common_pb2
from services.decode.request import Request, RequestState


def finish_reason(request: Request, eos_token_ids: Collection[int]) -> int:
    """`baton.v1.FinishReason` that the last token known brings about; FINISH_UNSPECIFIED = the request goes on."""
    last = request.token_ids[-1]
    if last in request.params.stop_token_ids or (last in eos_token_ids and not request.params.ignore_eos):
        return common_pb2.STOP
    if len(request.token_ids) >= request.max_total_tokens:
        return common_pb2.LENGTH
    return common_pb2.FINISH_UNSPECIFIED


class Scheduler:
    """READY requests wait in `ready` while `running` is full; both are in order of admission. A PAUSED one keeps its place."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self.ready: deque[Request] = deque()
        self.running: list[Request] = []

    def __len__(self) -> int:
        return len(self.ready) + len(self.running)

    @property
    def requests(self) -> list[Request]:
        """All of them, the most recently admitted last."""
        return [*self.running, *self.ready]

    @property
    def is_idle(self) -> bool:
        """Whether no step has anything to do: there is nobody, or only PAUSED requests."""
        return all(request.state is RequestState.PAUSED for request in self.requests)

    @property
    def num_running_tokens(self) -> int:
        """KV tokens of the running requests, the next step's included."""
        return sum(len(request.token_ids) for request in list(self.running))

    def add(self, request: Request) -> None:
        """A READY request; it takes part in the next step if there is room."""
        self.ready.append(request)

    def get(self, session: int, handle: int) -> Request | None:
        """The request of that name, if it is here."""
        return next((request for request in self.requests if request.id == (session, handle)), None)

    def remove(self, request: Request) -> None:
        """The request leaves, for whatever reason."""
        (self.running if request in self.running else self.ready).remove(request)

    def pause(self, request: Request) -> None:
        """The request takes part in no step."""
        request.state = RequestState.PAUSED

    def resume(self, request: Request) -> None:
        """PAUSED -> what it was."""
        if request.state is RequestState.PAUSED:
            request.state = RequestState.RUNNING if request in self.running else RequestState.READY

    def admit(self) -> None:
        """READY -> RUNNING as far as `max_running` allows."""
        while self.ready and len(self.running) < self._max_running:
            request = self.ready.popleft()
            if request.state is not RequestState.PAUSED:
                request.state = RequestState.RUNNING
            self.running.append(request)

    def batch(self) -> list[Request]:
        """Who takes part in the next step."""
        return [request for request in self.running if request.state is not RequestState.PAUSED]

    def lacking_page(self) -> list[Request]:
        """Those of the batch that need one more page for the next step."""
        return [request for request in self.batch() if request.needs_page]

    def victim(self, num_available: int) -> Request | None:
        """Who must be preempted so that the next step's pages can be had: the most recently admitted; None when they suffice.

        Requests that hold pages for all their max_tokens are spared: they were preempted twice and must get to their end.
        """
        if len(self.lacking_page()) <= num_available:
            return None
        return next(request for request in reversed(self.requests) if not request.has_all_pages)
