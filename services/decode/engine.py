"""One decode rank. The life of a request here:

1 CLAIMED    the router submitted it; the claim listens to the holder's announcements        claims.py, fetch.py
2 FETCHING   it was first in line and all pages it lacks were free: they are being pulled     fetch.py
3 READY      pages verified, holder and router told, first token known                        fetch.py, then the loop's inbox
4 RUNNING    one token a step; a page that becomes full and final enters the prefix cache     scheduler.py, loop.py
  moving     still RUNNING (or READY): final pages are announced to the rank that takes over  moves.py
  PAUSED     the end of a move, at most 2 s: all is announced; then it is gone, or runs on    moves.py
5 FINISHED   EOS, a stop id, max_tokens or the longest sequence: pages go back                loop.py
  ABORTED    from any state: cancelled, failed, moved, preempted (the router replays it)      -> FREE, nothing is held

A request that moves here is CLAIMED and FETCHING like any other, but for pages that its source announces while it runs.

Threads: the handoff thread receives all commands and moves hand-offs on; what concerns a READY request it passes on, in order. The main
loop steps while requests run and blocks on its inbox otherwise. Both send events; `kv.lock` guards pages, prefix cache and pulls.
"""
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.decode.fetch import Fetcher
from services.decode.forward import DecodeForward
from services.decode.load import LoadReporter
from services.decode.loop import DecodeLoop
from services.decode.messages import Cancel, Command, Event, MoveCommand, MoveStart, SessionLost, Stop, Submit
from services.kv.events import KvEventPublisher
from services.kv.fault_control import fault_plan
from services.kv.layout import PAGE_SIZE, KvLayout, compatibility
from services.kv.metrics import MAX_RUNNING
from services.kv.rank_kv import RankKv, open_rank_kv
from services.model.config import load_config as load_model_config
from services.model.config import max_model_len
from services.model.loader import revision, stream_weights
from services.model.params import SAMPLER_VERSION
from services.runtime.config import Config
from services.runtime.engine import StepClock, run_engine
from services.runtime.ipc import EngineChannel, Up
from services.runtime.security import Security

_IDLE_PAUSE_S = 0.002
_MAX_INBOX = 10_000  # items that wait for the main loop, beyond which commands wait in the front's queue, which has a bound of its own


class HandoffThread(threading.Thread):
    """Receives commands, ticks the fetcher, reports load. An exception here ends the main loop too."""

    def __init__(
        self, channel: EngineChannel[Command, Event], kv: RankKv, fetcher: Fetcher, loop: DecodeLoop, clock: StepClock,
        on_renewed: Callable[[str], None], kv_events: KvEventPublisher | None = None,
    ) -> None:
        """`on_renewed(former instance id)` runs when the transfer agent was renewed; this thread also sends `kv_events`."""
        super().__init__(name="handoff", daemon=True)
        self._channel, self._kv, self._fetcher, self._loop = channel, kv, fetcher, loop
        self._clock, self._on_renewed, self._kv_events = clock, on_renewed, kv_events
        self._load = LoadReporter(kv, fetcher, loop, channel.send)

    def run(self) -> None:
        """Until Stop."""
        try:
            while self._turn():
                pass
        except Exception as error:
            self._loop.inbox.put(error)

    def _turn(self) -> bool:
        self._clock.turn(self._kv.renewal_s if self._kv.fence_reason() else 0.0)
        busy = self._fetcher.is_busy
        for command in self._receive(0.0 if busy else _IDLE_PAUSE_S):
            if isinstance(command, Stop):
                self._fetcher.close()
                self._loop.inbox.put(command)
                self._clock.end_turns()
                return False
            self._take(command)
        self._fetcher.tick()
        if former := self._kv.renew_if_due():
            self._on_renewed(former)
        if self._kv_events:
            self._kv_events.turn()
        self._load.report()
        if busy:
            time.sleep(self._kv.exchange.pause_s)
        return True

    def _receive(self, timeout_s: float) -> list[Command]:
        if self._loop.inbox.qsize() < _MAX_INBOX:
            return self._channel.receive(timeout_s)
        time.sleep(_IDLE_PAUSE_S)
        return []

    def _take(self, command: Submit | Cancel | SessionLost | MoveCommand) -> None:
        if isinstance(command, Submit):
            self._fetcher.submit(command)
        elif isinstance(command, Cancel):
            if not self._fetcher.cancel(command):
                self._loop.inbox.put(command)
        elif isinstance(command, MoveStart):
            if self._fetcher.meet_reader(command):
                self._loop.inbox.put(command)
        else:
            if isinstance(command, SessionLost):
                self._fetcher.session_lost(command)
            self._loop.inbox.put(command)


def serve(config: Config, rank: int, channel: EngineChannel[Command, Event], clock: StepClock) -> None:
    """Load, warm up, say Up, serve until Stop. Raises SetupError when it cannot start."""
    section = config.decode
    torch.set_num_threads(section.threads)
    folder = Path(config.model.path)
    model = load_model_config(folder)
    longest = max_model_len(model, config.model.max_model_len, folder)
    forward = DecodeForward(model, stream_weights(folder, model))
    layout = KvLayout(model.num_hidden_layers, model.kv_lora_rank, model.qk_rope_head_dim, section.dtype)
    mine = compatibility(dataclasses.asdict(model), revision(folder), layout, sampler_version=SAMPLER_VERSION)
    events = KvEventPublisher.open(section, "decode", rank, folder, Security.of(config.security))
    kv = open_rank_kv(layout=layout, num_pages=section.num_pages, transport=section.transport, compatibility=mine,
                      faults=fault_plan(config.faults, "decode", rank), kv_network=section.kv_network,
                      on_change=events.log if events else None)

    fetcher = Fetcher(
        kv, max_claims=section.max_claims, max_model_len=longest, emit=channel.send,
        deliver=lambda item: loop.inbox.put(item),
    )
    loop = DecodeLoop(
        forward, kv, max_running=section.max_running, eos_token_ids=model.eos_token_ids, emit=channel.send, clock=clock,
        num_claims=lambda: fetcher.num_claims,
    )
    loop.warm_up()
    MAX_RUNNING.set(section.max_running)

    def say_up(former_instance_id: str = "") -> None:
        channel.send(Up(
            instance_id=kv.instance_id, peer=kv.transport.metadata(), fingerprint=mine.fingerprint, max_model_len=longest,
            vocab_size=model.vocab_size, page_size=PAGE_SIZE, num_pages=section.num_pages, max_running=section.max_running,
            former_instance_id=former_instance_id,
            kv_events_port=events.port if events else 0, kv_replay_port=events.replay_port if events else 0,
        ))

    handoff = HandoffThread(channel, kv, fetcher, loop, clock, say_up, events)
    say_up()
    handoff.start()
    loop.run()
    handoff.join()
    if events:
        events.close()
    kv.close()


if __name__ == "__main__":
    run_engine("decode", Command, serve)
