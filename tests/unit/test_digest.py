"""Digests of token prefixes."""

import random
import struct
from hashlib import blake2b

import pytest

from specserve.speculation.digest import PIECE_NUM_TOKENS, TokenChain


def test_the_empty_prefix_has_digest_zero():
    """digest(0) is 0, with or without tokens behind it."""
    assert TokenChain().digest(0) == 0
    assert TokenChain([1, 2, 3]).digest(0) == 0


def test_known_answers():
    """Digests are part of the contract: peers of other versions compute the same."""
    chain = TokenChain(range(130))
    assert [chain.digest(n) for n in (1, 64, 65, 130)] == [
        11387576302567392334,
        3678511507499414395,
        6637595652011362918,
        15185778790084077710,
    ]


def test_the_chain_as_written():
    """BLAKE2b, 8 bytes, over the digest before and the piece's tokens as little-endian int32."""
    first = blake2b(struct.pack("<64i", *range(64)), digest_size=8).digest()
    tail = blake2b(first + struct.pack("<2i", 64, 65), digest_size=8).digest()
    assert TokenChain(range(66)).digest(66) == int.from_bytes(tail, "little")


def test_a_digest_depends_on_every_token_and_on_the_length():
    """Changing any token before n, or n, changes digest(n); tokens beyond n do not matter."""
    tokens = list(range(200))
    chain = TokenChain(tokens)
    digests = [chain.digest(n) for n in range(201)]
    assert len(set(digests)) == 201
    for changed in (0, 63, 64, 127, 150):
        other = TokenChain([*tokens[:changed], 9999, *tokens[changed + 1 :]])
        for n in (1, 63, 64, 65, 128, 151, 200):
            assert (other.digest(n) == digests[n]) == (n <= changed)


def test_appending_and_truncating_equal_building_anew():
    """After any history of appends, truncations and digests, digests equal those of a new chain."""
    rng = random.Random(0)
    chain, tokens = TokenChain(), []
    for _ in range(300):
        if rng.random() < 0.4:
            length = rng.randrange(len(tokens) + 1)
            chain.truncate(length)
            del tokens[length:]
        else:
            new = [rng.randrange(50_000) for _ in range(rng.randrange(100))]
            chain.append(new)
            tokens += new
        n = rng.randrange(len(tokens) + 1)
        assert chain.digest(n) == TokenChain(tokens[:n]).digest(n)
    assert chain.tokens == tokens
    assert len(chain) == len(tokens)
    assert chain.slice(3, 9) == tokens[3:9]


def test_piece_boundaries_do_not_confuse():
    """A tail's digest never equals the piece digest of other content of another length."""
    chain = TokenChain([7] * (3 * PIECE_NUM_TOKENS))
    assert len({chain.digest(n) for n in range(3 * PIECE_NUM_TOKENS + 1)}) == 193


def test_matching_length():
    """All agree, some missing, content differs."""
    chain = TokenChain(range(100))
    assert chain.matching_length(80, TokenChain(range(80)).digest(80)) == 80
    assert chain.matching_length(120, TokenChain(range(120)).digest(120)) == 100
    assert chain.matching_length(80, TokenChain([5, *range(1, 80)]).digest(80)) == 0
    assert chain.matching_length(0, 0) == 0


@pytest.mark.parametrize("length", [-1, 4])
def test_lengths_beyond_the_tokens_are_mistakes(length):
    """truncate and digest refuse what is not there."""
    chain = TokenChain([1, 2, 3])
    with pytest.raises(ValueError, match="3"):
        chain.truncate(length)
    with pytest.raises(ValueError, match="3"):
        chain.digest(length)
