"""Tree attention equals its twin, which equals the attention of the CPU engine."""

from dataclasses import replace

import pytest
import torch

from agentspec.engine.attention import Manner, strangers
from agentspec.engine.attention import attend as attend_dense
from agentspec.errors import KernelError
from agentspec.kernels.triton.batch import PagedCache
from agentspec.kernels.triton.blocks import Blocks
from agentspec.kernels.triton.kv_moves import append_reference
from agentspec.kernels.triton.tree_attention import attend, attend_reference, candidates, gathered
from bench.gpu_cases import CASES, LONG, TOLERANCE, Case, Filled, fill, random_tree

SMALL = Blocks(16, 16, 32)
"""Many parts, even of short contexts."""

QUICK = {"length 0", "length 31", "length 32", "length 33", "length 47", "window inside the tree", "float16, dim 96"}
MANY_PARTS = [
    pytest.param(case, marks=() if case.name in QUICK else pytest.mark.slow) for case in CASES if any(case.segments)
]
"""The interpreter takes its time for each part."""


def placed(case: Case, device: str) -> Filled:
    """A case whose rows' keys and values are in the cache."""
    made = fill(case, device)
    append_reference(made.k, made.v, made.cache, 1, made.batch)
    return made


def compare(case: Case, device: str, blocks: Blocks | None) -> None:
    """Kernel against twin; without blocks, as the wrapper launches it."""
    made = placed(case, device)
    scaling = 0.7 * case.dim**-0.5
    expected = attend_reference(made.q, made.cache, 1, made.batch, scaling, case.window, case.softcap)
    if blocks is None:
        got = attend(made.q, made.cache, 1, made.batch, scaling, case.window, case.softcap)
    else:
        from agentspec.kernels.triton.tree_attention_triton import launch

        got = launch(made.q, made.cache, 1, made.batch, scaling, case.window or 0, case.softcap or 0.0, blocks)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_equals_its_twin(case: Case, device: str) -> None:
    compare(case, device, None)


@pytest.mark.parametrize("case", MANY_PARTS, ids=lambda case: case.name)
def test_parts_are_joined_to_the_same(case: Case, device: str) -> None:
    compare(case, device, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, Blocks(32, 128, 4096)], ids=["default", "large"])
def test_long_contexts(blocks: Blocks | None, device: str) -> None:
    compare(LONG, device, blocks)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_twin_equals_the_engine(window: int | None, softcap: float | None) -> None:
    parents = random_tree(12, 4)
    made = placed(Case("", (parents,), (19,), 4, 2, window=window, softcap=softcap), "cpu")
    keys, values = (gathered(part[1], made.batch, 0).transpose(0, 1) for part in (made.cache.keys, made.cache.values))
    hidden = torch.cat([torch.zeros(12, 19, dtype=torch.bool), strangers(parents)], 1)
    if window is not None:
        place = torch.cat([torch.arange(19), 19 + made.batch.depth])
        hidden |= place <= (19 + made.batch.depth)[:, None] - window
    expected = attend_dense(made.q.transpose(0, 1), keys, values, hidden, Manner(0.2, window, softcap))
    got = attend_reference(made.q, made.cache, 1, made.batch, 0.2, window, softcap)
    torch.testing.assert_close(got, expected)


def test_a_sequence_attends_the_same_in_any_batch(device: str) -> None:
    """Parts begin at fixed positions, so that with the same blocks a row's bits do not depend on its company."""
    from agentspec.kernels.triton.tree_attention_triton import launch

    together = placed(Case("", (random_tree(3), random_tree(9), 2), (37, 70, 3)), device)
    whole = launch(together.q, together.cache, 1, together.batch, 0.1, 0, 0.0, SMALL)
    alone = fill(Case("", (random_tree(3),), (37,)), device).batch
    batch = replace(alone, table=together.batch.table[:1].contiguous())
    got = launch(together.q[:3], together.cache, 1, batch, 0.1, 0, 0.0, SMALL)
    assert torch.equal(got, whole[:3])


def test_candidates_are_blocks_that_the_kernel_can_run() -> None:
    for case in CASES:
        if not any(case.segments):
            continue
        made = fill(case, "cpu")
        group = case.heads // case.kv_heads
        for blocks in candidates(made.q, made.cache, made.batch):
            powers = (blocks.rows, blocks.columns, blocks.split)
            assert all(size & (size - 1) == 0 and size >= 16 for size in powers)
            assert blocks.rows >= group and blocks.split % blocks.columns == 0


def test_what_the_kernel_does_not_know_is_refused() -> None:
    made = fill(Case("", ((-1, 0),), (3,), 4, 2), "cpu")
    keys = made.cache.keys

    def refused(
        words: str, q: torch.Tensor = made.q, cache: PagedCache = made.cache, window: int = 1, cap: float = 1.0
    ) -> None:
        with pytest.raises(KernelError, match=words):
            attend(q, cache, 0, made.batch, 1.0, window, cap)

    refused("do not fit 2 rows", q=made.q[:1])
    refused("3 query heads cannot share 2", q=made.q[:, :3])
    refused("queries are torch.float16", q=made.q.half())
    refused("a window must be 1", window=0)
    refused("a soft cap must be above 0", cap=0.0)
    refused("features, got 48", q=made.q[..., :48], cache=PagedCache(keys[..., :48], keys[..., :48]))
    with pytest.raises(KernelError, match="power of two, got 12"):
        PagedCache(keys[:, :, :12], keys[:, :, :12])
    with pytest.raises(KernelError, match="no pages of one kind"):
        PagedCache(keys, keys[:1])
    with pytest.raises(KernelError, match=r"float64"):
        PagedCache(keys.double(), keys.double())
