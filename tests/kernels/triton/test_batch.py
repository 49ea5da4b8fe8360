"""A batch describes its trees; what is no tree is refused."""

import pytest
import torch

from agentspec.errors import KernelError
from agentspec.kernels.triton.batch import MOST_NODES, tree_batch
from bench.gpu_cases import chain

TABLE = torch.zeros(2, 1)


def test_trees_and_chunks_side_by_side() -> None:
    batch = tree_batch([(-1, 0, 0, 2), 3], [5, 7], TABLE)
    assert batch.start.tolist() == [0, 4, 7]
    assert batch.owner.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.parent.tolist() == [-1, 0, 0, 2, -1, 0, 1]
    assert batch.depth.tolist() == [0, 1, 1, 2, 0, 1, 2]
    assert batch.ancestors[:, 0].tolist() == [0b1, 0b11, 0b101, 0b1101, 0, 0, 0]
    assert batch.chunk.tolist() == [0, 1]
    assert batch.scored.tolist() == [0, 1, 2, 3, 6]
    assert batch.first_scored.tolist() == [0, 4]
    assert (batch.most_rows, batch.most_positions, batch.rows, batch.sequences) == (4, 10, 7, 2)


def test_the_last_bit_of_a_word_and_the_last_node() -> None:
    batch = tree_batch([chain(MOST_NODES), 1], [0, 0], TABLE)
    assert batch.ancestors.shape == (MOST_NODES + 1, 8)
    assert batch.ancestors[31].tolist() == [-1, 0, 0, 0, 0, 0, 0, 0]
    assert batch.ancestors[255].tolist() == [-1] * 8


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, -1), (-1, 2, 0)])
def test_what_is_no_tree(parents: tuple[int, ...]) -> None:
    with pytest.raises(KernelError, match="of a tree hangs below"):
        tree_batch([parents], [0], TABLE[:1])


def test_too_many_nodes_and_numbers_that_disagree() -> None:
    with pytest.raises(KernelError, match="256 nodes, got 257"):
        tree_batch([chain(257)], [0], TABLE[:1])
    with pytest.raises(KernelError, match="1 segments, 2 lengths and 2 rows"):
        tree_batch([3], [0, 0], TABLE)
