"""The router's pool as its waiters see it."""

import asyncio

from services.router.pool import Pool
from services.runtime.serve import cancel
from tests.clear import CLEAR


async def test_a_waiter_cancelled_as_the_pool_changes_is_gone() -> None:
    """A change and a cancellation in one loop turn: the change must not swallow the cancellation, or the router never ends."""
    pool = Pool("router", CLEAR)

    async def watch() -> None:
        while True:
            await pool.wait_changed(60.0)

    waiter = asyncio.create_task(watch())
    await asyncio.sleep(0)
    pool.changed()
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel(waiter), 5)
    assert waiter.cancelled()
