import pytest
import torch

from agentspec.engine.attention import Manner, attend, attend_chunk, strangers


def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parent: list[int], scaling: float) -> torch.Tensor:
    """Node by node, head by head: softmax over the prefix, the ancestors and the node itself."""
    heads, rows, dim = q.shape
    cached = k.shape[1] - rows
    out = torch.zeros(rows, heads, dim)
    for node in range(rows):
        line, at = [], node
        while at >= 0:
            line.append(cached + at)
            at = parent[at]
        seen = [*range(cached), *reversed(line)]
        for head in range(heads):
            shared = head // (heads // k.shape[0])
            weights = torch.softmax(q[head, node] @ k[shared, seen].T * scaling, -1)
            out[node, head] = weights @ v[shared, seen]
    return out


@pytest.mark.parametrize("cached", [0, 1, 17])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3)])
@pytest.mark.parametrize("parent", [[-1], [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 1, 0, 3, 3, 1]])
def test_tree_attention_equals_its_slow_twin(cached: int, heads: tuple[int, int], parent: list[int]) -> None:
    rows, dim = len(parent), 8
    q = torch.randn(heads[0], rows, dim)
    k, v = torch.randn(heads[1], cached + rows, dim), torch.randn(heads[1], cached + rows, dim)
    hidden = torch.cat([torch.zeros(rows, cached, dtype=torch.bool), strangers(parent)], 1) if rows > 1 else None
    torch.testing.assert_close(attend(q, k, v, hidden, Manner(0.3)), slow(q, k, v, parent, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cached", [0, 5])
def test_a_chunk_is_a_chain(cached: int) -> None:
    rows = 70
    q, k, v = torch.randn(6, rows, 8), torch.randn(2, cached + rows, 8), torch.randn(2, cached + rows, 8)
    hidden = torch.ones(rows, cached + rows, dtype=torch.bool).triu(cached + 1)
    chain = attend(q, k, v, hidden, Manner(0.3))
    torch.testing.assert_close(attend_chunk(q, k, v, hidden, 0.3), chain, atol=1e-5, rtol=1e-5)
