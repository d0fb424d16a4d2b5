"""FlashInfer's modules, compiled while other things are measured."""

import threading
from collections.abc import Callable

from kernels.timing import cold_us


class Build:
    """Builds one of FlashInfer's modules beside what is measured meanwhile: nvcc takes it a minute."""

    def __init__(self, build: Callable[[], object]) -> None:
        self._failure = "still being built"
        self._build = build
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._build()
            self._failure = ""
        except Exception as error:
            self._failure = repr(error)[:200]

    def is_there(self, trial: Callable[[], object], within_s: float = 75) -> bool:
        """Wait for it and try it once in a graph; says why it is left out."""
        self._thread.join(within_s)
        if not self._failure:
            try:
                cold_us([trial] * 2, replays=1)
            except Exception as error:
                self._failure = repr(error)[:200]
        if self._failure:
            print(f"FlashInfer is left out: {self._failure}")
        return not self._failure
