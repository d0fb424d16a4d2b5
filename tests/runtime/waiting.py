"""Waiting for a condition, with a deadline."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], what: str, patience_s: float = 20.0) -> None:
    """Poll until `condition`; fail with `what` otherwise."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        await asyncio.sleep(0.01)
