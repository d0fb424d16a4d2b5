"""A process with a child; says what happens to it on stdout. `python -m tests.runtime.fake_process child|cluster`"""

import asyncio
import subprocess
import sys

from services.runtime.local_cluster import Cluster
from services.runtime.process import run_process, say


async def with_child(stopping: asyncio.Event) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True, stdout=subprocess.DEVNULL)
    say(str(child.pid))
    await stopping.wait()
    say("stopping")
    await child.wait()


async def with_router(stopping: asyncio.Event) -> None:
    cluster = Cluster(None, prefill=0, decode=0, settings=["router.address=127.0.0.1:0"])
    await cluster.start()
    say(str(cluster.processes["router"].pid))
    await cluster.run_until(stopping)


if __name__ == "__main__":
    run_process(with_child if sys.argv[1] == "child" else with_router)
