from proto.baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "instance_id", "prompt", "sampling", "n", "readers", "fingerprint", "deadline_us", "first_choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    instance_id: str
    prompt: _common_pb2.Prompt
    sampling: _common_pb2.Sampling
    n: int
    readers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rank]
    fingerprint: str
    deadline_us: int
    first_choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., instance_id: _Optional[str] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., n: _Optional[int] = ..., readers: _Optional[_Iterable[_Union[_common_pb2.Rank, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., deadline_us: _Optional[int] = ..., first_choice: _Optional[int] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("outcome", "first_tokens", "num_cached_tokens", "queue_us", "compute_us")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    outcome: RequestOutcome
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    num_cached_tokens: int
    queue_us: int
    compute_us: int
    def __init__(self, outcome: _Optional[_Union[RequestOutcome, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token", "finish_reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token: _common_pb2.Token
    finish_reason: _common_pb2.FinishReason
    def __init__(self, choice: _Optional[int] = ..., token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class RequestOutcome(_message.Message):
    __slots__ = ("ok", "reason", "message")
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    reason: _common_pb2.Reason
    message: str
    def __init__(self, ok: _Optional[bool] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class RedirectRequest(_message.Message):
    __slots__ = ("key", "instance_id", "reader", "fingerprint")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    instance_id: str
    reader: _common_pb2.Rank
    fingerprint: str
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., instance_id: _Optional[str] = ..., reader: _Optional[_Union[_common_pb2.Rank, _Mapping]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class RedirectReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: RequestOutcome
    def __init__(self, outcome: _Optional[_Union[RequestOutcome, _Mapping]] = ...) -> None: ...
