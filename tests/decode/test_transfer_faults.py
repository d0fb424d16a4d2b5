"""B23: whatever fails at whatever stage of a transfer ends the requests that hang on it, typed and soon, and no other."""

from collections.abc import Callable

import pytest

from proto.baton.v1 import common_pb2
from services.decode.messages import Failed, Finished
from services.kv.messages import Announce, decode
from services.runtime.errors import HandoffError
from tests.decode.rig import Rig, ScriptedHolder, greedy, mono

PROMPT = [5 + 11 * i % 230 for i in range(140)]
NUM_OUTPUT = 4


def handshake(rig: Rig, bad: ScriptedHolder) -> None:
    """The holder's metadata cannot be read."""
    bad.kv.transport.metadata = lambda: b"no metadata"  # type: ignore[method-assign]


def post(rig: Rig, bad: ScriptedHolder) -> None:
    read_pages = rig.kv.transport.read_pages

    def refused(peer: str, remote: list[int], local: list[int]) -> int:
        if peer == bad.kv.instance_id:
            raise HandoffError(common_pb2.PEER_GONE, "the transport refuses to post")
        return read_pages(peer, remote, local)

    rig.kv.transport.read_pages = refused  # type: ignore[method-assign]


def poll(rig: Rig, bad: ScriptedHolder) -> None:
    """Reads end in an error."""
    rig.fabric.hold_reads = True


def disconnect(rig: Rig, bad: ScriptedHolder) -> None:
    """The holder dies while it is read from."""
    rig.fabric.hold_reads = True


def silence(rig: Rig, bad: ScriptedHolder) -> None:
    """Nothing that the holder says arrives any more."""
    rig.fabric.on_notify = lambda sender, receiver, payload: [] if sender == bad.kv.instance_id else [payload]


def lost(rig: Rig, bad: ScriptedHolder) -> None:
    """Announcements are lost, and nothing else."""
    rig.fabric.on_notify = lambda sender, receiver, payload: (
        [] if sender == bad.kv.instance_id and isinstance(decode(payload), Announce) else [payload]
    )


Fault = Callable[[Rig, ScriptedHolder], None]


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize(("fault", "reason"), [
    (handshake, common_pb2.PEER_GONE), (post, common_pb2.READ_FAILED), (poll, common_pb2.READ_FAILED),
    (disconnect, common_pb2.READ_FAILED), (silence, common_pb2.LEASE_EXPIRED), (lost, None),
])
def test_each_fault_of_a_transfer_ends_its_own_requests_alone(rig: Rig, fault: Fault, reason: int | None, num_requests: int) -> None:
    bad = ScriptedHolder(rig.fabric, rig.clock)
    fault(rig, bad)
    prompts = {handle: [handle, *PROMPT] for handle in range(1, num_requests + 2)}
    for handle, prompt in prompts.items():
        holder = rig.holder if handle > num_requests else bad
        spec = rig.spec(prompt, greedy(NUM_OUTPUT), source=holder.rank("prefill:2" if holder is bad else "prefill:1"))
        rig.submit(spec, handle)
        holder.hand_off(spec, rig.kv) if fault is not handshake or holder is not bad else None
    for _ in range(8):
        rig.exchange()
        bad.kv.exchange.tick()
        for read in list(rig.fabric.reads):
            if read.peer == bad.kv.instance_id and fault is poll:
                read.fail()
            elif read.peer != bad.kv.instance_id:
                read.complete()
        if fault is disconnect:
            rig.fabric.kill(bad.kv.instance_id)
        rig.clock.now += 2.5
    rig.fabric.hold_reads = False
    rig.run()
    ended = {handle: rig.end(handle) for handle in prompts}
    for handle, prompt in prompts.items():
        end = ended[handle]
        if handle > num_requests or reason is None:
            assert isinstance(end, Finished) and rig.tokens(handle) == mono(prompt, NUM_OUTPUT), f"request {handle} is hurt: {end}"
        else:
            assert isinstance(end, Failed) and end.reason == reason and not rig.tokens(handle), f"request {handle}: {end}"
