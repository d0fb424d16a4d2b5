"""deploy/compose.yaml and compose.toml without an engine: what every container would be started with, and what it could reach."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.runtime.config import Config, argument_parser, load_config
from services.runtime.security import Security

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROCESSES = ("router", "prefill", "decode")


def filled(text: str) -> str:
    """With the defaults of its ${variables}."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def config_of(service: str) -> Config:
    """What the service's process would load."""
    command = [filled(word) for word in SERVICES[service]["command"]]
    assert command[:3] == ["python", "-m", f"services.{service}"]
    arguments = argument_parser("").parse_args(command[3:])
    return load_config(ROOT / arguments.config, arguments.set)


@pytest.mark.parametrize("service", PROCESSES)
def test_commands_load(service: str) -> None:
    config = config_of(service)
    assert (ROOT / config.model.path / "config.json").is_file()
    section = getattr(config, service)
    assert section.metrics.endswith(":9400"), "what deploy/healthcheck.sh and deploy/prometheus.yml ask"
    Security.of(type(config.security)(insecure=config.security.insecure)).check_listen(section.address, service)


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_pools_drain_before_they_are_killed_and_use_the_kv_network(service: str) -> None:
    section = getattr(config_of(service), service)
    assert int(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= section.drain_s + 10
    assert section.kv_network == filled(COMPOSE["networks"]["kv"]["ipam"]["config"][0]["subnet"])
    assert section.kv_events and config_of(service).security.curve_key.startswith("/keys/")
    assert section.routers == (f"router:{config_of('router').router.address.rpartition(':')[2]}",)


def test_only_pools_are_on_the_kv_network_and_nothing_else_is_shared() -> None:
    assert {name for name, service in SERVICES.items() if "kv" in service.get("networks", [])} == {"prefill", "decode"}
    assert COMPOSE["networks"]["kv"]["internal"]
    for name, service in SERVICES.items():
        assert not {"ipc", "pid", "privileged", "cap_add", "container_name", "devices"} & service.keys(), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("network_mode", "none") == "none", name


def test_ports_are_published_on_loopback_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"router", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert all(SERVICES[name]["profiles"] == ["metrics"] for name in ("prometheus", "grafana"))


def test_mounted_files_are_there_and_read_only() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", []) if mount.startswith("./")]
    assert mounts
    for source, _, mode in mounts:
        assert (ROOT / "deploy" / source).exists() and mode == "ro", source


def test_the_image_needs_no_buildkit() -> None:
    """The builder of older engines takes neither mounts nor heredocs."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    instructions = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"--mount|<<|--chmod|--link", instructions)
    assert re.search(r"^USER 10001:10001$", instructions, re.MULTILINE)
