"""Log lines: text for people, or one JSON object per line for what collects them."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from disagg.telemetry.log_stream import LogStreamHandler

FORMATS = ("text", "json")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest are the fields that a line was given with ``extra``."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, fields of the process and the line.

    Args:
        fields: that every line has, such as ``worker_id``.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(
    log_format: str,
    text: str,
    fields: Mapping[str, str],
    stream: TextIO | None = None,
) -> None:
    """Let this process log to a stream; nothing changes where that was done before.

    Args:
        log_format: one of `FORMATS`.
        text: format of lines of text.
        fields: that every line of JSON has.
        stream: None: standard error.
    """
    handler = LogStreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else logging.Formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
