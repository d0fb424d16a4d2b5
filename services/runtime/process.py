"""How a process of Baton lives and ends: signals, one-sentence errors, nothing left behind.

SIGTERM, SIGINT, SIGHUP   drain: `stopping` is set
SIGTERM, SIGINT again     everything that this process started is killed, and it ends at once
parent dies               the kernel sends the signal asked for with die_with_parent()
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import uvloop

from services.runtime.errors import Interrupted, SetupError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_ONE_SIGNAL_S = 0.3  # `make`, `timeout` and shells send one signal to a process and to its group: twice within this time is once
_GIVE_UP_S = 2.0


def say(text: str) -> None:
    """A line on stdout for whoever started this process; a terminal or pipe that is gone is no reason to stop."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees nothing or all of it. Raises SetupError, which names the file."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        raise SetupError(f"{path} cannot be written ({error.strerror}); make its folder writable, or work in a copy that is") from None


def die_with_parent(number: signal.Signals, parent_pid: int | None) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends (Linux). None = nobody is to be followed."""
    if parent_pid is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(1)


def run_process(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `main(stopping)` until it returns. A SetupError becomes one sentence and exit code 1, an Interrupted one and 130."""
    try:
        uvloop.run(_under_signals(main))  # asyncio's own loop costs a message 0.4 ms more on its way through a process
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as error:
        print(error, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # objects of libraries that were cut short would complain about it while they are collected


async def _under_signals(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stopping, ending = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(main(stopping))
    first_at = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_at
        if not stopping.is_set():
            first_at = time.monotonic()
            stopping.set()
        elif number != signal.SIGHUP and time.monotonic() - first_at > _ONE_SIGNAL_S and not ending.is_set():
            ending.set()
            for each in _SIGNALS:  # an impatient third one must not end in a traceback
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_IGN)
            loop.call_later(_GIVE_UP_S, os._exit, 130)
            work.cancel()
            _kill_children()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    await asyncio.wait({work})
    if ending.is_set():
        if not work.cancelled():
            work.exception()  # that its processes are gone is no news
        raise Interrupted("ended at once; nothing is left running")
    work.result()


def _kill_children() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
