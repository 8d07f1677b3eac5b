"""An error raised on one side of the wire is the same error on the other."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from specserve import errors
from specserve.gateway.errors import to_http
from specserve.rpc import status

SAMPLES: dict[type[errors.SpecServeError], errors.SpecServeError] = {
    error.__class__: error
    for error in (
        errors.InvalidRequest("top_p", "2, a value in (0, 1] was wanted"),
        errors.ContextOverflow("prompt", "too long"),
        errors.InvalidProposal("shapes"),
        errors.SessionNotFound("s"),
        errors.CacheMismatch(3, 5),
        errors.StaleStep(1, 2, 3, 4),
        errors.CapacityExhausted("blocks", 2, 1),
        errors.Preempted("s"),
        errors.Overloaded("9 requests wait", 7.25),
        errors.DeadlineExpired("call", 1.5),
        errors.Draining("target-1"),
        errors.NonFiniteLogits("s", 2),
        errors.DeviceDied("s", 3),
        errors.PoisonRequest("r", 2),
        errors.PeerUnavailable("target", "gone"),
        errors.ModelMismatch("target-1", "weights a", "weights b"),
        errors.VocabularyMismatch(3, "'a'", "'b'"),
        errors.ProtocolMismatch("peer", 9, 1),
        errors.ModelUnavailable("missing"),
        errors.ConfigurationError("wrong"),
        status.RemoteError("New", 13, "text"),
    )
}
WHOLE = (
    errors.InvalidRequest,
    errors.ContextOverflow,
    errors.InvalidProposal,
    errors.ConfigurationError,
    errors.ModelUnavailable,
    errors.Overloaded,
    errors.Draining,
    status.RemoteError,
)
"""Classes that come back with every field; of others a part travels, or their name and text."""

IN_CALLS = (
    errors.CacheMismatch,
    errors.SessionNotFound,
    errors.DeviceDied,
    errors.Preempted,
    errors.StaleStep,
    errors.CapacityExhausted,
    errors.PeerUnavailable,
    errors.NonFiniteLogits,
    errors.InvalidProposal,
    errors.InvalidRequest,
    errors.Draining,
)


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(sub) for sub in cls.__subclasses__()))


def test_every_error_has_a_status() -> None:
    """A subclass without a row could not be sent."""
    # A gateway's own errors answer HTTP and never cross gRPC.
    sent = {
        error
        for error in _subclasses(errors.SpecServeError) - {errors.SpecServeError}
        if not error.__module__.startswith("specserve.gateway")
    }
    assert set(status.CODES) == sent
    assert set(SAMPLES) == set(status.CODES)
    assert grpc.StatusCode.OK not in status.CODES.values()


@pytest.mark.parametrize("cls", IN_CALLS)
def test_call_error_comes_back_as_its_class(cls: type[errors.SpecServeError]) -> None:
    """What sessions act upon keeps its class, and a mismatch its length."""
    message = status.to_call_error(SAMPLES[cls])
    back = status.from_call_error(message, "s", 5)
    assert type(back) is cls
    assert message.code == status.CODES[cls].value[0] != 0
    if isinstance(back, errors.CacheMismatch):
        assert (back.matching_length, back.keep_length) == (3, 5)
    if isinstance(back, errors.DeviceDied):
        assert back.args == ("s", 3)
    if isinstance(back, (errors.InvalidProposal, errors.InvalidRequest)):
        assert str(SAMPLES[cls]) in str(back)
    if isinstance(back, errors.InvalidRequest):
        assert (back.field, back.message) == SAMPLES[cls].args


def test_unknown_error_of_a_newer_peer_is_kept() -> None:
    """Its name, code and text are for people to read."""
    message = status.to_call_error(SAMPLES[status.RemoteError])
    message.error = "FromTheFuture"
    back = status.from_call_error(message, "s", 0)
    assert isinstance(back, status.RemoteError)
    assert "FromTheFuture" in str(back)
    assert "text" in str(back)


def test_long_text_is_cut() -> None:
    """Status text has a header's size to live in."""
    message = status.to_call_error(errors.InvalidProposal("x" * 100_000))
    assert len(message.message) == status.MAX_DETAIL_BYTES


