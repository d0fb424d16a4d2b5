"""The front's service over a real gRPC server, with ranks that record commands and engines played by the test."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from proto.baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.kv.messages import PeerRank, RequestKey
from services.prefill.messages import Cancel, ChoiceDone, Command, LeaseOver, Redirect, RedirectDone, Run, RunDone, RunFailed
from services.prefill.server import PrefillService
from services.runtime.ipc import Up

UP = Up(instance_id="i0", peer=b"p", fingerprint="ff", max_model_len=512, vocab_size=100, page_size=64, num_pages=4, max_running=8)


class FakeRank:
    """Stands for runtime.supervisor.RankProcess."""

    def __init__(self, up: Up | None) -> None:
        self.rank = 0
        self.up = up
        self.sent: asyncio.Queue[Command] = asyncio.Queue()

    def send(self, command: Command) -> None:
        self.sent.put_nowait(command)


class Rig:
    def __init__(self) -> None:
        self.service = PrefillService()
        self.rank = FakeRank(UP)
        self.service.attach([FakeRank(None), self.rank])  # pyright: ignore[reportArgumentType]

    def emit(self, event: RunDone | RunFailed | LeaseOver | RedirectDone) -> None:
        self.service.on_event(self.rank, event)  # pyright: ignore[reportArgumentType]


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(made.service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        made.stub = prefill_pb2_grpc.PrefillStub(channel)
        yield made
    await server.stop(0)


def request(**changes: object) -> prefill_pb2.PrefillRequest:
    """A good request with a reader; `a__b` names a nested field."""
    made = prefill_pb2.PrefillRequest(
        request_id="r", attempt=2, instance_id="i0", n=1, fingerprint="ff",
        prompt=common_pb2.Prompt(token_ids=[5, 6, 7], num_output_tokens=1, salt=b"s"),
        sampling=common_pb2.Sampling(
            temperature=0.5, top_p=0.9, repetition_penalty=1.0, max_tokens=10, seed=2**64 - 1, logprobs=2, stop_token_ids=[9]
        ),
        readers=[common_pb2.Rank(instance_id="d0", role="decode", pool_address="h:1", rank=3, peer=b"blob")],
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = made
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, (list, tuple)):
            target.ClearField(name)
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return made


def done(key: RequestKey, *, n: int = 1, leased: bool = True, logprob: float | None = -0.5, **changes: object) -> RunDone:
    """Choices of a Run, token ids 42, 43, ...; `changes` go into each choice."""
    choices = [
        ChoiceDone(
            key=RequestKey(key.request_id, key.choice + i, key.attempt), token_id=42 + i, logprob=logprob, top_ids=(42, 3),
            top_logprobs=(-0.5, -1.5), finish_reason=common_pb2.FINISH_UNSPECIFIED, leased=leased,
        )
        for i in range(n)
    ]
    changed = [msgspec.structs.replace(choice, **changes) for choice in choices]
    return RunDone(key=key, choices=tuple(changed), num_cached_tokens=64, queue_us=7, compute_us=8)


async def test_a_run_reaches_its_engine_whole_and_its_token_comes_back(rig: Rig):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    assert isinstance(run, Run) and run.key == RequestKey("r", 0, 2) and run.token_ids == [5, 6, 7]
    assert (run.num_output_tokens, run.salt, run.readers) == (1, b"s", [PeerRank(instance_id="d0", address="h:1", rank=3, peer=b"blob")])
    assert (run.n, run.instance_id) == (1, "i0")
    assert (run.params.seed, run.params.max_tokens, run.params.stop_token_ids, run.params.logprobs) == (2**64 - 1, 10, (9,), 2)
    assert rig.service.num_active() == 1
    rig.emit(done(run.key))
    reply = await call
    [first] = reply.first_tokens
    assert reply.outcome.ok and (first.token.id, list(first.token.top_logprobs.token_ids)) == (42, [42, 3])
    assert (reply.num_cached_tokens, reply.queue_us, reply.compute_us) == (64, 7, 8)
    assert rig.service.num_active() == 1  # the lease: a drain waits for it
    rig.emit(LeaseOver(run.key, 0, ""))
    assert rig.service.num_active() == 0


async def test_an_unasked_logprob_is_nan(rig: Rig):
    call = rig.stub.Run(request(readers=[], fingerprint=""))
    run = await rig.rank.sent.get()
    assert isinstance(run, Run) and run.readers == []
    rig.emit(done(run.key, leased=False, logprob=None))
    assert math.isnan((await call).first_tokens[0].token.logprob) and rig.service.num_active() == 0


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"instance_id": "old"}, common_pb2.STALE_INSTANCE, "old is not up here; up are: i0"),
        ({"fingerprint": "ee"}, common_pb2.FINGERPRINT_MISMATCH, "ee and this rank's is ff"),
        ({"n": 0}, common_pb2.INVALID, "n is 0 but must be 1 to 128"),
        ({"n": 129}, common_pb2.INVALID, "n is 129 but must be 1 to 128"),
        ({"n": 2, "first_choice": 127}, common_pb2.INVALID, "first_choice is 127 but must be at most 126 with n 2"),
        ({"first_choice": 2**32 - 1}, common_pb2.INVALID, "first_choice is 4294967295 but must be at most 127"),
        ({"n": 2}, common_pb2.INVALID, "readers has 1 ranks but must have one a choice, 2, or none"),
        (
            {"n": 3, "prompt__token_ids": [1] * 192, "readers": [common_pb2.Rank()] * 3},
            common_pb2.TOO_LARGE, "192 tokens and 2 copies of its last page do not fit this rank's 4",
        ),
        ({"prompt__token_ids": []}, common_pb2.INVALID, "0 tokens"),
        ({"prompt__token_ids": [1] * 512}, common_pb2.INVALID, "must have 1 to 511"),
        ({"prompt__token_ids": [5, 100]}, common_pb2.INVALID, "prompt.token_ids[1] is 100 but token ids must be below vocab_size 100"),
        ({"prompt__num_output_tokens": 3}, common_pb2.INVALID, "num_output_tokens is 3"),
        ({"sampling__max_tokens": 1}, common_pb2.INVALID, "max_tokens (1)"),
        ({"sampling__grammar": b"g"}, common_pb2.INVALID, "grammar"),
        ({"prompt__token_ids": [1] * 257}, common_pb2.TOO_LARGE, "257 tokens do not fit this rank's 4 pages"),
        ({"readers": [common_pb2.Rank(), common_pb2.Rank()]}, common_pb2.INVALID, "readers has 2 ranks"),
        ({"sampling__stop_token_ids": [5, 4_000_000_000]}, common_pb2.INVALID, "stop_token_ids is 4000000000"),
        ({"sampling__temperature": math.nan}, common_pb2.INVALID, "temperature is nan"),
        ({"sampling__logprobs": 100_000}, common_pb2.INVALID, "logprobs is 100000"),
    ],
)
async def test_refusals_are_outcomes_with_a_reason(rig: Rig, changes: dict[str, object], reason: int, says: str):
    reply = await rig.stub.Run(request(**changes))
    assert not reply.outcome.ok and reply.outcome.reason == reason and says in reply.outcome.message
    assert rig.rank.sent.empty() and rig.service.num_active() == 0


@pytest.mark.parametrize(("fields", "names"), [({}, "request_id"), ({"request_id": "r"}, "prompt")])
async def test_a_malformed_call_is_a_status(rig: Rig, fields: dict[str, str], names: str):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.stub.Run(prefill_pb2.PrefillRequest(**fields))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT and names in error.value.details()


async def test_the_engines_failure_is_the_outcome(rig: Rig):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    rig.emit(RunFailed(run.key, common_pb2.LEASE_EXPIRED, "late"))
    reply = await call
    assert (reply.outcome.reason, reply.outcome.message, rig.service.num_active()) == (common_pb2.LEASE_EXPIRED, "late", 0)


async def test_engine_death_answers_at_once(rig: Rig):
    call = rig.stub.Run(request())
    leased = rig.stub.Run(request(request_id="leased"))
    for _ in range(2):
        run = await rig.rank.sent.get()
        if run.key.request_id == "leased":
            rig.emit(done(run.key))
    assert (await leased).outcome.ok
    rig.rank.up = None
    rig.service.on_down(rig.rank, "i0")  # pyright: ignore[reportArgumentType]
    reply = await call
    assert reply.outcome.reason == common_pb2.ENGINE_DIED and "i0" in reply.outcome.message
    assert rig.service.num_active() == 0
    assert (await rig.stub.Run(request())).outcome.reason == common_pb2.STALE_INSTANCE


async def test_cancelling_the_call_cancels_the_request(rig: Rig):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    call.cancel()
    cancel = await rig.rank.sent.get()
    assert isinstance(cancel, Cancel) and (cancel.key, cancel.reason) == (run.key, common_pb2.CANCELLED)
    assert rig.service.num_active() == 1  # until the engine says so
    rig.emit(RunFailed(run.key, common_pb2.CANCELLED, ""))
    assert rig.service.num_active() == 0


async def test_a_token_that_crosses_the_cancel_leaves_a_lease_to_be_ended(rig: Rig):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    call.cancel()
    await rig.rank.sent.get()
    rig.emit(done(run.key, n=2))
    assert rig.service.num_active() == 2
    keys = [run.key, RequestKey("r", 1, 2)]
    cancels = [await rig.rank.sent.get() for _ in keys]
    assert [(cancel.key, cancel.reason) for cancel in cancels] == [(key, common_pb2.CANCELLED) for key in keys]
    for key in keys:
        rig.emit(LeaseOver(key, common_pb2.CANCELLED, ""))
    assert rig.service.num_active() == 0


async def test_the_deadline_ends_the_request(rig: Rig):
    reply = await rig.stub.Run(request(deadline_us=1000))
    assert reply.outcome.reason == common_pb2.DEADLINE and "1000 us" in reply.outcome.message
    run, cancel = await rig.rank.sent.get(), await rig.rank.sent.get()
    assert isinstance(cancel, Cancel) and (cancel.key, cancel.reason) == (run.key, common_pb2.DEADLINE)


async def test_an_attempt_runs_once(rig: Rig):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    assert (await rig.stub.Run(request())).outcome.reason == common_pb2.STALE_ATTEMPT
    other = rig.stub.Run(request(attempt=3))
    assert (await rig.rank.sent.get()).key.attempt == 3
    rig.emit(done(run.key))
    assert (await call).outcome.ok
    assert (await rig.stub.Run(request())).outcome.reason == common_pb2.STALE_ATTEMPT  # its lease is out
    other.cancel()


async def test_draining_refuses_new_work_and_keeps_the_old(rig: Rig):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    rig.service.drain()
    assert (await rig.stub.Run(request(request_id="late"))).outcome.reason == common_pb2.DRAINING
    rig.emit(done(run.key))
    assert (await call).outcome.ok


@pytest.mark.parametrize("event", [
    lambda key: RunFailed(key, 999, "from a newer peer"),
    lambda key: done(key, finish_reason=77),
])
async def test_an_enum_value_of_a_newer_release_is_passed_on(rig: Rig, event: Callable[[RequestKey], RunDone | RunFailed]):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    rig.emit(event(run.key))
    reply = await call
    assert reply.outcome.reason == 999 or reply.first_tokens[0].finish_reason == 77


@pytest.mark.parametrize("event", [
    lambda key: RunFailed(key, 2**40, "no enum holds this"),
    lambda key: done(key, leased=False, finish_reason=-(2**40)),
    lambda key: done(key, leased=False, token_id=-1),
    lambda key: done(key, leased=False, top_logprobs=("x",)),
    lambda key: msgspec.structs.replace(done(key, leased=False), queue_us=-1),
])
async def test_an_event_that_is_no_reply_fails_its_request_alone(rig: Rig, event: Callable[[RequestKey], RunDone | RunFailed]):
    bad, good = rig.stub.Run(request()), rig.stub.Run(request(request_id="good", readers=[]))
    keys = {run.key.request_id: run.key for run in [await rig.rank.sent.get(), await rig.rank.sent.get()]}
    rig.emit(event(keys["r"]))
    reply = await bad
    assert not reply.outcome.ok and reply.outcome.reason == common_pb2.INTERNAL and "cannot be sent" in reply.outcome.message
    rig.emit(done(keys["good"], leased=False))
    assert (await good).outcome.ok and rig.service.num_active() == 0


async def test_choices_come_back_each_with_its_token(rig: Rig):
    readers = [common_pb2.Rank(instance_id=f"d{i}", pool_address="h:1", rank=i, peer=b"blob") for i in range(3)]
    call = rig.stub.Run(request(n=3, first_choice=4, readers=readers))
    run = await rig.rank.sent.get()
    assert isinstance(run, Run) and (run.key, run.n) == (RequestKey("r", 4, 2), 3)
    assert [reader.instance_id for reader in run.readers] == ["d0", "d1", "d2"] and [key.choice for key in run.keys] == [4, 5, 6]
    event = done(run.key, n=3)
    ended = msgspec.structs.replace(event.choices[1], finish_reason=common_pb2.STOP, leased=False)
    rig.emit(msgspec.structs.replace(event, choices=(event.choices[0], ended, event.choices[2])))
    reply = await call
    assert [(first.choice, first.token.id, first.finish_reason) for first in reply.first_tokens] == [(4, 42, 0), (5, 43, 1), (6, 44, 0)]
    assert rig.service.num_active() == 2
    assert (await rig.stub.Run(request(first_choice=6))).outcome.reason == common_pb2.STALE_ATTEMPT, "that choice is leased"
    for choice in (4, 6):
        rig.emit(LeaseOver(RequestKey("r", choice, 2), 0, ""))
    assert rig.service.num_active() == 0


def redirect(**changes: object) -> prefill_pb2.RedirectRequest:
    """A good redirect to attempt 3 of the good request's choice."""
    made = prefill_pb2.RedirectRequest(
        key=common_pb2.RequestKey(request_id="r", choice=0, attempt=3), instance_id="i0", fingerprint="ff",
        reader=common_pb2.Rank(instance_id="d1", role="decode", pool_address="h:2", rank=1, peer=b"other"),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = made
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return made


@pytest.mark.parametrize("state", ["computing", "leased"])
@pytest.mark.parametrize("draining", [False, True])
async def test_a_redirect_gives_the_hand_off_another_reader(rig: Rig, state: str, draining: bool):
    call = rig.stub.Run(request())
    run = await rig.rank.sent.get()
    if state == "leased":
        rig.emit(done(run.key))
        await call
    if draining:
        rig.service.drain()
    asked = rig.stub.Redirect(redirect())
    command = await rig.rank.sent.get()
    second = RequestKey("r", 0, 3)
    assert command == Redirect(key=second, instance_id="i0", reader=PeerRank(instance_id="d1", address="h:2", rank=1, peer=b"other"))
    rig.emit(RedirectDone(second, run.key, 0, ""))
    assert (await asked).outcome == prefill_pb2.RequestOutcome(ok=True)
    if state == "computing":  # the call in flight answers as ever
        rig.emit(msgspec.structs.replace(done(second), key=run.key))
        assert (await call).first_tokens[0].token.id == 42
    assert rig.service.num_active() == 1
    rig.emit(LeaseOver(second, 0, ""))
    assert rig.service.num_active() == 0


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"instance_id": "old"}, common_pb2.STALE_INSTANCE, "old is not up here; up are: i0"),
        ({"fingerprint": "ee"}, common_pb2.FINGERPRINT_MISMATCH, "ee and this rank's is ff"),
    ],
)
async def test_redirects_that_the_front_refuses(rig: Rig, changes: dict[str, object], reason: int, says: str):
    reply = await rig.stub.Redirect(redirect(**changes))
    assert (reply.outcome.ok, reply.outcome.reason) == (False, reason) and says in reply.outcome.message and rig.rank.sent.empty()


