"""From `kv_network` to UCX_NET_DEVICES: which of this machine's devices pages go over.

    net_devices("10.1.0.0/16")     "mlx5_0:1,ib0": the device with an address in it, its RDMA ports first; TCP is there for those without

What the user's UCX_NET_DEVICES names has to be among these, and then it alone is used: it may say the same more exactly, nothing else.
"""
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from services.runtime.errors import ConfigError

_VARIABLE = "UCX_NET_DEVICES"


def net_devices(network: str) -> str:
    """UCX_NET_DEVICES for `network` (a CIDR) on this machine as it is now. Raises ConfigError when no device has an address in it."""
    addresses = {device: [entry.address for entry in entries] for device, entries in psutil.net_if_addrs().items()}
    return choose_devices(network, addresses, os.environ.get(_VARIABLE, ""), Path("/sys/class/net"))


def choose_devices(network: str, addresses: Mapping[str, Sequence[str]], asked: str, sys_class_net: Path) -> str:
    """The same of what is given: each device's addresses, the user's UCX_NET_DEVICES or "", and sysfs."""
    try:
        wanted = ipaddress.ip_network(network)
    except ValueError as error:
        raise ConfigError(f"kv_network is {network}, which is no network ({error}); write one like 10.1.0.0/16 or fd00:1::/64") from None
    numbers = {device: [number for text in texts if (number := _address(text))] for device, texts in addresses.items()}
    found = [device for device in sorted(numbers) if any(number in wanted for number in numbers[device])]
    if not found:
        seen = ", ".join(f"{number} on {device}" for device in sorted(numbers) for number in numbers[device])
        raise ConfigError(f"kv_network is {network}, but no network device has an address in it (found: {seen or 'none'}); "
                          "name the network that the pools share")
    devices = [*(port for device in found for port in _rdma_ports(sys_class_net / device)), *found]
    if asked:
        others = [name for name in asked.split(",") if name not in devices]
        if others:
            raise ConfigError(f"{_VARIABLE} is {asked}, but kv_network = {network} means {','.join(devices)}; set one of the two")
        return asked
    return ",".join(devices)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])  # a link-local IPv6 address has its device behind it
    except ValueError:  # a hardware address
        return None


def _rdma_ports(device: Path) -> list[str]:
    """RDMA ports beneath a network device, as UCX names them: with the device's own name alone UCX would take TCP over it."""
    try:
        port = int((device / "dev_port").read_text()) + 1
        return sorted(f"{rdma.name}:{port}" for rdma in (device / "device" / "infiniband").iterdir())
    except (OSError, ValueError):
        return []
