"""A decode rank that is killed: the router's next calls for what it had go out within a second. Real fronts, a scripted prefill."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from proto.baton.v1 import prefill_pb2
from services.kv.layout import KvLayout, compatibility
from services.kv.rank_kv import RankKv, open_rank_kv
from services.model.config import load_config
from services.model.loader import revision
from services.model.params import SAMPLER_VERSION
from tests.e2e.rig import DEMO_CONFIG, ROOT
from tests.router import fakes
from tests.router.fakes import until
from tests.router.rig import World, running

MODEL = ROOT / "deploy" / "demo_model"
SENT_S = 1.0  # from the kill to the calls


@pytest.fixture
def holder() -> Iterator[RankKv]:
    """Whom decode ranks take for the prefill rank: they may pair with it, and it never answers them."""
    model = load_config(MODEL)
    layout = KvLayout(model.num_hidden_layers, model.kv_lora_rank, model.qk_rope_head_dim, "float32")
    mine = compatibility(dataclasses.asdict(model), revision(MODEL), layout, sampler_version=SAMPLER_VERSION)
    kv = open_rank_kv(layout=layout, num_pages=2, transport="nixl", compatibility=mine)
    yield kv
    kv.close()


@contextlib.contextmanager
def decode_fronts(number: int, router: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    arguments = ["--config", str(DEMO_CONFIG), "--set", f'decode.routers=["{router}"]', "--set", "decode.num_pages=16"]
    processes = [subprocess.Popen([sys.executable, "-m", "services.decode", *arguments, "--die-with-parent", str(os.getpid())], cwd=ROOT,
                                  stdout=subprocess.DEVNULL) for _ in range(number)]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def listens(process: "subprocess.Popen[bytes]", address: str) -> bool:
    return any(found.status == psutil.CONN_LISTEN and f":{found.laddr.port}" == address[address.rindex(":") :]
               for found in psutil.Process(process.pid).net_connections("tcp"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "front"])
async def test_the_next_calls_go_out_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: RankKv, victim: str) -> None:
    config = load_config(MODEL)
    monkeypatch.setattr(fakes, "VOCAB", config.vocab_size)
    async with running(tmp_path, prefills=0, decodes=0) as world:
        with decode_fronts(2, world.router_address) as fronts:
            await until(lambda: len(world.usable("decode")) == 2, "both decode ranks join", patience_s=60.0)
            await add_prefill(world, holder, config.max_position_embeddings)
            work = asyncio.ensure_future(world.generate(max_tokens=9))
            prefill = world.prefills[0]
            await until(lambda: bool(prefill.runs), "prefill is called")
            reader = prefill.runs[0].readers[0]
            front = next(front for front in fronts if listens(front, reader.pool_address))
            (engine,) = psutil.Process(front.pid).children()
            state = next(state for state in world.router.pool.usable("decode") if state.instance_id == reader.instance_id)
            await until(lambda: state.session is not None and state.session.num_requests == 1, "the claim is sent")
            killed_at = time.monotonic()
            os.kill(engine.pid if victim == "engine" else front.pid, signal.SIGKILL)
            await until(lambda: bool(prefill.redirects or len(prefill.runs) > 1), "the router calls again")
            took = time.monotonic() - killed_at
            again = [redirect.reader for redirect in prefill.redirects] or list(prefill.runs[1].readers)
            assert took < SENT_S, f"{took:.2f} s after the kill"
            assert again[0].instance_id != reader.instance_id
            work.cancel()
            await asyncio.wait([work])


async def add_prefill(world: World, holder: RankKv, max_model_len: int) -> None:
    async def never(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
        await asyncio.Event().wait()
        raise AssertionError("never answered")

    prefill = await world.add("prefill", serve=never, fingerprint=holder.compatibility.fingerprint, max_model_len=max_model_len,
                              peer=holder.transport.metadata(), instance_id=holder.instance_id)
    assert prefill.rank.peer == holder.transport.metadata()
