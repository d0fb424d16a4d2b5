"""`python -m services.router --config F`: one router process."""

import asyncio
import signal

from services.router.server import Router
from services.runtime.config import argument_parser, load_config
from services.runtime.process import die_with_parent, run_process
from services.runtime.telemetry import setup_logging


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    arguments = argument_parser("Baton's router: clients and pool fronts connect to it.").parse_args()
    die_with_parent(signal.SIGTERM, arguments.die_with_parent)

    async def run(stopping: asyncio.Event) -> None:
        config = load_config(arguments.config, arguments.set)
        setup_logging("router", config.log.level)
        await Router(config).run(stopping, arguments.address_file, arguments.metrics_file)

    run_process(run)


if __name__ == "__main__":
    main()
