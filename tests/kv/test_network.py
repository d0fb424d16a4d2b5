"""kv_network: which devices UCX is told, and that it takes no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.kv.network import choose_devices
from services.runtime.errors import ConfigError

ADDRESSES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth0": ["172.30.0.4", "02:42:ac:1e:00:04"],
    "eth1": ["172.31.0.4", "fd00:1::4", "fe80::42%eth1"],
    "ib0": ["10.1.0.4"],
    "ib1": ["10.1.0.5"],
}


def rdma(folder: Path, device: str, port: int, *names: str) -> None:
    """sysfs of a network device on top of RDMA devices."""
    for name in names:
        (folder / device / "device" / "infiniband" / name).mkdir(parents=True)
    (folder / device / "dev_port").write_text(f"{port}\n")


@pytest.mark.parametrize(("network", "devices"), [
    ("172.31.0.0/16", "eth1"),
    ("172.30.0.4/32", "eth0"),
    ("fd00:1::/64", "eth1"),
    ("172.0.0.0/8", "eth0,eth1"),
    ("127.0.0.0/8", "lo"),
])
def test_the_devices_with_an_address_in_it(network: str, devices: str, tmp_path: Path) -> None:
    assert choose_devices(network, ADDRESSES, "", tmp_path) == devices


def test_rdma_ports_come_first(tmp_path: Path) -> None:
    """`ib0` alone would mean TCP over InfiniBand to UCX."""
    rdma(tmp_path, "ib0", 0, "mlx5_0")
    rdma(tmp_path, "ib1", 1, "mlx5_0")
    assert choose_devices("10.1.0.0/16", ADDRESSES, "", tmp_path) == "mlx5_0:1,mlx5_0:2,ib0,ib1"


def test_none_in_the_network_names_it_and_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_network is 10\.9\.0\.0/16, but no .*127\.0\.0\.1 on lo"):
        choose_devices("10.9.0.0/16", ADDRESSES, "", tmp_path)


@pytest.mark.parametrize("network", ["10.1.0.1/16", "10.1.0.0/33", "10.1/16"])
def test_no_network_is_an_error(network: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"kv_network is {network}, which is no network"):
        choose_devices(network, ADDRESSES, "", tmp_path)


def test_the_users_devices_may_say_the_same_more_exactly(tmp_path: Path) -> None:
    rdma(tmp_path, "ib0", 0, "mlx5_0")
    assert choose_devices("10.1.0.0/16", ADDRESSES, "mlx5_0:1,ib1", tmp_path) == "mlx5_0:1,ib1"


@pytest.mark.parametrize("asked", ["eth0", "eth1,eth0", "all"])
def test_the_users_devices_outside_it_are_an_error(asked: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"UCX_NET_DEVICES is {asked}, but kv_network = 172.31.0.0/16 means eth1"):
        choose_devices("172.31.0.0/16", ADDRESSES, asked, tmp_path)


_AGENT = """
import json, os, sys
from services.kv.ucx import start_agent, ucx
from services.runtime.errors import ConfigError
with ucx().environment("lo"):
    inside = os.environ["UCX_NET_DEVICES"]
agent = start_agent("one", sys.argv[1])
told = json.dumps([inside, os.environ.get("UCX_NET_DEVICES"), len(agent.get_agent_metadata())])
print(told, flush=True)
os._exit(0)
"""


def agent_over(network: str) -> tuple[str, str | None, int]:
    """What UCX_NET_DEVICES was for UCX and is afterwards, and the size of an agent's metadata, which lists an address a device."""
    environment = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"} | {"UCX_TLS": "tcp"}
    done = subprocess.run([sys.executable, "-c", _AGENT, network], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    inside, after, size = json.loads(done.stdout.splitlines()[-1])
    return inside, after, size


def test_an_agent_lists_addresses_in_its_network_only() -> None:
    up = [device for device, stats in psutil.net_if_stats().items() if stats.isup]
    if len(up) < 2:
        pytest.skip(f"only {up} is up: nothing to choose from")
    inside, after, of_one = agent_over("127.0.0.0/8")
    assert (inside, after) == ("lo", None), "children must not inherit it"
    assert of_one < agent_over("")[2], "an agent without a network lists every device"
