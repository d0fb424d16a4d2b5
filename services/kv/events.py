"""A rank's KV events over ZMQ: a PUB socket with what its prefix cache stores and removes, a ROUTER socket for what a reader missed.

    events = KvEventPublisher.open(config.decode, "decode", rank, model, Security.of(config.security))     None: kv_events is off
    kv = open_rank_kv(..., on_change=events.log)
    events.turn()                                    often, by one thread: sends what has happened, answers replays; never waits
    events.port, events.replay_port                  what the rank's `Up` says
    events.close()                                   once that thread is done

Sockets and sequence outlive a renewed transfer agent: the cache does too. Format, and what a reader does: event_messages.py.
"""
import logging
import socket
from pathlib import Path
from typing import Any

import zmq

from services.kv.event_log import KEPT_BATCHES, KvEventLog
from services.kv.event_messages import END_OF_REPLAY, sequence_frame
from services.runtime.config import PoolSection
from services.runtime.errors import ConfigError
from services.runtime.security import Security
from services.runtime.telemetry import count_incident

_REQUEST_BYTES = 4096  # of a frame that a reader sends: of CURVE's handshake, a subscription, a sequence number
_REPLAYS_A_TURN = 4  # the thread has other things to do
_UNACKED_MS = 10_000  # a reader that is gone may leave without a word (resets.py): its connection ends by this

_log = logging.getLogger(__name__)


class KvEventPublisher:
    """Both sockets of one rank; `log` is what the prefix cache tells its changes to."""

    def __init__(self, host: str, topic: str, rank: int, security: Security) -> None:
        """Binds free ports of `host`. Raises ConfigError beyond loopback without CURVE, SetupError when no port can be had."""
        self.log = KvEventLog(rank)
        self._topic = topic.encode()
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.set(zmq.ROUTER_MANDATORY, 1)  # a full queue or a gone reader is told instead of passed over
            self.port, self.replay_port = [self._bind(each, host, security) for each in (self._pub, self._replay)]
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, section: PoolSection, role: str, rank: int, model: Path, security: Security) -> "KvEventPublisher | None":
        """For a rank of `section` that serves the folder `model`, on the host of its front's address; None where kv_events is off.

        Raises SetupError.

        The topic, "kv@host@model", is the form in which llm-d's readers look for host and model.
        """
        if not section.kv_events:
            return None
        topic = f"kv@{section.advertise or socket.gethostname()}@{model.resolve().name}"
        try:
            return cls(section.address.rpartition(":")[0], topic, rank, security)
        except ConfigError as error:
            raise ConfigError(f"{error}; or say {role}.kv_events = false, and routers only guess what this rank has cached") from None

    def turn(self) -> None:
        """Send what the cache has told since the last turn, answer a few replays."""
        for sequence, payload in self.log.number():
            self._pub.send_multipart([self._topic, sequence_frame(sequence), payload])  # a slow reader loses it, and sees that it did
        for _ in range(_REPLAYS_A_TURN):
            if not int(self._replay.get(zmq.EVENTS)) & zmq.POLLIN:  # a part of what a receive in vain takes
                return
            *envelope, start = self._replay.recv_multipart(zmq.NOBLOCK)
            self._answer(envelope, start)

    def close(self) -> None:
        """End both sockets at once."""
        self._context.destroy(linger=0)

    def _bind(self, end: "zmq.Socket[bytes]", host: str, security: Security) -> int:
        end.set(zmq.SNDHWM, 2 * KEPT_BATCHES)  # a reader: a whole replay and what happens meanwhile
        end.set(zmq.MAXMSGSIZE, _REQUEST_BYTES)
        end.set(zmq.TCP_MAXRT, _UNACKED_MS)
        return security.bind_zmq(end, host)

    def _answer(self, envelope: list[bytes], start: bytes) -> None:
        """`envelope` is the reader's name, and the empty frame that a REQ socket puts behind it."""
        if len(start) != len(END_OF_REPLAY) or not envelope:
            count_incident("KV replay request malformed")
            return
        try:
            for sequence, payload in self.log.since(int.from_bytes(start, "big")):
                self._reply(envelope, sequence_frame(sequence), payload)
            self._reply(envelope, END_OF_REPLAY, b"")
        except zmq.ZMQError as error:  # the reader asks again once it misses the end
            count_incident("KV replay not delivered")
            _log.info("a replay of KV events ends early: %s", error)

    def _reply(self, envelope: list[bytes], *frames: Any) -> None:
        self._replay.send_multipart([*envelope, *frames], zmq.NOBLOCK)
