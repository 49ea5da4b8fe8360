"""A small random decoder on the kernels of the GPU worker, and its greedy or seeded decoding with drafts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from agentspec.engine.sampling import keyed_uniform
from agentspec.kernels.triton.batch import PagedCache, TreeBatch, tree_batch
from agentspec.kernels.triton.blocks import BlockTable
from agentspec.kernels.triton.kv_moves import append, compact
from agentspec.kernels.triton.top_k import top_k
from agentspec.kernels.triton.tree_attention import attend
from agentspec.kernels.triton.tree_walk import choose, walk
from bench.gpu_cases import tokens_for

PAGE = 16

Drafter = Callable[[Sequence[int]], tuple[tuple[int, ...], list[int]]]
"""From a sequence's tokens to the parents and tokens of a tree below its last one."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder."""

    layers: int = 4
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 4
    dim: int = 128
    inner: int = 6144
    vocabulary: int = 32768


TINY = Sizes(1, 64, 2, 1, 64, 64, 96)


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.sizes, self.index = sizes, index
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.dim, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.dim, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.hidden, 2 * sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], batch: TreeBatch, cache: PagedCache, table: BlockTable | None
    ) -> Tensor:
        heads, kv_heads, dim = self.sizes.heads, self.sizes.kv_heads, self.sizes.dim
        rows = self.qkv(rms_norm(x, x.shape[-1:])).view(len(x), -1, dim)
        q, k, v = rows.split([heads, kv_heads, kv_heads], 1)
        append(rotated(k, angles), v, cache, self.index, batch)
        mixed = attend(rotated(q, angles), cache, self.index, batch, dim**-0.5, table=table)
        x = x + self.out(mixed.flatten(1))
        gate, up = self.up(rms_norm(x, x.shape[-1:])).chunk(2, -1)
        deeper: Tensor = x + self.down(silu(gate) * up)
        return deeper


class Decoder(nn.Module):
    """Random weights; positions by rotation."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, index) for index in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, token: Tensor, batch: TreeBatch, cache: PagedCache, table: BlockTable | None = None) -> Tensor:
        """(choices, vocabulary) float32 logits of the batch's scored rows."""
        x = self.embedding(token)
        position = (batch.length[batch.owner] + batch.depth).float()
        half = self.sizes.dim // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        turn = position[:, None, None] * rates
        angles = (turn.cos().to(x.dtype), turn.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, angles, batch, cache, table)
        x = x[batch.scored]
        logits: Tensor = self.head(rms_norm(x, x.shape[-1:])).float()
        return logits


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x: (rows, heads, dim), turned by its rows' angles."""
    cos, sin = angles
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def make_decoder(sizes: Sizes, device: str, dtype: torch.dtype) -> Decoder:
    """The same random decoder at every call."""
    torch.manual_seed(11)
    return Decoder(sizes).to(device, dtype).requires_grad_(False)


def empty_cache(
    sizes: Sizes, sequences: int, positions: int, device: str, dtype: torch.dtype
) -> tuple[PagedCache, Tensor]:
    """Pages full of NaN, and a block table in which the sequences' pages alternate."""
    pages = -(-positions // PAGE)
    shape = (sizes.layers, sequences * pages, PAGE, sizes.kv_heads, sizes.dim)
    cache = PagedCache(*(torch.full(shape, torch.nan, device=device, dtype=dtype) for _ in range(2)))
    table = torch.arange(sequences * pages, dtype=torch.int32).view(pages, sequences).T.contiguous()
    return cache, table


@dataclass(slots=True)
class Decoded:
    """What a run generated."""

    sequences: list[list[int]]
    """Tokens, each prompt's included."""

    steps: int
    smallest_gap: float
    """Between the two highest log-probabilities at any choice that was made."""


def chosen(logits: Tensor, batch: TreeBatch, seed: int | None) -> Tensor:
    """Choices: the highest logit's token, or draws with a uniform keyed by the seed and the position."""
    if seed is None:
        return choose(logits)
    positions = (batch.length[batch.owner] + batch.depth)[batch.scored].tolist()
    uniform = torch.tensor([keyed_uniform(seed, place + 1) for place in positions], dtype=torch.float64)
    return choose(logits.double().softmax(-1), uniform.to(logits.device))


@torch.inference_mode()
def decode(
    model: Decoder, prompts: Sequence[Sequence[int]], count: int, draft: Drafter, device: str, seed: int | None = None
) -> Decoded:
    """`count` tokens after each prompt, all sequences in one batch; trees of `draft` are verified at each step."""
    longest = max(map(len, prompts)) + count + 512
    cache, table = empty_cache(model.sizes, len(prompts), longest, device, torch.float32)
    made = Decoded([list(prompt) for prompt in prompts], 0, float("inf"))
    cached = [0] * len(prompts)
    segments: list[tuple[int, ...] | int] = [len(prompt) for prompt in prompts]
    tokens = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + count for prompt in prompts]
    while True:
        batch = tree_batch(segments, cached, table, device)
        token = torch.tensor([one for part in tokens for one in part], dtype=torch.int32, device=device)
        logits = model(token, batch, cache)
        outcome = walk(chosen(logits, batch, seed), token, batch)
        compact(cache, batch, outcome)
        made.smallest_gap = min(
            made.smallest_gap, float(top_k(logits, 2)[0].diff().abs().min()) if len(logits) else 1.0
        )
        for sequence, (visited, bonus, *path) in enumerate(outcome.tolist()):
            if visited == 0:
                continue
            if not isinstance(segments[sequence], int):
                made.sequences[sequence] += [tokens[sequence][node] for node in path[1:visited]]
            made.sequences[sequence].append(bonus)
            cached[sequence] += visited
        made.steps += 1
        done = [len(whole) >= end for whole, end in zip(made.sequences, ends, strict=True)]
        if all(done):
            made.sequences = [whole[:end] for whole, end in zip(made.sequences, ends, strict=True)]
            return made
        trees = [((), []) if over else draft(whole) for whole, over in zip(made.sequences, done, strict=True)]
        segments, tokens = [tree[0] or 0 for tree in trees], [tree[1] for tree in trees]


def no_draft(tokens: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """The root alone: plain decoding."""
    return (-1,), [tokens[-1]]


def wrong_draft(vocabulary: int, nodes: int) -> Drafter:
    """Trees of random tokens."""

    def draft(tokens: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        dice = random.Random(len(tokens))
        parents = (-1, *(dice.randrange(node) for node in range(1, nodes)))
        return parents, [tokens[-1], *tokens_for(parents, dice, vocabulary)[1:]]

    return draft


def right_draft(answers: Sequence[Sequence[int]], ahead: int, vocabulary: int) -> Drafter:
    """What plain decoding gave, `ahead` tokens far, each behind a sibling that is wrong: paths have to be compacted."""

    def draft(tokens: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        answer = next(one for one in answers if list(one[: len(tokens)]) == list(tokens))
        parents, drafted, above = [-1], [tokens[-1]], 0
        for token in answer[len(tokens) : len(tokens) + ahead]:
            parents += [above, above]
            drafted += [(token + 1) % vocabulary, token]
            above = len(parents) - 1
        return tuple(parents), drafted

    return draft


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Three random prompts of different lengths."""
    dice = random.Random(5)
    return [[dice.randrange(vocabulary) for _ in range(length)] for length in (1, 7, 40)]
