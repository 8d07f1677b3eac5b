"""Which replica a session goes to: where its prompt's beginning is cached, within a bound on load.

Rendezvous hashing (Thaler and Ravishankar, 1998) names a home for every prefix, the same one for
all orchestrators: a replica that goes moves its own prefixes and no other. Loads are bounded as in
consistent hashing with bounded loads (Mirrokni et al., arXiv:1608.01350): a home that is too full
gives way to the next in the prefix's order. Pure: knows numbers and bytes, no link and no clock.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PREFIX_BLOCKS = 4
"""Whole KV blocks of a prompt that its home follows from. More would part the turns of a chat, and
prompts with one system message; fewer would send all that begin alike to one replica."""

BOUND = 1.25
"""A home takes a session while its burden is at most so many times the mean, ..."""

SLACK = 2.0
"""... plus this: two sessions side by side are worth a prefill saved."""

TIE = 0.5
"""Burdens that differ by less are equal: a few KV blocks are no session."""

LEAST_FREE_SHARE = 0.05
"""A replica with less of its KV pool free than this weighs as though it had so much."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a session asks of a replica."""

    prefix_key: bytes
    """Of `prefix_key`; empty for a prompt without a whole block."""
    session_id: str
    """Breaks ties, so that orchestrators that see the same loads part."""
    num_tokens: int
    """Tokens whose KV it needs at once: what is committed, and a token to come."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take a session, as one orchestrator knows it."""

    address: str
    num_sessions: float
    """Sessions, those included that its last report cannot know of, and a little for each call that
    waits."""
    free_share: float
    """Of its KV blocks, those that nobody holds, in [0, 1]; 1 without a pool."""
    has_room: bool
    """Whether the session fits its free blocks."""

    @property
    def burden(self) -> float:
        """Sessions after this one, each weighing more the less KV is left."""
        return (self.num_sessions + 1) / max(self.free_share, LEAST_FREE_SHARE)


def prefix_key(token_ids: Sequence[int], block_size: int, tenant_salt: bytes) -> bytes:
    """Return the key of a prompt's first whole KV blocks; empty where there is none.

    Args:
        block_size: tokens per KV block; 0 where the replicas have no blocks.
        tenant_salt: tenants share no cache, so they share no key.
    """
    num_blocks = min(MAX_PREFIX_BLOCKS, len(token_ids) // block_size) if block_size else 0
    if num_blocks == 0:
        return b""
    head = array("i", token_ids[: num_blocks * block_size]).tobytes()
    salt = hashlib.blake2b(tenant_salt, digest_size=16).digest()
    return hashlib.blake2b(head, digest_size=16, key=salt).digest()


def choose(
    candidates: Sequence[Candidate], demand: Demand, *, is_known: bool, must_fit: bool = False
) -> str | None:
    """Choose a replica's address.

    The first one in the prefix's order that keeps the bound. A prefix that is not known yet, and a
    prompt without one, stand to gain nothing: for them the bound is the least burden. A replica
    without room is chosen only where none has any.

    Args:
        is_known: the prefix was seen before, so that its home may hold it.
        must_fit: choose none rather than one without room.
    """
    fitting = [candidate for candidate in candidates if candidate.has_room]
    if not fitting:
        if must_fit or not candidates:
            return None
        fitting = list(candidates)
    seed = demand.prefix_key or demand.session_id.encode()
    limit = min(item.burden for item in fitting) + TIE
    if is_known and demand.prefix_key:
        limit = BOUND * sum(item.burden for item in fitting) / len(fitting) + SLACK
    within = (item for item in fitting if item.burden <= limit)
    return max(within, key=lambda item: _weight(seed, item.address)).address


def _weight(seed: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), digest_size=8, key=seed[-64:]).digest()