class _Aborted(Exception):
    pass


class _Context:
    """Notes what the call was aborted with."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.text = ""
        self.metadata: tuple[tuple[str, str], ...] = ()

    async def abort(
        self, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self.code, self.text, self.metadata = code, text, metadata
        raise _Aborted

    def rebuilt(self) -> errors.SpecServeError:
        """Return what the caller makes of it."""
        assert self.code is not None
        trailing = grpc.aio.Metadata(*self.metadata)
        error = grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), trailing, self.text)
        return status.from_rpc_error(error, "orchestrator")


@pytest.mark.parametrize("error", SAMPLES.values(), ids=lambda error: type(error).__name__)
async def test_raised_error_ends_the_call_and_is_rebuilt(error: errors.SpecServeError) -> None:
    """Handlers just raise: the status carries code, text and class name, and is an error again."""
    context = _Context()
    with pytest.raises(_Aborted):
        async with status.errors_as_status(context):  # type: ignore[arg-type]
            raise error
    if not isinstance(error, status.RemoteError):
        assert context.code is status.CODES[type(error)]
        assert context.metadata[0] == (status.ERROR_KEY, type(error).__name__)
    rebuilt = context.rebuilt()
    if type(error) in WHOLE:
        assert type(rebuilt) is type(error)
        assert vars(rebuilt) == vars(error)
        assert str(rebuilt) == str(error)
    elif isinstance(rebuilt, status.RemoteError):
        assert (rebuilt.error, rebuilt.message) == (type(error).__name__, str(error))
    else:
        assert type(rebuilt) is type(error)


@pytest.mark.parametrize("num_hops", [1, 2])
@pytest.mark.parametrize("error", SAMPLES.values(), ids=lambda error: type(error).__name__)
async def test_an_error_of_another_process_is_answered_as_one_of_our_own(
    error: errors.SpecServeError, num_hops: int
) -> None:
    """An orchestrator's, and a target's that it passes on: status, code, words and field."""
    raised = error
    if num_hops == 2:
        raised = status.from_call_error(status.to_call_error(error), "s", 5)
    context = _Context()
    with pytest.raises(_Aborted):
        async with status.errors_as_status(context):  # type: ignore[arg-type]
            raise raised
    answered, wanted = to_http(context.rebuilt()), to_http(error)
    if num_hops == 2:
        # A call's reply does not say when to come again.
        answered = replace(answered, retry_after_s=wanted.retry_after_s)
    assert answered == wanted


async def test_a_status_of_nobody_we_know_blames_no_client() -> None:
    """INVALID_ARGUMENT without a class of ours is no field that a client could mend."""
    context = _Context()
    context.code, context.text = grpc.StatusCode.INVALID_ARGUMENT, "10.0.0.7: no"
    answered = to_http(context.rebuilt())
    assert answered.status == 500
    assert "10.0.0.7" not in answered.message


@pytest.mark.parametrize("text", ["no field here: at all", "Bad: x", "the body is empty", "a b: c"])
def test_text_without_a_field_stays_text(text: str) -> None:
    """Nothing before a colon is taken for a field that is none."""
    message = status.to_call_error(errors.InvalidRequest("", text))
    back = status.from_call_error(message, "s", 0)
    assert isinstance(back, errors.InvalidRequest)
    assert (back.field, back.message) == ("", text)


async def test_other_exceptions_pass_through() -> None:
    """A mistake of ours is no status of ours."""
    with pytest.raises(ZeroDivisionError):
        async with status.errors_as_status(_Context()):  # type: ignore[arg-type]
            raise ZeroDivisionError
