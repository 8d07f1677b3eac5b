"""The one place where errors become HTTP answers, in OpenAI's shape.

Knows the error classes and their status; knows no route. Messages name fields and numbers, never
prompt text. A client learns what it can mend; what went wrong inside it learns in plain words, and
the log has the rest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from specserve import errors
from specserve.errors import QUOTED_CHARACTERS, quoted
from specserve.rpc.status import RemoteError


class BodyTooLarge(errors.InvalidRequest):
    """The body is longer than this gateway reads."""

    def __init__(self, limit_bytes: int) -> None:
        errors.SpecServeError.__init__(self, limit_bytes)
        self.field = ""
        self.message = f"the body is larger than {limit_bytes} bytes, the most this server reads"
        self.limit_bytes = limit_bytes


class BodyTooSlow(errors.InvalidRequest):
    """The body did not come in the time that this gateway waits for one."""

    def __init__(self, timeout_s: float) -> None:
        errors.SpecServeError.__init__(self, timeout_s)
        self.field = ""
        self.message = f"the body did not come within {timeout_s:g} seconds"
        self.timeout_s = timeout_s


class UnknownModel(errors.InvalidRequest):
    """Another model was asked for than the one served."""

    def __init__(self, name: str, served: str) -> None:
        errors.SpecServeError.__init__(self, name, served)
        self.field = "model"
        self.message = f"{quoted(name)} is not served here; {served!r} is"


class LimitExceeded(errors.SpecServeError):
    """A tenant asks for more than it may have at present."""

    def __init__(self, limit: str, value: int, retry_after_s: float) -> None:
        super().__init__(limit, value, retry_after_s)
        self.limit = limit
        self.value = value
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"the limit {self.limit} of {self.value} is reached; try again later"


class UnknownRequest(errors.InvalidRequest):
    """No orchestrator remembers a request of this name."""

    def __init__(self, name: str) -> None:
        errors.SpecServeError.__init__(self, name)
        self.field = "request_id"
        self.message = f"{quoted(name)} is not remembered: it never was, or too many came since"


class ClientDisconnected(Exception):
    """The client went away before its answer was complete; nobody is there to read another."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as a client sees it."""

    status: int
    """HTTP status code."""
    type: str
    """OpenAI's error type."""
    message: str
    """What was found and what was wanted, for people."""
    param: str | None = None
    """The request field at fault, if one is."""
    code: str | None = None
    """Stable code for programs, if there is one."""
    retry_after_s: float = 1.0
    """When another try makes sense, where one does."""

    def to_json(self) -> bytes:
        """Write `{"error": …}`."""
        body = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": body}, ensure_ascii=False, separators=(",", ":")).encode()

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the body: overload and loss are worth another try, a 401 wants a key."""
        if self.status == 401:
            return {"www-authenticate": 'Bearer realm="specserve"'}
        if self.code == _POISON:
            return {"x-should-retry": "false"}  # the OpenAI clients' word; else they send it again
        if self.status not in (429, 503):
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str | None = None
    message: str = ""
    """For clients, in place of the error's own, which may name processes and addresses."""


_BAD = "invalid_request_error"
_INTERNAL = "internal_server_error"
_OVERLOADED = "service_unavailable_error"
_BUSY = "rate_limit_error"

_POISON = "poison_request"
_INSIDE = "internal error; the log has the request id"
_NO_ROOM = "the server has no room for this request at present; try again"
_TOO_LATE = "the request did not finish in the time it was given"
_LOST = "the model cannot be reached at present; try again"
_TOO_MANY = "more requests wait than the server can take; try again later"
_NO_PAIR = "the model services do not fit together; the server's operator has to mend that"

