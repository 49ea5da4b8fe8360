"""Keys and values arrive in their slots, and those of accepted nodes are moved there."""

import random

import pytest
import torch

from agentspec.errors import KernelError
from agentspec.kernels.triton.kv_moves import append, append_reference, compact, compact_reference
from agentspec.kernels.triton.tree_attention import gathered
from bench.gpu_cases import CASES, Case, chain, fill, random_tree, star, twin_cache


def paths_outcome(paths: list[list[int]], device: str) -> torch.Tensor:
    """An outcome of the walk with these paths."""
    width = max(map(len, paths))
    rows = [[len(path), 7, *path, *[-1] * (width - len(path))] for path in paths]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def random_path(parents: tuple[int, ...], dice: random.Random) -> list[int]:
    """The line of a random node."""
    path = [dice.randrange(len(parents))]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_append_equals_its_twin(case: Case, device: str) -> None:
    made = fill(case, device)
    twin = twin_cache(made.cache)
    append(made.k, made.v, made.cache, 1, made.batch)
    append_reference(made.k, made.v, twin, 1, made.batch)
    for mine, its in ((made.cache.keys, twin.keys), (made.cache.values, twin.values)):
        assert torch.equal(mine.nan_to_num(9), its.nan_to_num(9))


def test_rows_that_pad_a_batch_are_not_written(device: str) -> None:
    made = fill(Case("", (chain(3),), (4,)), device)
    made.batch.owner[2] = -1
    append(made.k, made.v, made.cache, 0, made.batch)
    written = gathered(made.cache.keys[0], made.batch, 0)
    assert torch.equal(written[4:6], made.k[:2]) and written[6].isnan().all()


@pytest.mark.parametrize(
    "parents", [chain(1), chain(20), star(12), random_tree(30), random_tree(256, 5)],
    ids=["one", "chain", "star", "tree", "256"],
)  # fmt: skip
@pytest.mark.parametrize(("page", "seed"), [(1, 0), (4, 1)])
def test_compaction_equals_its_twin(parents: tuple[int, ...], page: int, seed: int, device: str) -> None:
    """Long paths overlap with the slots that they are moved to."""
    case = Case("", (parents, 3, parents[:20]), (11, 2, 0), 1, 1, 96, page)
    made = fill(case, device, seed)
    for layer in range(2):
        append(made.k, made.v, made.cache, layer, made.batch)
    dice = random.Random(seed)
    paths = [random_path(parents, dice), [0, 1, 2], random_path(parents[:20], dice)]
    outcome = paths_outcome(paths, device)
    twin = twin_cache(made.cache)
    compact(made.cache, made.batch, outcome)
    compact_reference(twin, made.batch, outcome)
    for mine, its in ((made.cache.keys, twin.keys), (made.cache.values, twin.values)):
        assert torch.equal(mine.nan_to_num(9), its.nan_to_num(9))
    for layer in range(2):
        kept = gathered(made.cache.values[layer], made.batch, 0)[11 : 11 + len(paths[0])]
        assert torch.equal(kept, made.v[paths[0]])


def test_what_does_not_fit_is_refused() -> None:
    made = fill(Case("", (chain(3),), (4,)), "cpu")
    with pytest.raises(KernelError, match=r"must be \(3, 1, 64\)"):
        append(made.k[:2], made.v[:2], made.cache, 0, made.batch)
    with pytest.raises(KernelError, match="2 sequences for a batch of 1"):
        compact(made.cache, made.batch, paths_outcome([[0], [0]], "cpu"))
