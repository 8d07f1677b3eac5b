"""Where errors meet gRPC status codes. Handlers just raise; clients get the same class."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specserve import errors
from specserve.rpc.v1 import common_pb2

ERROR_KEY = "specserve-error"
"""Trailing metadata key that carries the class name."""

RETRY_AFTER_KEY = "specserve-retry-after"
"""Trailing metadata key that carries the seconds after which another try makes sense."""

MAX_DETAIL_BYTES = 2048
"""Status text travels in an 8 KiB header block; longer text is cut."""

_DRAINING = re.compile(r"replica (.*) is draining and .*", re.DOTALL)
"""How Draining writes itself."""

_NAMED_FIELD = re.compile(r"([a-z][a-z0-9_]*(?:[.\[][a-z0-9_\]]+)*): (.*)", re.DOTALL)
"""How InvalidRequest writes itself when it knows the field."""

CODES: dict[type[errors.SpecServeError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextOverflow: grpc.StatusCode.OUT_OF_RANGE,
    errors.InvalidProposal: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SessionNotFound: grpc.StatusCode.NOT_FOUND,
    errors.DeviceDied: grpc.StatusCode.NOT_FOUND,
    errors.CacheMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleStep: grpc.StatusCode.ABORTED,
    errors.CapacityExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Preempted: grpc.StatusCode.ABORTED,
    errors.DeadlineExpired: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.NonFiniteLogits: grpc.StatusCode.INTERNAL,
    errors.PoisonRequest: grpc.StatusCode.INTERNAL,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.VocabularyMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ConfigurationError: grpc.StatusCode.INVALID_ARGUMENT,
}
"""Every subclass has a row; a test fails if one lacks it."""


class RemoteError(errors.SpecServeError):
    """A peer's error whose class this build does not know (a newer peer)."""

    def __init__(self, error: str, code: int, message: str) -> None:
        super().__init__(error, code, message)
        self.error = error
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.error or 'error'} (status {self.code}): {self.message}"


CODES[RemoteError] = grpc.StatusCode.UNKNOWN
"""Where the peer's own code is none."""

_FAILURES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def to_call_error(error: errors.SpecServeError) -> common_pb2.CallError:
    """Put an error of one call into its reply."""
    is_death = isinstance(error, errors.DeviceDied)
    return common_pb2.CallError(
        code=CODES[type(error)].value[0],
        # A peer of the version before knows the class above, and opens the session anew.
        error=errors.SessionNotFound.__name__ if is_death else type(error).__name__,
        message=str(error)[:MAX_DETAIL_BYTES],
        matching_length=error.matching_length if isinstance(error, errors.CacheMismatch) else 0,
        num_computed=error.num_computed if isinstance(error, errors.DeviceDied) else 0,
    )


def from_call_error(
    error: common_pb2.CallError, session_id: str, keep_length: int
) -> errors.SpecServeError:
    """Rebuild the class that the peer raised, as far as the fields travel."""
    match error.error:
        case "CacheMismatch":
            return errors.CacheMismatch(error.matching_length, keep_length)
        case "SessionNotFound" if error.num_computed:
            return errors.DeviceDied(session_id, error.num_computed)
        case "SessionNotFound":
            return errors.SessionNotFound(session_id)
        case "Preempted":
            return errors.Preempted(session_id)
        case "StaleStep":
            return errors.StaleStep(0, 0, 0, 0)
        case "CapacityExhausted":
            return errors.CapacityExhausted(error.message, 0, 0)
        case "PeerUnavailable":
            return errors.PeerUnavailable("peer", error.message)
        case "NonFiniteLogits":
            return errors.NonFiniteLogits(session_id, 0)
        case "InvalidProposal":
            return errors.InvalidProposal(error.message)
        case "InvalidRequest":
            return _invalid(errors.InvalidRequest, error.message)
        case "Draining":
            return _draining(error.message)
        case _:
            return RemoteError(error.error, error.code, error.message)


def from_rpc_error(error: grpc.aio.AioRpcError, pool: str) -> errors.SpecServeError:
    """Translate the status that ended a call or stream."""
    code = error.code()
    text = error.details() or code.name
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    name = metadata.get(ERROR_KEY, "")
    match name:
        case "InvalidRequest":
            return _invalid(errors.InvalidRequest, text)
        case "ContextOverflow":
            return _invalid(errors.ContextOverflow, text)
        case "InvalidProposal":
            return errors.InvalidProposal(text)
        case "ConfigurationError":
            return errors.ConfigurationError(text)
        case "ModelUnavailable":
            return errors.ModelUnavailable(text)
        case "Overloaded":
            return errors.Overloaded(text, _seconds(metadata.get(RETRY_AFTER_KEY, "")))
        case "Draining":
            return _draining(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExpired(pool, 0.0)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.PeerUnavailable(pool, text)
    return RemoteError(name, code.value[0], text)


def _draining(text: str) -> errors.Draining:
    named = _DRAINING.fullmatch(text)
    return errors.Draining(named[1] if named else text)


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 3600.0)
    except ValueError:
        return 1.0


def _invalid(kind: type[errors.InvalidRequest], text: str) -> errors.InvalidRequest:
    """Rebuild an error about a field; a client is told the name apart from the text."""
    named = _NAMED_FIELD.fullmatch(text)
    return kind(*named.groups()) if named else kind("", text)


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Abort the call with the status of any SpecServeError raised inside."""
    try:
        yield
    except RemoteError as error:
        # As it came: a call of two hops ends like one of one.
        metadata = [(ERROR_KEY, error.error or RemoteError.__name__)]
        code = _FAILURES.get(error.code, CODES[RemoteError])
        await context.abort(code, error.message[:MAX_DETAIL_BYTES], tuple(metadata))
    except errors.SpecServeError as error:
        metadata = [(ERROR_KEY, type(error).__name__)]
        if isinstance(error, errors.Overloaded):
            metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
        await context.abort(CODES[type(error)], str(error)[:MAX_DETAIL_BYTES], tuple(metadata))