async def test_redirects_that_the_engine_refuses_or_dies_of(rig: Rig):
    for reason in (common_pb2.UNKNOWN_REQUEST, common_pb2.STALE_ATTEMPT, common_pb2.FENCED):
        asked = rig.stub.Redirect(redirect())
        command = await rig.rank.sent.get()
        assert (await rig.stub.Redirect(redirect())).outcome.reason == common_pb2.STALE_ATTEMPT, "one at a time"
        rig.emit(RedirectDone(command.key, None, reason, "why"))  # pyright: ignore[reportAttributeAccessIssue]
        assert (await asked).outcome == prefill_pb2.RequestOutcome(reason=reason, message="why")  # pyright: ignore[reportArgumentType]
    asked = rig.stub.Redirect(redirect())
    await rig.rank.sent.get()
    rig.rank.up = None
    rig.service.on_down(rig.rank, "i0")  # pyright: ignore[reportArgumentType]
    assert (await asked).outcome.reason == common_pb2.ENGINE_DIED and rig.service.num_active() == 0


@pytest.mark.parametrize("changes", [{"key__request_id": ""}, {"key__choice": 128}, {"reader__instance_id": ""}])
async def test_a_malformed_redirect_is_a_status(rig: Rig, changes: dict[str, object]):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.stub.Redirect(redirect(**changes))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(changes)).replace("__", ".") in (error.value.details() or "") and rig.rank.sent.empty()


