"""Every error that a caller or a peer can cause.

SpecServeError
├── InvalidRequest            a request field is wrong; the client can mend it
│   └── ContextOverflow       the prompt does not fit the context
├── InvalidProposal           a proposal contradicts its own shapes or its session
├── SessionNotFound           the session is not held here
│   └── DeviceDied            nor by anyone: its device died while it computed it
├── CacheMismatch             the kept tokens are missing here, or differ
├── StaleStep                 an older epoch or step than the one already served
├── CapacityExhausted         no KV blocks or no session slots
├── Overloaded                more requests wait, or for longer, than may
├── Preempted                 the session's blocks were given to another
├── DeadlineExpired           the caller's deadline passed first
├── Draining                  the replica takes no new sessions
├── NonFiniteLogits           the model answered NaN or +inf for this request
├── PoisonRequest             devices die of this request
├── PeerUnavailable           no replica of a pool could be reached in time
├── ModelMismatch             a target replica serves another model than its pool
├── VocabularyMismatch        draft and target do not share a vocabulary
├── ProtocolMismatch          the peer speaks another protocol version
├── ModelUnavailable          model files are missing or damaged
└── ConfigurationError        a key, flag or combination of them is wrong

Knows no gRPC: `rpc/status.py` maps these to status codes, `gateway/errors.py` to HTTP.

Ray pickles errors between actors and unpickles them as `Class(*args)`, so every constructor hands
its own fields to `super().__init__` and builds the text in `__str__`.
"""

from __future__ import annotations

import reprlib

QUOTED_CHARACTERS = 100
"""Most characters of a caller's value that a message repeats."""


def quoted(value: object) -> str:
    """Return a value that a caller gave, for a message: as JSON has it, and never long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        if len(value) <= QUOTED_CHARACTERS:
            return repr(value)
        return f"{value[:QUOTED_CHARACTERS]!r}… ({len(value)} characters)"
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"{type(value).__name__} with too many digits to show"
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}…"


class SpecServeError(Exception):
    """Base of every error a caller or peer can cause."""


class InvalidRequest(SpecServeError):
    """A field of a request is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class ContextOverflow(InvalidRequest):
    """The prompt leaves no room for a single new token."""


class InvalidProposal(SpecServeError):
    """A proposal contradicts its own shapes or the session it names."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class SessionNotFound(SpecServeError):
    """The session is not held by this replica."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id

    def __str__(self) -> str:
        return f"session {self.session_id} is not held here; open it with keep_length 0"


class DeviceDied(SessionNotFound):
    """The session went with a device that died or hung while it computed it, maybe of it."""

    def __init__(self, session_id: str, num_computed: int) -> None:
        SpecServeError.__init__(self, session_id, num_computed)
        self.session_id = session_id
        self.num_computed = num_computed

    def __str__(self) -> str:
        return (
            f"the device died, or hangs, in a forward of session {self.session_id} "
            f"and {self.num_computed - 1} others"
        )


class CacheMismatch(SpecServeError):
    """The server holds fewer of the kept tokens than the caller assumed, or other ones."""

    def __init__(self, matching_length: int, keep_length: int) -> None:
        super().__init__(matching_length, keep_length)
        self.matching_length = matching_length
        self.keep_length = keep_length

    def __str__(self) -> str:
        return (
            f"kept content differs: {self.matching_length} tokens match, "
            f"keep_length {self.keep_length} was wanted"
        )


class StaleStep(SpecServeError):
    """An older epoch or step than the one already served."""

    def __init__(self, epoch: int, step: int, last_epoch: int, last_step: int) -> None:
        super().__init__(epoch, step, last_epoch, last_step)
        self.epoch = epoch
        self.step = step
        self.last_epoch = last_epoch
        self.last_step = last_step

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch} step {self.step} came after "
            f"epoch {self.last_epoch} step {self.last_step}"
        )


class CapacityExhausted(SpecServeError):
    """No KV blocks or no session slots are left."""

    def __init__(self, what: str, wanted: int, available: int) -> None:
        super().__init__(what, wanted, available)
        self.what = what
        self.wanted = wanted
        self.available = available

    def __str__(self) -> str:
        return f"{self.what}: {self.wanted} wanted, {self.available} available"


