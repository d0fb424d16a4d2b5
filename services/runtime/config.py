"""One TOML file describes a cluster; every process reads the section that is its own. Frozen after loading."""

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from services.runtime.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
ModelLength = Literal[0] | Annotated[int, msgspec.Meta(ge=2)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
# A name, an IPv4 address or an IPv6 address in brackets, then a port.
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[0-5]?\d{1,4})"
ADDRESS_PATTERN = rf"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):{_PORT}$"
Address = Annotated[str, msgspec.Meta(pattern=ADDRESS_PATTERN)]
OptionalAddress = Annotated[str, msgspec.Meta(pattern=f"{ADDRESS_PATTERN}|^$")]
Network = Annotated[str, msgspec.Meta(pattern=r"^([0-9A-Fa-f:.]+/\d{1,3})?$")]
Host = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])$")]
LogLevel = Literal["debug", "info", "warning", "error"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file: unknown keys are errors."""


class ModelSection(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str = "deploy/demo_model"  # Hugging Face folder
    max_model_len: ModelLength = 0  # tokens of prompt and output together; 0 = what the model's config allows


class RouterSection(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    address: Address = "127.0.0.1:50050"  # port 0 = any free one
    max_requests: Positive = 1024  # running, a choice counted as one; beyond it, and beyond what the pools can take, they wait
    max_queued: NonNegative = 1024  # waiting, a choice counted as one; beyond it RESOURCE_EXHAUSTED
    max_queue_s: Seconds = 60.0  # who has waited so long gets RESOURCE_EXHAUSTED
    prefill_queue_tokens: Positive = 16384  # uncached tokens in flight at a prefill rank, from which on it has no room
    decode_lead: Rate = 0.125  # of max_running: requests beyond it that a decode rank gets, so that prefill goes on meanwhile
    background_share: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.05  # of the work, to later classes while earlier ones wait
    tenants: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}  # weights of tenants under overload, 1 for who is not named
    retries: NonNegative = 3  # other pairs tried before a request fails
    max_backlog_tokens: Positive = 1000  # tokens a client may let pile up
    member_wait_s: Seconds = 60.0  # a stream with tokens out waits this long for a pool that became empty
    prefix_wait_s: Seconds = 1.0  # of computing that a prompt waits for at a prefill rank that holds its prefix, rather than go elsewhere
    metrics: OptionalAddress = "127.0.0.1:0"  # /metrics, /livez and /readyz over HTTP; port 0 = any free one, "" = none


class PoolSection(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    address: Address = "127.0.0.1:0"
    advertise: Host = ""  # host that others dial; default: that of `address`, or, listening everywhere, what a router is dialled from
    routers: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1)] = ("127.0.0.1:50050",)
    ranks: Positive = 1  # engine processes of this front
    num_pages: Positive = 256  # a rank
    max_running: Positive = 64  # requests a rank
    threads: Positive = 1  # torch threads a rank
    transport: Literal["nixl"] = "nixl"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the latent pages
    drain_s: Seconds = 60.0
    # The front's /metrics, /livez and /readyz over HTTP; rank r's are at port + 1 + r. Port 0 = any free ones, "" = none.
    metrics: OptionalAddress = "127.0.0.1:0"
    kv_events: bool = True  # each rank tells over ZMQ what its prefix cache holds; beyond loopback that needs security.curve_key
    kv_network: Network = ""  # pages go over the device that has an address in it, e.g. "10.1.0.0/16"; "" = UCX chooses


class PrefillSection(PoolSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    chunk_tokens: Positive = 1024  # prompt tokens a forward
    max_queued: Positive = 1024  # prompts a rank that wait for pages


class DecodeSection(PoolSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_claims: Positive = 1024  # booked requests a rank


class FaultRates(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often each fault happens; see services/kv/faults.py."""

    drop: Rate = 0.0  # of notifications
    duplicate: Rate = 0.0
    delay: Rate = 0.0
    reorder: Rate = 0.0
    fail_post: Rate = 0.0  # of reads
    fail_read: Rate = 0.0  # after the bytes have landed
    stall: Rate = 0.0  # landed, but in progress for stall_s
    late: Rate = 0.0  # landed after stall_s
    delay_s: Seconds = 0.05
    stall_s: Seconds = 1.0

    @property
    def is_on(self) -> bool:
        """Whether anything can happen."""
        return any((self.drop, self.duplicate, self.delay, self.reorder, self.fail_post, self.fail_read, self.stall, self.late))


class FaultsSection(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults injected on purpose, for tests and chaos runs: all off by default."""

    seed: int = 0
    control: str = ""  # path prefix of files that change rates and arm faults while ranks run: services/kv/fault_control.py
    rates: FaultRates = FaultRates()

    @property
    def is_on(self) -> bool:
        """Whether ranks need the proxy at all."""
        return bool(self.control) or self.rates.is_on


class LogSection(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: LogLevel = "warning"


class SecuritySection(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The inner plane: mTLS on every gRPC port, CURVE on every ZMQ socket beyond loopback. Files in PEM; all three or none."""

    certificate: str = ""  # this process's chain
    key: str = ""
    ca: str = ""  # whose certificates are believed
    server_name: str = "baton.internal"  # what certificates of routers, fronts and tools name; a client's names something else
    insecure: bool = False  # serve and dial in the clear beyond loopback
    curve_key: str = ""  # the cluster's ZMQ key pair, one file (services/doctor/keys.py makes it)


class Config(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    model: ModelSection = ModelSection()
    router: RouterSection = RouterSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    log: LogSection = LogSection()
    faults: FaultsSection = FaultsSection()
    security: SecuritySection = SecuritySection()


def parse_config(table: dict[str, Any], origin: str) -> Config:
    """Turn a decoded TOML table into a Config; `origin` names the file in errors."""
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        path = path.strip("`.")
        if "matching regex" in text:
            form = "a host name or address" if path.endswith("advertise") else "host:port, e.g. 127.0.0.1:50050 or [::1]:50050"
            raise ConfigError(f"{origin}: {path} is not of the form {form}") from None
        known = _known_keys(path if "unknown field" in text else None)
        raise ConfigError(f"{origin}: {error}{known}") from None


def _known_keys(section: str | None) -> str:
    """What could have been meant, for the error about an unknown key."""
    if section is None:
        return ""
    owner: Any = Config() if not section else getattr(Config(), section, Config())
    return f"; known here are {', '.join(owner.__struct_fields__)}"


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (None = defaults only) and apply overrides of the form `section.key=value` (value in TOML, or a bare word)."""
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give an existing file with --config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is no valid TOML: {error}") from None
    for override in overrides:
        _apply_override(table, override)
    return parse_config(table, str(path) if path is not None else "command line")


def _apply_override(table: dict[str, Any], override: str) -> None:
    name, equals, value = override.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    target = table.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"--set {override!r}: {section} is a value, not a table")
    target[key] = parsed


def program_name() -> str:
    """How this process was started, for its usage line."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else Path(sys.argv[0]).name


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """--config and --set, for load_config()."""
    parser.add_argument("--config", type=Path, default=None, help="TOML file, e.g. deploy/dev.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value of the file")


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Arguments that every process has."""
    parser = argparse.ArgumentParser(prog=program_name(), description=description)
    add_config_arguments(parser)
    parser.add_argument("--die-with-parent", type=int, default=None, metavar="PID",
                        help="drain when process PID, which started this one, dies; set by what starts others")
    parser.add_argument("--address-file", type=Path, default=None, metavar="PATH",
                        help="where a router or front writes host:port of its gRPC server once it listens")
    parser.add_argument("--metrics-file", type=Path, default=None, metavar="PATH",
                        help="where to write host:port of /metrics once it is served; a rank adds .RANK to the name")
    return parser
