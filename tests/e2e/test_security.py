"""A cluster under mTLS and CURVE, its processes at log level debug: who is served, who is refused and how, and what no log ever holds."""

import asyncio
import base64
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from proto.baton.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from services.doctor.watcher import Watcher
from services.runtime.local_cluster import Cluster
from services.runtime.security import Security
from services.runtime.serve import WIRE_VERSION, Server
from tests.e2e.rig import DEMO_CONFIG, ROOT, generate
from tests.runtime.keys_rig import Keys, changed, keys_in

PROMPT = "Enter the SECRETARY of Padua, with xylophones. "


def settings_of(keys: Keys) -> list[str]:
    section = keys.section()
    names = ("certificate", "key", "ca", "curve_key", "server_name")
    return [f'security.{name}="{getattr(section, name)}"' for name in names]


async def refusal(security: Security, address: str, method: str) -> tuple[grpc.StatusCode, str]:
    """How a call that must not succeed ends."""
    async with security.open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == "Join":
                member = registry_pb2.Member(front_id="stranger", role="decode", wire_version=WIRE_VERSION)
                call: Any = registry_pb2_grpc.RegistryStub(channel).Join(iter([registry_pb2.MemberUpdate(member=member)]), timeout=10)
                await call.read()
            elif method == "Run":
                await prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(), timeout=10)
            else:
                await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest(), timeout=10)
    return caught.value.code(), caught.value.details() or ""


async def command(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command-line client, as a user runs it."""
    words = [sys.executable, "-m", "services.router.client", "--router", address, "--max-tokens", "4", *options, PROMPT]
    return await asyncio.to_thread(subprocess.run, words, cwd=ROOT, capture_output=True, text=True, timeout=60)


async def check_served(keys: Keys, address: str) -> str:
    async with keys.client.open_channel(address) as channel:
        answer = await generate(generation_pb2_grpc.GenerationStub(channel), prompt=PROMPT * 20, max_tokens=24, seed=1)
    assert len(answer.token_ids) == 24 or answer.end.reason == common_pb2.STOP
    assert answer.end.timeline.transfer.num_pages > 0, "decoded elsewhere than prefilled"
    done = await command(address, "--config", str(keys.folder / "client.toml"))
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    return done.stderr


async def check_refused(keys: Keys, others: Keys, address: str, prefill_address: str) -> str:
    for call in (("Join", address), ("Run", prefill_address)):
        code, details = await refusal(keys.client, call[1], call[0])
        assert code == grpc.StatusCode.PERMISSION_DENIED and "baton.internal" in details
    stranger = Security.of(changed(others.section("client"), ca=keys.section().ca))
    assert (await refusal(stranger, address, "GetInfo"))[0] == grpc.StatusCode.UNAVAILABLE
    half = f"security.ca={keys.section().ca}"
    said = ""
    for options, why in (
        ((), "it speaks TLS: give the certificate"),
        (("--config", str(others.folder / "client.toml")), "its certificate is none that"),
        (("--config", str(others.folder / "client.toml"), "--set", half), "it does not accept"),
    ):
        done = await command(address, *options)
        assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
        said += done.stderr
    return said


def secrets(keys: Keys, peers: Sequence[bytes]) -> dict[str, str]:
    """Texts that nothing may show, by what they are: of each file every line that matters, of each blob its spellings."""
    found = {"the prompt": "SECRETARY of Padua", "its words": "xylophone"}
    for path in keys.folder.glob("*.key"):
        text = path.read_text()
        lines = re.findall(r'secret-key = "(.+)"', text) or [line for line in text.splitlines() if line and "-----" not in line]
        found |= {f"{path.name} {number}": line for number, line in enumerate(lines)}
    for number, peer in enumerate(peers):
        middle = peer[len(peer) // 2:][:24]
        found |= {f"peer {number} {kind}": text for kind, text in (
            ("repr", repr(middle)[2:-1]), ("hex", middle.hex()), ("base64", base64.b64encode(peer).decode()[:32]),
        )}
    return found


@pytest.mark.slow
async def test_a_cluster_under_mtls_and_curve(tmp_path: Path) -> None:
    keys, others = keys_in(tmp_path / "keys"), keys_in(tmp_path / "others")
    watcher, server = Watcher(), Server("127.0.0.1:0", ["baton.v1.Registry"], keys.inner)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, watcher)
    await server.start()
    logs = tmp_path / "logs"
    logs.mkdir()
    cluster = Cluster(DEMO_CONFIG, prefill=1, decode=1, settings=[*settings_of(keys), "log.level=debug"],
                      more_routers=[server.address], log_dir=logs)
    try:
        await cluster.start()
        address = cluster.router_address
        ranks = list(watcher.ranks.values())
        assert sorted(rank.role for rank in ranks) == ["decode", "prefill"] and all(rank.peer for rank in ranks)
        said = await check_served(keys, address)
        prefill_address = next(rank.pool_address for rank in ranks if rank.role == "prefill")
        said += await check_refused(keys, others, address, prefill_address)
        await check_served(keys, address)
    finally:
        await cluster.stop()
        await server.stop(0)
    written = said + "".join(path.read_text(errors="replace") for path in logs.iterdir())
    assert '"level": "debug"' in written and "joined router" in written, "the processes did write"
    shown = [name for name, text in secrets(keys, [rank.peer for rank in ranks]).items() if text in written]
    assert not shown, f"in logs or errors: {shown}"
