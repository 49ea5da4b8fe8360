"""No pass writes outside the memory that it works in: every buffer lies between guards that must stay as they are."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import agentspec.kernels.cpu.decoder as decoder_module
from agentspec.config import Dtype
from agentspec.engine.attention import NAME, Segment
from agentspec.engine.kv import BLOCK, PageTable
from agentspec.engine.target import Target
from agentspec.kernels.cpu.attend import PAGE

GUARD = 8192
MARK = 0xA5
HEADS: dict[str, dict[str, Any]] = {
    "shared keys": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "keys of their own": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    "one key for many": {"num_attention_heads": 30, "num_key_value_heads": 1, "head_dim": 32},
    "caps and windows": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32, "sliding_window": 100},
}
FAMILIES: dict[str, tuple[Any, Any]] = {"caps and windows": (Gemma2Config, Gemma2ForCausalLM)}


class Guarded:
    """Stands in for `aligned`, and remembers what it gave."""

    def __init__(self) -> None:
        self.rooms: list[tuple[NDArray[np.uint8], int, int]] = []

    def __call__(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        size = int(np.prod(shape)) * 4
        room = np.full(size + 2 * GUARD + 128, MARK, np.uint8)
        start = GUARD + -(room.ctypes.data + GUARD) % 128
        room[start : start + size] = 0
        self.rooms.append((room, start, start + size))
        return room[start : start + size].view(np.float32).reshape(shape)

    def unharmed(self) -> bool:
        return all((room[:start] == MARK).all() and (room[stop:] == MARK).all() for room, start, stop in self.rooms)


def guarded_table(target: Target, guarded: Guarded, tokens: int) -> PageTable:
    """A sequence with room for `tokens`, every page between guards of its own."""
    shape = target.shape
    table = PageTable(shape)
    table.reserve(tokens)
    for page in table.pages:
        memory = torch.from_numpy(guarded((2, shape.layers, shape.heads, PAGE * shape.dim)))
        page.k = memory[0].view(shape.layers, shape.heads, PAGE // BLOCK, shape.dim, BLOCK)
        page.v = memory[1].view(shape.layers, shape.heads, PAGE, shape.dim)
        page.address = memory.data_ptr()
    return table


def tree(dice: random.Random, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents and depths."""
    parents, depths = [-1], [0]
    for node in range(1, size):
        parents.append(dice.randint(max(0, node - 3), node - 1))
        depths.append(depths[parents[-1]] + 1)
    return tuple(parents), tuple(depths)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("threads", "dtype"), [(1, Dtype.FLOAT32), (3, Dtype.FLOAT32), (3, Dtype.INT8)])
def test_guards_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, name: str, threads: int, dtype: Dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    config, model = FAMILIES.get(name, (LlamaConfig, LlamaForCausalLM))
    make: Any = config
    sizes = make(
        hidden_size=90,
        intermediate_size=70,
        num_hidden_layers=2,
        vocab_size=101,
        max_position_embeddings=4096,
        pad_token_id=0,
        attn_implementation=NAME,
        **HEADS[name],
    )
    target = Target(model(sizes), dtype=dtype)
    torch.set_num_threads(before)
    assert target.decoder is not None
    guarded = Guarded()
    monkeypatch.setattr(decoder_module, "aligned", guarded)
    dice = random.Random(len(name) + threads)
    table = guarded_table(target, guarded, 2600)
    for _ in range(30):
        segments = []
        for _ in range(dice.choice([0, 0, 1, 2])):
            size = dice.choice([1, 5, 30, 300])
            other = guarded_table(target, guarded, size)
            segments.append(Segment(other, (5,) * size, tuple(range(size)), None))
        size = dice.choice([1, 2, 7, 16, 33, 64, 333, 512])
        if table.length + size > 2600:
            table.length = 0
        if size > 64:
            segments.append(Segment(table, (7,) * size, tuple(range(size)), None))
        else:
            parents, depths = tree(dice, size)
            segments.append(Segment(table, (9,) * size, depths, parents))
        rows = sum(len(segment.tokens) for segment in segments)
        target.forward(segments, sorted(dice.sample(range(rows), dice.randint(0, min(rows, 5)))))
        table.commit(range(size if size > 64 else 1))
        assert guarded.unharmed()
