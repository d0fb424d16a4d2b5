from proto.baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberUpdate(_message.Message):
    __slots__ = ("member", "load", "leaving")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    member: Member
    load: Load
    leaving: Leaving
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("front_id", "role", "address", "fingerprint", "model", "wire_version", "limits", "ranks", "tp", "ep", "kv_events")
    FRONT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    EP_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    front_id: str
    role: str
    address: str
    fingerprint: str
    model: str
    wire_version: int
    limits: Limits
    ranks: _containers.RepeatedCompositeFieldContainer[_common_pb2.Rank]
    tp: int
    ep: int
    kv_events: _containers.RepeatedCompositeFieldContainer[KvEventSource]
    def __init__(self, front_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., wire_version: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_common_pb2.Rank, _Mapping]]] = ..., tp: _Optional[int] = ..., ep: _Optional[int] = ..., kv_events: _Optional[_Iterable[_Union[KvEventSource, _Mapping]]] = ...) -> None: ...

class KvEventSource(_message.Message):
    __slots__ = ("instance_id", "endpoint", "replay_endpoint")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    endpoint: str
    replay_endpoint: str
    def __init__(self, instance_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_model_len", "vocab_size", "page_size", "num_pages", "max_running")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_running: int
    def __init__(self, max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_running: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("instance_id", "num_free_pages", "num_claims", "num_running", "num_queued_tokens", "num_leased_pages", "step_us", "num_running_tokens", "num_routers")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    num_free_pages: int
    num_claims: int
    num_running: int
    num_queued_tokens: int
    num_leased_pages: int
    step_us: int
    num_running_tokens: int
    num_routers: int
    def __init__(self, instance_id: _Optional[str] = ..., num_free_pages: _Optional[int] = ..., num_claims: _Optional[int] = ..., num_running: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_leased_pages: _Optional[int] = ..., step_us: _Optional[int] = ..., num_running_tokens: _Optional[int] = ..., num_routers: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.Reason
    def __init__(self, reason: _Optional[_Union[_common_pb2.Reason, str]] = ...) -> None: ...

class RegistryUpdate(_message.Message):
    __slots__ = ("welcome",)
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router_id", "wire_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    wire_version: int
    def __init__(self, router_id: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...
