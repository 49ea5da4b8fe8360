"""Choices and walks on the device equal their twins, which equal the engine's."""

import random

import numpy as np
import pytest
import torch

from agentspec.engine.sampling import allowed, keyed_uniform
from agentspec.engine.sampling import choose as choose_on_cpu
from agentspec.engine.verify import walk as walk_on_cpu
from agentspec.errors import KernelError
from agentspec.kernels.triton.batch import TreeBatch, tree_batch
from agentspec.kernels.triton.tree_walk import HEAD, choose, choose_reference, walk, walk_reference
from agentspec.types import DraftTree, SamplingParams
from bench.gpu_cases import chain, random_tree, star, tokens_for


@pytest.mark.parametrize(("vocabulary", "dtype"), [
    *((vocabulary, torch.float32) for vocabulary in (1, 2, 33, 4095, 4096, 4097, 9000)),
    (4097, torch.float16),
    (33, torch.bfloat16),
])  # fmt: skip
def test_choices_equal_their_twins(vocabulary: int, dtype: torch.dtype, device: str) -> None:
    noise = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary, generator=noise).mul(3).round().to(device, dtype)
    assert torch.equal(choose(logits), choose_reference(logits))
    weights = logits.float().softmax(-1)
    weights[torch.rand(weights.shape, generator=noise).to(device) < 0.5] = 0
    weights[:, vocabulary // 2] = 0.25
    uniform = torch.tensor([-1.0, 0.0, 0.3, 0.7, 1 - 2**-53, -1.0], dtype=torch.float64, device=device)
    chosen = choose(weights, uniform)
    assert torch.equal(chosen, choose_reference(weights, uniform))
    assert (weights[torch.arange(6), chosen.long()] > 0).all()


def test_equal_scores_and_rows_without_any(device: str) -> None:
    scores = torch.zeros(3, 5000, device=device)
    scores[1, [4999, 4500, 700]] = 2
    scores[2] = -torch.inf
    assert choose(scores).tolist() == [0, 700, 0]


def test_a_uniform_falls_on_the_token_whose_share_it_lies_in(device: str) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]], device=device)
    drawn = [
        choose(weights, torch.tensor([share], dtype=torch.float64, device=device)).item()
        for share in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999)
    ]
    assert drawn == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("params", [
    SamplingParams(1.0, seed=3),
    SamplingParams(0.7, top_p=0.9, seed=4),
    SamplingParams(1.3, top_k=5, min_p=0.1, seed=5),
])  # fmt: skip
def test_draws_equal_the_engine(params: SamplingParams, device: str) -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    weights = torch.zeros(8, 300, dtype=torch.float64)
    for row in range(8):
        tokens, shares = allowed(logits[row], params)
        weights[row, tokens] = torch.from_numpy(shares)
    uniform = torch.tensor([keyed_uniform(params.seed, position) for position in range(8)], dtype=torch.float64)
    drawn = choose(weights.to(device), uniform.to(device)).tolist()
    assert drawn == [choose_on_cpu(logits[row], params, row) for row in range(8)]


def random_walks(seed: int, device: str) -> tuple[list[tuple[int, ...] | int], TreeBatch, torch.Tensor, torch.Tensor]:
    """Trees and chunks with tokens, and choices that often follow them."""
    dice = random.Random(seed)
    segments: list[tuple[int, ...] | int] = [
        random_tree(dice.randint(1, 60), seed), random_tree(256, seed), chain(1), chain(40), chain(256), star(20),
        5, 0, 300,
    ]  # fmt: skip
    dice.shuffle(segments)
    batch = tree_batch(segments, [0] * len(segments), torch.zeros(len(segments), 1), device)
    token, choice = [], []
    for part in segments:
        parents = chain(part) if isinstance(part, int) else part
        tokens = tokens_for(parents, dice, 64)
        token += tokens
        if isinstance(part, int):
            choice += [dice.randrange(64)] * min(part, 1)
            continue
        for node in range(len(parents)):
            below = [tokens[child] for child, parent in enumerate(parents) if parent == node]
            choice.append(dice.choice(below) if below and dice.random() < 0.97 else dice.randrange(64))
    put = {"dtype": torch.int32, "device": device}
    return segments, batch, torch.tensor(choice, **put), torch.tensor(token, **put)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_walks_equal_their_twins(seed: int, device: str) -> None:
    _, batch, choice, token = random_walks(seed, device)
    assert torch.equal(walk(choice, token, batch), walk_reference(choice, token, batch))


@pytest.mark.parametrize("seed", range(4))
def test_the_twin_walks_as_the_engine_does(seed: int) -> None:
    segments, batch, choice, token = random_walks(seed, "cpu")
    outcome = walk_reference(choice, token, batch).tolist()
    for sequence, part in enumerate(segments):
        count, bonus, *path = outcome[sequence]
        own = choice[int(batch.first_scored[sequence]) :].tolist()
        if isinstance(part, int):
            assert count == part and bonus == (own[0] if part else -1)
            continue
        first = int(batch.start[sequence])
        zeros = (0.0,) * len(part)
        depths = tuple(batch.depth[first : first + len(part)].tolist())
        tree = DraftTree(tuple(token[first : first + len(part)].tolist()), part, depths, zeros, zeros, (0,) * len(part))
        expected = walk_on_cpu(tree, lambda node, depth, own=own: own[node])  # type: ignore[misc]
        assert (tuple(path[:count]), bonus) == (expected.path, expected.tokens[-1])
        assert set(path[count:]) <= {-1}


def test_an_empty_batch_and_numbers_that_disagree() -> None:
    batch = tree_batch([], [], torch.zeros(0, 1))
    nothing = torch.empty(0, dtype=torch.int32)
    assert walk(nothing, nothing, batch).shape == (0, HEAD)
    assert choose(torch.empty(0, 7)).shape == (0,)
    with pytest.raises(KernelError, match="1 choices and 0 tokens for 0 and 0"):
        walk(torch.zeros(1, dtype=torch.int32), nothing, batch)
    with pytest.raises(KernelError, match="uniforms must be 2 float64"):
        choose(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(KernelError, match="ids side by side"):
        choose(torch.from_numpy(np.zeros((3, 2), np.float32)).T)
