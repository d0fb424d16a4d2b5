"""Every error Baton raises on purpose.

BatonError
├── InvalidRequest     the caller's mistake; names field, value and limit        INVALID_ARGUMENT
├── Overloaded         a bound is reached; carries a retry hint                  RESOURCE_EXHAUSTED
├── NotPermitted       the peer's certificate may not make this call         PERMISSION_DENIED
├── NoMember           a pool has nobody to serve; names the pool                UNAVAILABLE
├── HandoffError       a hand-off ended badly; carries a typed reason            UNAVAILABLE
├── DeadlineExceeded   the request's own deadline passed                         DEADLINE_EXCEEDED
├── EngineError        an engine failed in a way no input explains               INTERNAL
├── Interrupted        the user ended a command early (one sentence, exit code 130)
└── SetupError         a process cannot start (one sentence, non-zero exit)
    ├── ConfigError        a key or value of a TOML file or command line
    └── CheckpointError    a model folder that is missing, broken or unsupported

The gRPC status of each (right column) is mapped once, in `runtime/serve.py`.
"""

from dataclasses import dataclass


class BatonError(Exception):
    """Base of the tree; `str()` is one sentence that a user can act on."""


@dataclass(frozen=True)
class Amount:
    """How much a field holds, where the value itself would be too long to show."""

    number: int
    unit: str


class InvalidRequest(BatonError):
    """A request that no retry can help: `field` holds `value`, which breaks `limit`."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        held = f"has {value.number} {value.unit}" if isinstance(value, Amount) else f"is {value!r}"
        super().__init__(f"{field} {held} but {limit}")
        self.field = field


class Overloaded(BatonError):
    """A bound is reached; the caller may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{message}; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class NotPermitted(BatonError):
    """The peer's certificate is not of the kind that may make this call."""


class NoMember(BatonError):
    """The pool named has no rank that could serve the request."""


class HandoffError(BatonError):
    """A hand-off ended without its pages; `reason` is a value of the wire's enum `baton.v1.Reason`."""

    def __init__(self, reason: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DeadlineExceeded(BatonError):
    """The request's deadline passed before it was finished."""


class EngineError(BatonError):
    """An engine failed in a way that no input explains."""


class Interrupted(BatonError):
    """The user ended a command before it was done."""


class SetupError(BatonError):
    """A process cannot start."""


class ConfigError(SetupError):
    """A key or value of a configuration file or command line is wrong."""


class CheckpointError(SetupError):
    """A model folder is missing, broken or not supported."""