class Overloaded(SpecServeError):
    """A request was not admitted: others wait before it, and its time to wait is over."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what, retry_after_s)
        self.what = what
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.what


class Preempted(SpecServeError):
    """The session's KV blocks were given to another session; open it again later."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id

    def __str__(self) -> str:
        return f"session {self.session_id} was preempted; open it again later"


class DeadlineExpired(SpecServeError):
    """The caller's deadline passed before the answer was ready."""

    def __init__(self, what: str, deadline_s: float) -> None:
        super().__init__(what, deadline_s)
        self.what = what
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return f"{self.what} did not finish within {self.deadline_s:.3f} s"


class Draining(SpecServeError):
    """The replica is shutting down and opens no new sessions."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.replica_id = replica_id

    def __str__(self) -> str:
        return f"replica {self.replica_id} is draining and opens no new sessions"


class NonFiniteLogits(SpecServeError):
    """The model answered NaN, +inf, or no finite value at all, for one row of this request."""

    def __init__(self, session_id: str, row: int) -> None:
        super().__init__(session_id, row)
        self.session_id = session_id
        self.row = row

    def __str__(self) -> str:
        where = f"session {self.session_id}: row {self.row}"
        return f"{where} has no usable logits (NaN, +inf or empty)"


def no_token(session_id: str, row: int, mark: int) -> SpecServeError:
    """Return the error of a row that has no token to commit.

    Args:
        mark: what stands in the token's place: -1 for unusable logits, -2 for constraints.
    """
    if mark == -2:
        return InvalidRequest(
            "allowed_token_ids",
            "together with bad_words, min_tokens and a grammar it leaves no token to go on with; "
            "at least one was wanted",
        )
    return NonFiniteLogits(session_id, row)


class PoisonRequest(SpecServeError):
    """Devices die of this request; it is given up before it takes more of them."""

    def __init__(self, request_id: str, num_deaths: int) -> None:
        super().__init__(request_id, num_deaths)
        self.request_id = request_id
        self.num_deaths = num_deaths

    def __str__(self) -> str:
        return (
            f"request {self.request_id} was given up: {self.num_deaths} devices died or hung while "
            "they computed it, the last one while it computed nothing else"
        )


class PeerUnavailable(SpecServeError):
    """No replica of a pool answered in time."""

    def __init__(self, pool: str, message: str) -> None:
        super().__init__(pool, message)
        self.pool = pool
        self.message = message

    def __str__(self) -> str:
        return f"{self.pool}: {self.message}"


class VocabularyMismatch(SpecServeError):
    """Draft and target map some token id to different bytes."""

    def __init__(self, token_id: int, target_token: str, draft_token: str) -> None:
        super().__init__(token_id, target_token, draft_token)
        self.token_id = token_id
        self.target_token = target_token
        self.draft_token = draft_token

    def __str__(self) -> str:
        return (
            f"vocabularies differ, first at token id {self.token_id}: "
            f"target {self.target_token}, draft {self.draft_token}"
        )


class ModelMismatch(SpecServeError):
    """A target replica serves another model than the rest of its pool."""

    def __init__(self, replica_id: str, found: str, wanted: str) -> None:
        super().__init__(replica_id, found, wanted)
        self.replica_id = replica_id
        self.found = found
        self.wanted = wanted

    def __str__(self) -> str:
        return f"{self.replica_id} serves {self.found}; the pool serves {self.wanted}"


class ProtocolMismatch(SpecServeError):
    """The peer speaks a protocol version that this build does not."""

    def __init__(self, peer: str, theirs: int, ours: int) -> None:
        super().__init__(peer, theirs, ours)
        self.peer = peer
        self.theirs = theirs
        self.ours = ours

    def __str__(self) -> str:
        ours = f"{self.ours - 1} to {self.ours}"
        return f"{self.peer} speaks protocol {self.theirs}, this build speaks {ours}"


class ModelUnavailable(SpecServeError):
    """Model files are missing, damaged, or could not be fetched."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ConfigurationError(SpecServeError):
    """A key, flag, or combination of them is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
