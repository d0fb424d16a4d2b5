"""An engine without a model: its behaviour is the environment's BATON_FAKE_ENGINE."""

import os
import threading
from typing import Any

import msgspec

from services.runtime.config import Config
from services.runtime.engine import StepClock, run_engine
from services.runtime.errors import EngineError, SetupError
from services.runtime.ipc import EngineChannel, RankLoad, Stop, Up

UP = Up(instance_id="fake", peer=b"", fingerprint="f", max_model_len=100, vocab_size=260, page_size=64, num_pages=8, max_running=4,
        kv_events_port=7001, kv_replay_port=7002)


def body(config: Config, rank: int, channel: EngineChannel[Any, Any], clock: StepClock) -> None:
    behaviour = os.environ["BATON_FAKE_ENGINE"]
    if behaviour == "refuses":
        raise SetupError("model-00001.safetensors is truncated; download it again")
    if behaviour == "dies":
        os._exit(7)
    if behaviour == "loads":
        threading.Event().wait()  # for ever
    if behaviour == "long step":
        clock.begin(0.0)
    if behaviour == "long step that was predicted":
        clock.begin(1000.0)
    if behaviour == "hand-off hangs":
        clock.turn()
    channel.send(UP)
    if behaviour == "renews":
        channel.send(RankLoad(8, 0, 0, 0, 0, 0, 0))
        channel.send(msgspec.structs.replace(UP, instance_id="fake2", former_instance_id="fake"))
    if behaviour == "fails":
        raise EngineError("the hand-off thread failed")
    if behaviour == "dies after up":
        channel.close()  # with what was sent
        os._exit(9)
    while not any(isinstance(command, Stop) for command in channel.receive(0.05)):
        pass


if __name__ == "__main__":
    run_engine("fake", Stop, body)
