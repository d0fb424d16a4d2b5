from proto.baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("open", "submit", "cancel", "move", "sequence", "ack")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    submit: Submit
    cancel: Cancel
    move: Move
    sequence: int
    ack: int
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., sequence: _Optional[int] = ..., ack: _Optional[int] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("router_id", "instance_id", "next_message", "wire_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    instance_id: str
    next_message: int
    wire_version: int
    def __init__(self, router_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., next_message: _Optional[int] = ..., wire_version: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("key", "handle", "prompt", "sampling", "holder", "num_preemptions", "deadline_us", "fingerprint", "is_move")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_MOVE_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    handle: int
    prompt: _common_pb2.Prompt
    sampling: _common_pb2.Sampling
    holder: _common_pb2.Rank
    num_preemptions: int
    deadline_us: int
    fingerprint: str
    is_move: bool
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., handle: _Optional[int] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., holder: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., num_preemptions: _Optional[int] = ..., deadline_us: _Optional[int] = ..., fingerprint: _Optional[str] = ..., is_move: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: _common_pb2.Reason
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("handle", "step", "new_attempt", "reader", "fingerprint")
    class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STEP_UNSPECIFIED: _ClassVar[Move.Step]
        START: _ClassVar[Move.Step]
        PAUSE: _ClassVar[Move.Step]
        RESUME: _ClassVar[Move.Step]
    STEP_UNSPECIFIED: Move.Step
    START: Move.Step
    PAUSE: Move.Step
    RESUME: Move.Step
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEW_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    step: Move.Step
    new_attempt: int
    reader: _common_pb2.Rank
    fingerprint: str
    def __init__(self, handle: _Optional[int] = ..., step: _Optional[_Union[Move.Step, str]] = ..., new_attempt: _Optional[int] = ..., reader: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("sequence", "opened", "claimed", "ready", "step", "finished", "failed", "granted", "paused", "draining", "caught_up", "resumed", "ack")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: SessionOpened
    claimed: Claimed
    ready: Ready
    step: StepTokens
    finished: RequestFinished
    failed: RequestFailed
    granted: Granted
    paused: Paused
    draining: Draining
    caught_up: CaughtUp
    resumed: Resumed
    ack: int
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., claimed: _Optional[_Union[Claimed, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step: _Optional[_Union[StepTokens, _Mapping]] = ..., finished: _Optional[_Union[RequestFinished, _Mapping]] = ..., failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., ack: _Optional[int] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("resumed", "wire_version", "next_request")
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    resumed: bool
    wire_version: int
    next_request: int
    def __init__(self, resumed: _Optional[bool] = ..., wire_version: _Optional[int] = ..., next_request: _Optional[int] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("handle", "num_cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("handle", "attempt", "position", "first_token", "transfer")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    position: int
    first_token: _common_pb2.Token
    transfer: _common_pb2.Transfer
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., first_token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., transfer: _Optional[_Union[_common_pb2.Transfer, _Mapping]] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("handles", "attempts", "first_index", "num_tokens", "token_ids", "logprobs", "top_logprobs", "step_us", "num_accepted_drafts")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    first_index: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TopLogprobs]
    step_us: int
    num_accepted_drafts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., first_index: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[_common_pb2.TopLogprobs, _Mapping]]] = ..., step_us: _Optional[int] = ..., num_accepted_drafts: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestFinished(_message.Message):
    __slots__ = ("handle", "attempt", "reason", "num_output_tokens", "stop_token_id", "decode_us")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    reason: _common_pb2.FinishReason
    num_output_tokens: int
    stop_token_id: int
    decode_us: int
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_output_tokens: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("handle", "attempt", "reason", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    reason: _common_pb2.Reason
    message: str
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("handle", "attempt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ("handle", "attempt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ("handle", "attempt", "num_output_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    num_output_tokens: int
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("handle", "attempt", "reason", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    reason: _common_pb2.Reason
    message: str
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("seconds_left",)
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    seconds_left: int
    def __init__(self, seconds_left: _Optional[int] = ...) -> None: ...
