"""The log lines of all processes of an application: what happened, when, where, and to which request.

    2026-11-23T21:04:05.123Z WARNING gateway-3f2a1b9c0d4e [chat-17] POST /v1/completions failed with 503 ...
    {"time":"2026-11-23T21:04:05.123Z","level":"warning","component":"gateway","name":"gateway-3f2a1b9c0d4e",...}

Lines go to the file that Serve keeps for a replica, otherwise to stderr, which Ray keeps for an actor.
"""

from __future__ import annotations

import enum
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from typing import cast

import msgspec

from baton.engine.strict_model import StrictModel

OURS = ("baton", "uvicorn")  # loggers that this module formats
SERVE = "ray.serve"  # Serve's own logger, for applications to use

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that this task or thread works for, as its client knows it; empty: none."""


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogSettings(StrictModel):
    """Settings of all logs of one application."""

    format: LogFormat = LogFormat.TEXT
    level: LogLevel = LogLevel.INFO


class LogLine(msgspec.Struct, omit_defaults=True):
    """A log line in JSON. Empty fields are left out."""

    time: str
    level: str
    component: str
    name: str
    message: str
    logger: str
    request_id: str = ""
    exception: str = ""


class LineFormatter(logging.Formatter):
    """Formats the records of one process as lines: `component` is its kind, `name` identifies the process."""

    def __init__(self, format: LogFormat, component: str, name: str) -> None:
        super().__init__()
        self._format, self._component, self._name = format, component, name

    def format(self, record: logging.LogRecord) -> str:
        line = LogLine(
            time=datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            level=record.levelname.lower(),
            component=self._component,
            name=self._name,
            message=_encodable(record.getMessage()),
            logger=record.name,
            request_id=getattr(record, "baton_request_id", ""),
            exception=_encodable(self.formatException(record.exc_info)) if record.exc_info else "",
        )
        return msgspec.json.encode(line).decode() if self._format is LogFormat.JSON else _as_text(line)


def _as_text(line: LogLine) -> str:
    """Format a line as text. Line breaks in a message are escaped, so that it cannot imitate another line."""
    request = f" [{line.request_id}]" if line.request_id else ""
    message = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line.message)
    traceback = f"\n{line.exception}" if line.exception else ""
    return f"{line.time} {line.level.upper()} {line.name}{request} {message}{traceback}"


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


class ProcessHandler(logging.Handler):
    """Writes lines to the file that Serve keeps for this process if there is one, else to stderr."""

    def __init__(self, formatter: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        record.baton_request_id = request_id.get()
        if (serve := self._serve_handler()) is not None:
            serve.handle(record)
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _serve_handler(self) -> MemoryHandler | None:
        """Return Serve's handler, set to our format for our records. Serve may have replaced it since the last call."""
        for handler in logging.getLogger(SERVE).handlers:
            if isinstance(handler, MemoryHandler) and handler.target is not None:
                theirs = handler.target.formatter
                if not isinstance(theirs, SharedFormatter) or theirs.ours is not self.formatter:
                    handler.target.setFormatter(SharedFormatter(cast(LineFormatter, self.formatter), theirs))
                return handler
        return None


class SharedFormatter(logging.Formatter):
    """The format of a file with Serve's records and ours, each in its own format."""

    def __init__(self, ours: LineFormatter, theirs: logging.Formatter | None) -> None:
        super().__init__()
        self.ours = ours
        self._theirs: logging.Formatter = theirs or logging.Formatter()
        if isinstance(theirs, SharedFormatter):
            self._theirs = theirs._theirs

    def format(self, record: logging.LogRecord) -> str:
        return (self.ours if hasattr(record, "baton_request_id") else self._theirs).format(record)


def configure(settings: LogSettings, component: str, name: str) -> None:
    """Send this process's log lines to Serve's file or to stderr.

    Handlers of other libraries stay; handlers of an earlier call are replaced.
    """
    for logger in map(logging.getLogger, OURS):
        for handler in [handler for handler in logger.handlers if isinstance(handler, ProcessHandler)]:
            logger.removeHandler(handler)
        logger.addHandler(ProcessHandler(LineFormatter(settings.format, component, name)))
        logger.setLevel(settings.level.upper())
        logger.propagate = False
