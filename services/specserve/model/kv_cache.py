"""The paged KV pool's bookkeeping: which block belongs to whom. Knows lengths and token ids.

Knows no tensor: the content of a block lives in the runner. A block is in exactly one of three
states: *free* (nobody's, content worthless), *idle* (nobody's, but published in the prefix cache),
or *used* (reference count > 0; published or not).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from specserve.errors import CapacityExhausted
from specserve.speculation.digest import TokenChain

CopyBlock = Callable[[int, int], None]
"""(source, destination): copy one block's content, all layers."""


def root_key(fingerprint: str, tenant_salt: bytes) -> bytes:
    """Return the parent key of a sequence's first block.

    Every part is length-prefixed, so that no (fingerprint, salt) pair can spell another one.
    """
    name = fingerprint.encode()
    return hashlib.sha256(
        len(name).to_bytes(8, "little")
        + name
        + len(tenant_salt).to_bytes(8, "little")
        + tenant_salt
    ).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the prefix-cache key of a full block: SHA-256 of its parent's key and its tokens."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """A fixed number of KV blocks: free list, reference counts, prefix cache with LRU."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        fingerprint: str = "",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.fingerprint = fingerprint
        self.enable_prefix_caching = enable_prefix_caching
        self.num_allocated = 0
        """Blocks handed out since the start (a prefix hit on an idle block counts)."""
        self.num_freed = 0
        """Blocks given back since the start; num_allocated - num_freed are in use."""
        self._free: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that some session refers to."""
        return self.num_blocks - self.num_free

    def references(self, block: int) -> int:
        """Return how many block tables hold this block."""
        return self._references[block]

    def is_published(self, block: int) -> bool:
        """Tell whether the prefix cache may hand this block to others."""
        return self._key_of[block] is not None

    def allocate(self) -> int:
        """Take a block; an idle one loses its published content, least recently used first.

        Raises:
            CapacityExhausted: every block is used.
        """
        if self._free:
            block = self._free.popleft()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self.unpublish(block)
        else:
            raise CapacityExhausted("KV blocks", 1, 0)
        self._references[block] = 1
        self.num_allocated += 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a used or idle block."""
        if self._references[block] == 0:
            del self._idle[block]
            self.num_allocated += 1
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block idle (published) or free."""
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        self.num_freed += 1
        if self._key_of[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Offer a full block's content to other sessions; the first block with a key wins."""
        if self._key_of[block] is None and key not in self._published:
            self._key_of[block] = key
            self._published[key] = block

    def unpublish(self, block: int) -> None:
        """Take a block out of the prefix cache."""
        key = self._key_of[block]
        if key is not None:
            del self._published[key]
            self._key_of[block] = None

    def find(self, key: bytes) -> int | None:
        """Return the published block with this key, if any."""
        return self._published.get(key)


class BlockTable:
    """One session's blocks, in order. Token t lies in blocks[t // block_size]."""

    def __init__(self, pool: BlockPool, tenant_salt: bytes = b"") -> None:
        self._pool = pool
        self._root = root_key(pool.fingerprint, tenant_salt)
        self._keys: list[bytes] = []
        self.blocks: list[int] = []
        """Block ids; the runner reads this list."""

    def num_missing(self, start: int, end: int) -> int:
        """Return how many blocks writing tokens start..end-1 must take from the pool."""
        size = self._pool.block_size
        missing = max(0, -(-end // size) - len(self.blocks))
        for block in self.blocks[start // size :]:
            # A block that is only published can be unpublished instead of copied.
            missing += self._pool.references(block) > 1
        return missing

    def prepare_write(self, start: int, end: int, copy_block: CopyBlock) -> None:
        """Own every block under tokens start..end-1 alone: allocate, or copy on write.

        `start` is the number of tokens held: writes go to the end, after `truncate`.

        Raises:
            CapacityExhausted: the pool has fewer than `num_missing(start, end)` blocks.
        """
        pool, size = self._pool, self._pool.block_size
        kept = len(self.blocks)
        while len(self.blocks) * size < end:
            self.blocks.append(pool.allocate())
        for index in range(start // size, kept):
            block = self.blocks[index]
            if pool.references(block) == 1:
                if not pool.is_published(block):
                    continue
                if pool.num_free == 0:
                    pool.unpublish(block)
                    continue
            own = pool.allocate()
            copy_block(block, own)
            self.blocks[index] = own
            pool.release(block)

    def truncate(self, length: int) -> None:
        """Give back the blocks beyond `length` tokens, last first (parents outlive children)."""
        size = self._pool.block_size
        while len(self.blocks) * size >= length + size:
            self._pool.release(self.blocks.pop())
        del self._keys[length // size :]

    def publish(self, chain: TokenChain, kept_length: int) -> None:
        """Publish the full blocks within the first `kept_length` tokens of the cached ones.

        Only *kept* (committed) tokens may be covered: others would fill the cache with content
        that no session will ever ask for.
        """
        if not self._pool.enable_prefix_caching:
            return
        size = self._pool.block_size
        for index in range(len(self._keys), kept_length // size):
            key = self._key(index, chain.slice(index * size, (index + 1) * size))
            self._pool.publish(self.blocks[index], key)
            self._keys.append(key)

    def match(self, start: int, token_ids: Sequence[int], limit: int) -> int:
        """Take over published blocks for the tokens that follow token `start`.

        Args:
            start: tokens held now; matching needs it on a block boundary.
            token_ids: the tokens to come after `start`.
            limit: match at most this many of them.

        Returns:
            Tokens whose KV is now held without computing it: a multiple of the block size.
        """
        size = self._pool.block_size
        if not self._pool.enable_prefix_caching or start != len(self._keys) * size:
            return 0
        matched = 0
        while matched + size <= limit:
            key = self._key(len(self._keys), token_ids[matched : matched + size])
            block = self._pool.find(key)
            if block is None:
                break
            self._pool.retain(block)
            self.blocks.append(block)
            self._keys.append(key)
            matched += size
        return matched

    def replace_tail(self, length: int, blocks: Sequence[int]) -> None:
        """Give back the blocks beyond the last full one within `length` tokens; take these instead.

        Args:
            blocks: owned by the caller until now; the first holds what the block it replaces held
                of these tokens.
        """
        first = length // self._pool.block_size
        while len(self.blocks) > first:
            self._pool.release(self.blocks.pop())
        del self._keys[first:]
        self.blocks.extend(blocks)

    def fork(self) -> BlockTable:
        """Return a second table over the same blocks; either copies before it writes."""
        other = BlockTable(self._pool)
        other._root, other._keys = self._root, list(self._keys)
        other.blocks = list(self.blocks)
        for block in other.blocks:
            self._pool.retain(block)
        return other

    def _key(self, index: int, token_ids: Sequence[int]) -> bytes:
        return block_key(self._keys[index - 1] if index else self._root, token_ids)
