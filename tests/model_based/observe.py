"""Which state transitions happened: the product's own state attributes, watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.decode.request import Request
from services.kv.pull import Pull

# DESIGN.md section 5, both tables, aborts from every state included. `pull` is the transfer inside a claim, VERIFYING the end of FETCHING.
# A claim also ends FINISHED when the first token was the last, and a lease RELEASED from COMPUTING for the same reason.
TRANSITIONS = (
    "request new -> claimed", "request claimed -> fetching", "request fetching -> ready", "request ready -> running",
    "request running -> finished", "request finished -> free", "request claimed -> finished", "request fetching -> finished",
    "request claimed -> aborted", "request fetching -> aborted", "request ready -> aborted", "request running -> aborted",
    "request running -> paused", "request paused -> running", "request paused -> aborted", "request aborted -> free",
    "pull new -> claimed", "pull claimed -> fetching", "pull fetching -> verifying", "pull verifying -> ready",
    "pull claimed -> aborted", "pull fetching -> aborted", "pull verifying -> aborted",
    "lease queued -> computing", "lease computing -> leased", "lease leased -> released", "lease released -> free",
    "lease queued -> aborted", "lease computing -> aborted", "lease leased -> aborted", "lease aborted -> free",
    "lease computing -> released", "lease computing -> expired", "lease leased -> expired", "lease expired -> free",
    "redirect of queued", "redirect of computing", "redirect of leased", "moved", "move came to nothing", "agent renewed",
)

Observer = Callable[[str, Any, str, str], None]
"""(kind, object, state before, state after)"""

_observer: Observer | None = None


class _State:
    """Takes the place of an attribute `state` and tells of every change."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return owner.__dict__["_state"]

    def __set__(self, owner: Any, state: Any) -> None:
        before = owner.__dict__.get("_state", "new")
        owner.__dict__["_state"] = state
        if _observer is not None and before is not state:
            _observer(self._kind, owner, str(before), str(state))


@contextmanager
def observed_states() -> Iterator[None]:
    """Every request and pull of a decode rank tells what becomes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "state", _State("request"), raising=False)
        patch.setattr(Pull, "state", _State("pull"), raising=False)
        yield


def observe(observer: Observer | None) -> None:
    """Who is told from now on."""
    global _observer
    _observer = observer
