"""Log lines that say which request and trace they belong to, one JSON object each.

The present request is a context variable: set in the task that serves it, inherited by the tasks
that this one starts; it ends with them, so that nothing need be undone. Knows the logging module.
"""

from __future__ import annotations

import json
import logging
import os
from contextvars import ContextVar, Token
from datetime import UTC, datetime

from specserve.errors import ConfigurationError
from specserve.telemetry.context import TraceContext

FORMAT = "SPECSERVE_LOG_FORMAT"
"""json: replicas under Ray Serve, whose command line nobody writes, log as `--log-format json`."""

_REQUEST: ContextVar[tuple[str, TraceContext] | None] = ContextVar("request", default=None)


Entered = Token[tuple[str, TraceContext] | None]


def enter_request(request_id: str, context: TraceContext) -> Entered:
    """Let the log lines of this task, and of those it starts, carry a request's id and trace."""
    return _REQUEST.set((request_id, context))


def leave_request(entered: Entered) -> None:
    """Let the lines of this task be no request's any more."""
    _REQUEST.reset(entered)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; of a request its id, trace and span, under OpenTelemetry's names."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = _REQUEST.get()
        if request is not None:
            request_id, context = request
            fields["request_id"] = request_id
            fields["trace_id"] = context.trace_id_text
            fields["span_id"] = context.span_id_text
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_from_environment() -> None:
    """Write this package's lines to stderr as JSON, where SPECSERVE_LOG_FORMAT asks for it.

    Raises:
        ConfigurationError: it asks for something else.
    """
    form = os.environ.get(FORMAT) or "text"
    if form not in ("text", "json"):
        raise ConfigurationError(f"{FORMAT}: found {form!r}, wanted text or json")
    logger = logging.getLogger("specserve")
    if form == "text" or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    # Whoever owns the process may have a handler on the root: no line twice.
    logger.propagate = False
