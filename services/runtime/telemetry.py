"""Logs as JSON lines on stderr, every line about a request with its id; and what every process counts and tells of itself."""

import json
import logging
import sys
import time
from typing import Any

from prometheus_client import Counter, Info

from proto.baton.v1 import common_pb2
from services import VERSION

# Every process: what was refused, thrown away or given up. `what`: a noun phrase; `reason`: a value of baton.v1.Reason, or "".
INCIDENTS = Counter("baton_incidents_total", "Messages ignored, reads discarded, pages quarantined, agents renewed", ["what", "reason"])
_BUILD = Info("baton_build", "Release, and which process this is")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def count_incident(what: str, reason: int = 0, number: int = 1) -> None:
    """Add to INCIDENTS; `reason` is a value of `baton.v1.Reason`, 0 when none is told."""
    INCIDENTS.labels(what, reason_name(reason)).inc(number)


def reason_name(reason: int) -> str:
    """The label of a `baton.v1.Reason`, "" for 0; that of a newer peer is a number to us."""
    if not reason:
        return ""
    return common_pb2.Reason.Name(reason) if reason in common_pb2.Reason.values() else str(reason)


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(process: str, level: str) -> None:
    """Log lines of `level` and above; `process` names the writer, e.g. "decode/1", also in metrics. Use `extra={"request_id": ...}`."""
    _BUILD.info({"version": VERSION, "process": process})
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
