from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    CANCELLED: _ClassVar[Reason]
    DEADLINE: _ClassVar[Reason]
    OVERLOADED: _ClassVar[Reason]
    DRAINING: _ClassVar[Reason]
    INVALID: _ClassVar[Reason]
    INTERNAL: _ClassVar[Reason]
    ENGINE_DIED: _ClassVar[Reason]
    PEER_GONE: _ClassVar[Reason]
    READ_FAILED: _ClassVar[Reason]
    READ_DEADLINE: _ClassVar[Reason]
    EPOCH_MISMATCH: _ClassVar[Reason]
    LEASE_EXPIRED: _ClassVar[Reason]
    FINGERPRINT_MISMATCH: _ClassVar[Reason]
    STALE_INSTANCE: _ClassVar[Reason]
    STALE_ATTEMPT: _ClassVar[Reason]
    UNKNOWN_REQUEST: _ClassVar[Reason]
    PREEMPTED: _ClassVar[Reason]
    REPLACED: _ClassVar[Reason]
    SESSION_LOST: _ClassVar[Reason]
    SLOW_CLIENT: _ClassVar[Reason]
    TOO_LARGE: _ClassVar[Reason]
    FENCED: _ClassVar[Reason]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[FinishReason]
    STOP: _ClassVar[FinishReason]
    LENGTH: _ClassVar[FinishReason]
REASON_UNSPECIFIED: Reason
CANCELLED: Reason
DEADLINE: Reason
OVERLOADED: Reason
DRAINING: Reason
INVALID: Reason
INTERNAL: Reason
ENGINE_DIED: Reason
PEER_GONE: Reason
READ_FAILED: Reason
READ_DEADLINE: Reason
EPOCH_MISMATCH: Reason
LEASE_EXPIRED: Reason
FINGERPRINT_MISMATCH: Reason
STALE_INSTANCE: Reason
STALE_ATTEMPT: Reason
UNKNOWN_REQUEST: Reason
PREEMPTED: Reason
REPLACED: Reason
SESSION_LOST: Reason
SLOW_CLIENT: Reason
TOO_LARGE: Reason
FENCED: Reason
FINISH_UNSPECIFIED: FinishReason
STOP: FinishReason
LENGTH: FinishReason

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "max_tokens", "stop_token_ids", "ignore_eos", "seed", "logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_tokens: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    grammar: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[bytes] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top_logprobs: TopLogprobs
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("instance_id", "role", "pool_address", "rank", "peer", "former_instance_id")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    FORMER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: str
    pool_address: str
    rank: int
    peer: bytes
    former_instance_id: str
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[str] = ..., pool_address: _Optional[str] = ..., rank: _Optional[int] = ..., peer: _Optional[bytes] = ..., former_instance_id: _Optional[str] = ...) -> None: ...

class RequestKey(_message.Message):
    __slots__ = ("request_id", "choice", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("token_ids", "num_output_tokens", "salt")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: int
    salt: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[int] = ..., salt: _Optional[bytes] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("num_pages", "num_cached_pages", "num_bytes", "read_us", "exposed_us", "wait_us", "transport")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_US_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_US_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    num_cached_pages: int
    num_bytes: int
    read_us: int
    exposed_us: int
    wait_us: int
    transport: str
    def __init__(self, num_pages: _Optional[int] = ..., num_cached_pages: _Optional[int] = ..., num_bytes: _Optional[int] = ..., read_us: _Optional[int] = ..., exposed_us: _Optional[int] = ..., wait_us: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...
