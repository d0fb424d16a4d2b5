"""Both ends of a resumable session over a channel that loses whatever is under way when it breaks."""

import asyncio
import random

import pytest

from proto.baton.v1 import decode_pb2
from services.runtime import resume
from services.runtime.errors import InvalidRequest, Overloaded
from services.runtime.resume import ACK_EVERY, ResumableStream

SEED = 7


def stream() -> ResumableStream[decode_pb2.SessionReply]:
    return ResumableStream(decode_pb2.SessionReply)


def message(handle: int) -> decode_pb2.SessionReply:
    return decode_pb2.SessionReply(claimed=decode_pb2.Claimed(handle=handle))


async def sent(end: ResumableStream[decode_pb2.SessionReply], number: int) -> list[decode_pb2.SessionReply]:
    """The next `number` messages of the present stream."""
    outgoing = end.outgoing(end.current)
    return [await anext(outgoing) for _ in range(number)]


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
async def test_any_breaks_lose_and_double_nothing(seed: int) -> None:
    rng = random.Random(seed)
    ends = (stream(), stream())
    put: tuple[list[int], list[int]] = ([], [])  # by the end that put them
    taken: tuple[list[int], list[int]] = ([], [])  # by the end that put them
    for end in ends:
        end.begin(1)
    wires: tuple[list[decode_pb2.SessionReply], list[decode_pb2.SessionReply]] = ([], [])
    for _ in range(600):
        side = rng.randrange(2)
        draw = rng.random()
        if draw < 0.5:
            put[side].append(len(put[side]) + 1)
            ends[side].put(message(put[side][-1]))
        elif draw < 0.7:
            wires[side].extend(await sent(ends[side], rng.randint(0, len(ends[side]._unsent))))
        elif draw < 0.95:
            for _ in range(rng.randint(0, len(wires[side]))):
                arrived = wires[side].pop(0)
                if ends[1 - side].take(arrived.sequence, arrived.ack):
                    taken[side].append(arrived.claimed.handle)
        else:
            reconnect(ends, wires)
    reconnect(ends, wires)
    for side in (0, 1):
        for arrived in await sent(ends[side], len(ends[side]._unsent)):
            if ends[1 - side].take(arrived.sequence, arrived.ack):
                taken[side].append(arrived.claimed.handle)
    assert taken == put


def reconnect(ends: tuple[ResumableStream, ResumableStream], wires: tuple[list, list]) -> None:
    """What was under way is lost; each end says what it expects."""
    for wire in wires:
        wire.clear()
    for end, other in (ends, ends[::-1]):
        assert end.can_resume(other.next_expected)
        end.begin(other.next_expected)


async def test_messages_alone_are_acknowledged_in_time() -> None:
    sender, receiver = stream(), stream()
    receiver.begin(1)
    outgoing = receiver.outgoing(receiver.current)
    waiting = asyncio.ensure_future(anext(outgoing))
    for index in range(ACK_EVERY):
        await asyncio.sleep(0)
        assert not waiting.done(), f"an acknowledgement alone after {index} messages"
        sender.put(message(index))
        (one,) = await sent(sender, 1)
        receiver.take(one.sequence, one.ack)
    bare = await waiting
    assert (bare.sequence, bare.ack, bare.WhichOneof("message")) == (0, ACK_EVERY, None)
    assert not sender.take(bare.sequence, bare.ack) and sender.num_unacked == 0


async def test_bound_and_range() -> None:
    end = stream()
    for index in range(resume.MAX_UNACKED):
        end.put(message(index))
    with pytest.raises(Overloaded, match="10000 messages"):
        end.put(message(0))
    end.begin(1)
    await sent(end, 10)
    assert [end.can_resume(number) for number in (0, 1, 11, 12)] == [False, True, True, False]
    assert not end.take(0, 4)
    assert [end.can_resume(number) for number in (4, 5, 11)] == [False, True, True]
    with pytest.raises(InvalidRequest, match="only 10 messages"):
        end.take(0, 11)
    with pytest.raises(InvalidRequest, match="message 1 is missing"):
        end.take(2, 0)


async def test_a_stream_that_was_replaced_gets_nothing_more() -> None:
    end = stream()
    old = end.outgoing(end.begin(1))
    end.put(message(1))
    assert (await anext(old)).sequence == 1
    waiting = asyncio.ensure_future(anext(old, None))
    await asyncio.sleep(0)
    new = end.outgoing(end.begin(1))
    assert await waiting is None and (await anext(new)).sequence == 1
