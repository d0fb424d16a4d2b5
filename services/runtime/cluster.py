"""The command line of a cluster on this machine.

    python -m services.runtime.cluster up --config deploy/dev.toml [--prefill 2 --decode 2 --routers 1 --ranks-per-node 1]
    python -m services.runtime.cluster scale prefill=3 decode=1
    python -m services.runtime.cluster recommend --ttft-ms 500 --itl-ms 50

`up` keeps it running: Ctrl-C, SIGTERM or SIGHUP drains it. `scale` speaks with the `up` of the same folder, through `.run/control.sock`.
`recommend` measures for a while and says which `scale` would meet the targets; it changes nothing.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence

from services.runtime import control, recommend
from services.runtime.config import add_config_arguments, program_name
from services.runtime.errors import ConfigError, Interrupted
from services.runtime.keeper import Keeper
from services.runtime.local_cluster import Cluster
from services.runtime.process import run_process, say
from services.runtime.run_folder import RUN_DIR
from services.runtime.scaling import Scaler, parse_targets
from services.runtime.serve import first_of


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """--prefill and --decode, read by rank_counts()."""
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", default="2", metavar="N", help=f"{role} ranks, at least 1 (default 2)")


def rank_counts(arguments: argparse.Namespace) -> tuple[int, int]:
    """Ranks of prefill and of decode. Raises ConfigError, which names the variable that `make` takes."""
    return count_of(arguments, "prefill", "ranks"), count_of(arguments, "decode", "ranks")


def count_of(arguments: argparse.Namespace, name: str, what: str) -> int:
    """The number given as --name. Raises ConfigError, which names the variable that `make` takes."""
    text: str = getattr(arguments, name)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        flag = name.replace("_", "-")
        raise ConfigError(f"{name.upper()} (--{flag}) is {text!r} but it must be a whole number of {what}, at least 1")
    return int(text)


async def _up(arguments: argparse.Namespace, stopping: asyncio.Event) -> None:
    prefill, decode = rank_counts(arguments)
    routers, ranks_per_node = count_of(arguments, "routers", "routers"), count_of(arguments, "ranks_per_node", "ranks")
    cluster = Cluster(
        arguments.config, prefill=prefill, decode=decode, routers=routers, ranks_per_node=ranks_per_node, settings=arguments.set,
        run_dir=RUN_DIR, more_routers=arguments.join, report=say,
    )
    try:
        await cluster.start(stopping)
        async with control.serving(RUN_DIR, {"scale": Scaler(cluster, ranks_per_node).scale}):
            say(f"up at {', '.join(cluster.routers.values())}; in another terminal:  "
                ".venv/bin/python -m services.router.client \"Once upon a time\"")
            say("Ctrl-C drains and stops it")
            await first_of(Keeper(cluster).run(), stopping.wait())
        say(f"draining: what runs gets {cluster.drain_s:g} s at most; a second Ctrl-C ends it at once")
    finally:
        await cluster.stop()


async def _scale(arguments: argparse.Namespace, stopping: asyncio.Event) -> None:
    parse_targets(arguments.targets)
    await first_of(control.ask(RUN_DIR, "scale", arguments.targets, say), stopping.wait())
    if stopping.is_set():
        raise Interrupted("interrupted; the cluster goes on scaling")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program_name(), description="A Baton cluster on this machine")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = _add(commands, "up", _up, "keep a cluster running until Ctrl-C, which drains it")
    add_config_arguments(up)
    add_rank_arguments(up)
    up.add_argument("--routers", default="1", metavar="N", help="router replicas in front of the same pools (default 1)")
    up.add_argument("--ranks-per-node", default="1", metavar="N", help="ranks of each front; pools scale by whole fronts (default 1)")
    up.add_argument("--join", action="append", default=[], metavar="HOST:PORT", help="a router elsewhere that the fronts join as well")
    scale = _add(commands, "scale", _scale, "change the pools of the cluster that `up` keeps running")
    scale.add_argument("targets", nargs="+", metavar="POOL=N", help="prefill=N or decode=N: ranks that the pool is to have")
    recommend.add_arguments(_add(commands, "recommend", recommend.main, "say how many ranks each pool should have, and why"))
    return parser


def _add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, run: Callable[..., object], purpose: str  # pyright: ignore[reportPrivateUsage]
         ) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=purpose, description=purpose)
    parser.set_defaults(run=run)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Do what `words` (None = those of the command line) say."""
    arguments = _parser().parse_args(words)
    run_process(lambda stopping: arguments.run(arguments, stopping))


if __name__ == "__main__":
    main()