_ROWS: dict[str, _Row] = {
    "InvalidRequest": _Row(400, _BAD),
    "ContextOverflow": _Row(400, _BAD, "context_length_exceeded"),
    "BodyTooLarge": _Row(413, _BAD, "body_too_large"),
    "BodyTooSlow": _Row(408, _BAD, "body_too_slow"),
    "UnknownModel": _Row(404, _BAD, "model_not_found"),
    "UnknownRequest": _Row(404, _BAD, "request_not_found"),
    "InvalidProposal": _Row(500, _INTERNAL, None, _INSIDE),
    "SessionNotFound": _Row(500, _INTERNAL, None, _INSIDE),
    "DeviceDied": _Row(500, _INTERNAL, None, _INSIDE),
    "PoisonRequest": _Row(500, _INTERNAL, _POISON),
    "CacheMismatch": _Row(500, _INTERNAL, None, _INSIDE),
    "StaleStep": _Row(500, _INTERNAL, None, _INSIDE),
    # 429 and no 5xx: a proxy that sheds load is not to be taken for one that is broken.
    "Overloaded": _Row(429, _BUSY, "overloaded", _TOO_MANY),
    "LimitExceeded": _Row(429, _BUSY, "rate_limit_exceeded"),
    "CapacityExhausted": _Row(503, _OVERLOADED, "capacity_exhausted", _NO_ROOM),
    "Preempted": _Row(503, _OVERLOADED, "preempted", _NO_ROOM),
    "DeadlineExpired": _Row(504, "timeout_error", "deadline_expired", _TOO_LATE),
    "Draining": _Row(503, _OVERLOADED, "draining", "the server is stopping; try again"),
    "NonFiniteLogits": _Row(
        500,
        _INTERNAL,
        "non_finite_logits",
        "the model's answer to this request was not a number (NaN or infinity)",
    ),
    "PeerUnavailable": _Row(503, _OVERLOADED, "unavailable", _LOST),
    "ModelMismatch": _Row(503, _OVERLOADED, "model_mismatch", _NO_PAIR),
    "VocabularyMismatch": _Row(503, _OVERLOADED, "vocabulary_mismatch", _NO_PAIR),
    "ProtocolMismatch": _Row(503, _OVERLOADED, "protocol_mismatch", _NO_PAIR),
    "ModelUnavailable": _Row(
        503, _OVERLOADED, "model_unavailable", "the model is not ready yet; try again"
    ),
    "ConfigurationError": _Row(500, _INTERNAL, None, _INSIDE),
}
"""By class name, so that a peer's error whose fields did not travel is answered alike."""

_REFUSED = _Row(400, _BAD)

_ROWS_BY_GRPC_CODE: dict[int, _Row] = {
    3: _REFUSED,
    4: _Row(504, "timeout_error", "deadline_expired", _TOO_LATE),
    8: _Row(503, _OVERLOADED, "capacity_exhausted", _NO_ROOM),
    14: _Row(503, _OVERLOADED, "unavailable", _LOST),
}
"""For errors of a peer that named no class that is known here."""


def codes_of_status(status: int) -> list[str]:
    """Return the codes that tell errors of one status apart."""
    return sorted({row.code for row in _ROWS.values() if row.status == status and row.code})


def statuses() -> list[int]:
    """Return the statuses of all errors of our own."""
    return sorted({row.status for row in _ROWS.values()})


def name_of(error: BaseException) -> str:
    """Name an error for a counter and a span: one of a peer by its own class, where it is known."""
    if isinstance(error, RemoteError) and error.error in _ROWS:
        return error.error
    return type(error).__name__


def status_of(name: str) -> int:
    """Return the status that an error is answered with, by the name of its class."""
    row = _ROWS.get(name)
    return 500 if row is None else row.status


def is_mapped(error: type[errors.SpecServeError]) -> bool:
    """Say whether the class has a row of its own."""
    return error.__name__ in _ROWS


def to_http(error: Exception) -> HttpError:
    """Answer an error as HTTP; anything unforeseen is a 500 that says nothing of the inside."""
    if not isinstance(error, errors.SpecServeError):
        return HttpError(500, _INTERNAL, _INSIDE)
    message, param = str(error), None
    if isinstance(error, errors.InvalidRequest):
        param = error.field or None
    if isinstance(error, RemoteError):
        message = error.message or error.error
        row = _ROWS.get(error.error) or _ROWS_BY_GRPC_CODE.get(error.code)
        if row is _REFUSED and not error.error:
            row = None  # nobody of ours said so: no client is told that it is at fault
    else:
        row = next(
            (_ROWS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _ROWS), None
        )
    row = row or _Row(500, _INTERNAL, None, _INSIDE)
    answer = HttpError(row.status, row.type, row.message or message, param, row.code)
    if isinstance(error, errors.Overloaded | LimitExceeded):
        answer = replace(answer, retry_after_s=error.retry_after_s)
    return answer


def for_log(error: BaseException) -> str:
    """Say what happened, for the log: all that is known, but never what a client sent."""
    name = type(error).__name__
    if isinstance(error, RemoteError) and not error.error:
        # A peer's own exception, whatever its text may quote.
        return f"{name} (status {error.code})"
    return f"{name}: {error}" if isinstance(error, errors.SpecServeError) else name


def routing_error(status: int, path: str, method: str) -> HttpError:
    """Answer a path or method that is not there."""
    if status == 404:
        return HttpError(404, _BAD, f"there is no {quoted(path)} here", None, "not_found")
    if status == 405:
        message = f"{quoted(path)} does not take {method[:QUOTED_CHARACTERS]}"
        return HttpError(405, _BAD, message, None, "method_not_allowed")
    return HttpError(status, _BAD if status < 500 else _INTERNAL, f"refused with status {status}")