async def has_left(rig: Rig, call: grpc.aio.UnaryUnaryCall) -> None:
    """Cancel a Redirect and wait until the front has seen it."""
    call.cancel()
    while not all(redirecting.outcome.done() for redirecting in rig.service._redirecting.values()):  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_redirect_whose_caller_left_gives_the_hand_off_up(rig: Rig, refused: bool):
    call = rig.stub.Redirect(redirect())
    key = (await rig.rank.sent.get()).key
    await has_left(rig, call)
    assert rig.rank.sent.empty(), "the engine will say whether there is anything to give up"
    rig.emit(RedirectDone(key, None, common_pb2.UNKNOWN_REQUEST, "") if refused else RedirectDone(key, RequestKey("r", 0, 2), 0, ""))
    assert rig.rank.sent.empty() == refused
    if not refused:
        cancel = await rig.rank.sent.get()
        assert isinstance(cancel, Cancel) and (cancel.key, cancel.reason) == (key, common_pb2.CANCELLED)


async def test_a_redirect_that_another_one_overtakes_leaves_the_hand_off_to_it(rig: Rig):
    """The router drops the first call when that reader is lost too, and sends the next at once."""
    first = rig.stub.Redirect(redirect())
    keys = [(await rig.rank.sent.get()).key]
    await has_left(rig, first)
    second = rig.stub.Redirect(redirect(key__attempt=4))
    keys.append((await rig.rank.sent.get()).key)
    rig.emit(RedirectDone(keys[0], RequestKey("r", 0, 2), 0, ""))
    rig.emit(RedirectDone(keys[1], keys[0], 0, ""))
    assert (await second).outcome.ok and rig.rank.sent.empty()


async def test_a_renewed_agent_keeps_what_its_process_runs(rig: Rig):
    """The rank has another instance id; what it still runs is cancelled by the same way, and ends with the process."""
    call = rig.stub.Run(request(readers=[], fingerprint=""))
    run = await rig.rank.sent.get()
    other = rig.stub.Run(request(request_id="other", readers=[], fingerprint=""))
    await rig.rank.sent.get()
    rig.rank.up = msgspec.structs.replace(UP, instance_id="i1")
    call.cancel()
    cancel = await rig.rank.sent.get()
    assert isinstance(cancel, Cancel) and cancel.key == run.key
    rig.rank.up = None
    rig.service.on_down(rig.rank, "i1")  # pyright: ignore[reportArgumentType]
    assert (await other).outcome.reason == common_pb2.ENGINE_DIED and rig.service.num_active() == 0
