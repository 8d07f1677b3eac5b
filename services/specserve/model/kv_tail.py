"""Blocks of a branch: what follows a session's first tokens on a path that may never be taken.

A tail shares the full blocks below its start with the session's own table and counts no reference
to them: it lives only while the table keeps these tokens. The block that the start falls into is
copied once. Knows lengths and blocks; knows no token and no tensor.
"""

from __future__ import annotations

from specserve.model.kv_cache import BlockPool, BlockTable, CopyBlock


class LentBlocks:
    """How many of a pool's blocks all tails together own, and may own."""

    def __init__(self, pool: BlockPool, limit: int) -> None:
        self.pool = pool
        self.count = 0
        """Blocks owned by tails now."""
        self._limit = limit

    def can_lend(self, num_blocks: int) -> bool:
        """Tell whether a tail may take so many more."""
        return num_blocks <= min(self.pool.num_free, self._limit - self.count)


class BlockTail:
    """Blocks from token `start` on, owned alone."""

    def __init__(self, lent: LentBlocks, table: BlockTable, start: int) -> None:
        """Take nothing yet.

        Args:
            lent: where the blocks come from.
            table: the session's; it must keep `start` tokens for as long as the tail is used.
            start: tokens of the session that the branch stands on.
        """
        self._lent = lent
        self._pool = lent.pool
        self._table = table
        self._start = start
        self._own: list[int] = []

    @property
    def blocks(self) -> list[int]:
        """Block ids from token 0 on, as a runner reads them."""
        return self._table.blocks[: self._start // self._pool.block_size] + self._own

    @property
    def num_blocks(self) -> int:
        """Blocks owned."""
        return len(self._own)

    def num_missing(self, end: int) -> int:
        """Return how many blocks tokens start..end-1 must take from the pool."""
        size = self._pool.block_size
        return max(0, -(-end // size) - self._start // size - len(self._own))

    def extend(self, end: int, copy_block: CopyBlock) -> None:
        """Own every block under tokens start..end-1.

        Raises:
            CapacityExhausted: the pool has fewer than `num_missing(end)` blocks.
        """
        for _ in range(self.num_missing(end)):
            block = self._pool.allocate()
            if not self._own and self._start % self._pool.block_size:
                copy_block(self._table.blocks[self._start // self._pool.block_size], block)
            self._own.append(block)
            self._lent.count += 1

    def release(self) -> None:
        """Give all blocks back. Idempotent."""
        self._lent.count -= len(self._own)
        while self._own:
            self._pool.release(self._own.pop())

    def hand_over(self) -> None:
        """Put the blocks into the session's table, in place of its own from `start` on."""
        self._table.replace_tail(self._start, self._own)
        self._lent.count -= len(self._own)
        self._own = []
