"""The block pool, the prefix cache and block tables."""

import random

import pytest

from specserve.errors import CapacityExhausted
from specserve.model.kv_cache import BlockPool, BlockTable, block_key, root_key
from specserve.speculation.digest import TokenChain


def no_copy(source: int, destination: int) -> None:
    raise AssertionError("no block should be copied")


def filled(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table that holds `tokens`, all kept and published."""
    table = BlockTable(pool, salt)
    table.prepare_write(0, len(tokens), no_copy)
    table.publish(TokenChain(tokens), len(tokens))
    return table


def test_a_full_pool_refuses_and_a_released_block_comes_back():
    pool = BlockPool(2, 4)
    first, second = pool.allocate(), pool.allocate()
    with pytest.raises(CapacityExhausted):
        pool.allocate()
    pool.release(first)
    assert pool.allocate() == first
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_allocated, pool.num_freed) == (2, 3, 3)


def test_published_blocks_outlive_their_session_and_are_found_again():
    pool = BlockPool(8, 4)
    filled(pool, list(range(10))).truncate(0)
    assert pool.num_free == 8
    table = BlockTable(pool)
    assert table.match(0, list(range(10)), 9) == 8
    assert pool.num_used == 2


def test_B127_a_partial_block_is_never_published():
    """Blocks 'abcd|e' and 'abcd|f' share the first block only."""
    pool = BlockPool(8, 4)
    filled(pool, [1, 2, 3, 4, 5])
    assert BlockTable(pool).match(0, [1, 2, 3, 4, 6], 5) == 4
    assert BlockTable(pool).match(0, [1, 2, 3, 4, 5], 5) == 4


def test_matching_stops_at_its_limit_and_needs_a_block_boundary():
    pool = BlockPool(8, 4)
    filled(pool, list(range(8)))
    assert BlockTable(pool).match(0, list(range(8)), 7) == 4
    table = BlockTable(pool)
    table.prepare_write(0, 2, no_copy)
    assert table.match(2, [2, 3, 4, 5], 4) == 0


def test_keys_chain_parent_tokens_fingerprint_and_tenant():
    pool = BlockPool(8, 4, fingerprint="a")
    filled(pool, list(range(8)), salt=b"one")
    assert BlockTable(pool, b"two").match(0, list(range(8)), 8) == 0
    assert BlockTable(pool, b"one").match(0, list(range(8)), 8) == 8
    assert root_key("a", b"b") != root_key("ab", b"")
    assert block_key(b"p", [1, 2]) != block_key(b"q", [1, 2])


def test_idle_blocks_are_evicted_least_recently_used_children_first():
    pool = BlockPool(3, 4)
    filled(pool, list(range(8))).truncate(0)
    filled(pool, [9, 9, 9, 9]).truncate(0)
    pool.allocate()
    # The older sequence lost its tail, not its head.
    assert BlockTable(pool).match(0, list(range(8)), 8) == 4


def test_a_write_into_a_shared_block_copies_it():
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.prepare_write(0, 6, no_copy)
    fork = table.fork()
    assert fork.num_missing(6, 7) == 1
    copies: list[tuple[int, int]] = []
    fork.prepare_write(6, 7, lambda source, target: copies.append((source, target)))
    assert copies == [(table.blocks[1], fork.blocks[1])]
    assert fork.blocks[0] == table.blocks[0]
    table.prepare_write(6, 7, no_copy)
    fork.truncate(0)
    table.truncate(0)
    assert pool.num_free == 8


def test_a_write_into_a_published_block_leaves_the_published_content_alone():
    pool = BlockPool(8, 4)
    table = filled(pool, [1, 2, 3, 4])
    shared = table.blocks[0]
    table.truncate(3)
    table.prepare_write(3, 4, lambda *_: None)
    assert table.blocks[0] != shared
    assert BlockTable(pool).match(0, [1, 2, 3, 4], 4) == 4


def test_a_full_pool_unpublishes_rather_than_copies():
    pool = BlockPool(1, 4)
    table = filled(pool, [1, 2, 3, 4])
    table.truncate(3)
    assert table.num_missing(3, 4) == 0
    table.prepare_write(3, 4, no_copy)
    assert BlockTable(pool).match(0, [1, 2, 3, 4], 4) == 0


def test_without_prefix_caching_nothing_is_published():
    pool = BlockPool(4, 4, enable_prefix_caching=False)
    filled(pool, [1, 2, 3, 4])
    assert BlockTable(pool).match(0, [1, 2, 3, 4], 4) == 0


@pytest.mark.parametrize("seed", range(5))
def test_B079_allocated_minus_freed_is_what_the_tables_hold_after_every_operation(seed):
    rng = random.Random(seed)
    pool = BlockPool(24, 4)
    tables: list[tuple[BlockTable, TokenChain]] = []
    for _ in range(600):
        choice = rng.random()
        if choice < 0.25 or not tables:
            table, chain = BlockTable(pool), TokenChain()
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            chain.append(prompt[: table.match(0, prompt, len(prompt))])
            tables.append((table, chain))
        table, chain = rng.choice(tables)
        if choice < 0.6:
            end = len(chain) + rng.randrange(1, 6)
            if table.num_missing(len(chain), end) <= pool.num_free:
                table.prepare_write(len(chain), end, lambda *_: None)
                chain.append([rng.randrange(2) for _ in range(end - len(chain))])
                table.publish(chain, rng.randrange(len(chain) + 1))
        elif choice < 0.8:
            length = rng.randrange(len(chain) + 1)
            chain.truncate(length)
            table.truncate(length)
        elif choice < 0.9:
            tables.append((table.fork(), TokenChain(chain.tokens)))
        else:
            table.truncate(0)
            tables = [entry for entry in tables if entry[0] is not table]
        held = [block for table, _ in tables for block in table.blocks]
        assert all(len(t.blocks) == -(-len(c) // 4) for t, c in tables)
        assert pool.num_allocated - pool.num_freed == pool.num_used == len(set(held))
        assert all(pool.references(block) == held.count(block) for block in range(24))
