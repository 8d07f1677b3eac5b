"""What a step must read, and the reading of it."""

import pytest
from torch import nn

from specserve.tools.bench.reading import MemoryReader, bytes_of_a_step


class _Model(nn.Module):
    """An embedding of 10 x 4, a head of as many weights, 4 x 4 between them; float32."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_the_head_but_not_an_embedding_of_its_own(is_tied):
    """56 weights either way: a step looks up single rows of an embedding that is no head."""
    assert bytes_of_a_step(_Model(is_tied=is_tied)) == 4 * (16 + 40)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_part_is_read(num_threads):
    """One number anywhere that is larger than the others is found."""
    reader = MemoryReader(8 * 1000, num_threads)
    assert reader.read() == 1
    assert sum(part.nbytes for part in reader._parts) == 8 * 1000
    for part in reader._parts:
        part[-1] = 7
        assert reader.read() == 7
        part[-1] = 1
