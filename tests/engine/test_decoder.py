"""Rows of the compiled decoder against themselves, bit by bit; its threads and its checks."""

import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from agentspec.config import Dtype
from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.target import Target
from agentspec.kernels.cpu.dots import can_quantise
from tests.engine.tiny_models import SIZES, VOCABULARY, by_transformers, made, made_with

BROAD = ("llama tied, biased, scaled", "gemma 2")
"""Models that have between them all that a block can have."""


def test_a_model_with_a_window_computes_what_transformers_computes() -> None:
    model = made_with(MistralConfig, MistralForCausalLM, sliding_window=37)
    tokens = torch.randint(0, VOCABULARY, (130,)).tolist()
    expected = by_transformers(model, tokens)
    target = Target(model)
    table = PageTable(target.shape)
    at_once = target.forward([Segment(table, tuple(tokens), tuple(range(130)), None)], range(130))
    torch.testing.assert_close(at_once, expected, atol=5e-5, rtol=1e-5)
    table.commit(range(90))
    for at in range(90, 130):
        alone = target.forward([Segment(table, (tokens[at],), (0,), None)], [0])
        assert torch.equal(alone[0], at_once[at])
        table.commit([0])


@pytest.fixture(
    scope="module", params=[(name, dtype) for name in BROAD for dtype in (Dtype.FLOAT32, Dtype.INT8)], ids=str
)
def target(request: pytest.FixtureRequest) -> Target:
    name, dtype = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    made_target = Target(made(name), dtype=dtype)
    assert made_target.dtype == dtype or not can_quantise()
    torch.set_num_threads(threads)
    return made_target


def plain_rows(target: Target, tokens: Sequence[int], cached: int) -> torch.Tensor:
    """Logits of every position from `cached` on, decoded token by token."""
    table = PageTable(target.shape)
    if cached:
        target.forward([Segment(table, tuple(tokens[:cached]), tuple(range(cached)), None)], [])
        table.commit(range(cached))
    rows = []
    for token in tokens[cached:]:
        rows.append(target.forward([Segment(table, (token,), (0,), None)], [0])[0])
        table.commit([0])
    return torch.stack(rows)


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tokens, parents and depths of a random tree of up to 40 nodes."""
    size = draw(st.integers(1, 40))
    parents, depths = [-1], [0]
    for node in range(1, size):
        parents.append(draw(st.integers(max(0, node - 4), node - 1)))
        depths.append(depths[parents[-1]] + 1)
    tokens = tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size)))
    return tokens, tuple(parents), tuple(depths)


@settings(max_examples=12, deadline=None)
@given(tree=trees(), cached=st.integers(0, 90), beside=st.lists(st.integers(1, 30), max_size=2), data=st.data())
def test_every_node_has_the_bits_of_plain_decoding(
    target: Target,
    tree: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    cached: int,
    beside: list[int],
    data: st.DataObject,
) -> None:
    """Whatever tree a node is in, whatever other sequences are in the pass, however the prompt was cut in chunks."""
    tokens, parents, depths = tree
    prompt = [(7 * i + cached) % VOCABULARY for i in range(cached)]
    table = PageTable(target.shape)
    while table.length < cached:
        size = data.draw(st.integers(1, cached - table.length))
        chunk = tuple(prompt[table.length : table.length + size])
        target.forward([Segment(table, chunk, tuple(range(size)), None)], [])
        table.commit(range(size))
    others = [Segment(PageTable(target.shape), (5,) * size, tuple(range(size)), None) for size in beside]
    logits = target.forward([Segment(table, tokens, depths, parents), *others], range(len(tokens)))
    node = data.draw(st.integers(0, len(tokens) - 1))
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    line.reverse()
    expected = plain_rows(target, [*prompt, *[tokens[at] for at in line]], cached)
    assert torch.equal(logits[line], expected)
    table.commit(line)
    after = target.forward([Segment(table, (3,), (0,), None)], [0])
    assert torch.equal(after[0], plain_rows(target, [*prompt, *[tokens[at] for at in line], 3], cached)[-1])


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (30, 1)])
def test_rows_keep_their_bits_across_the_chunks_of_long_contexts(heads: tuple[int, int]) -> None:
    torch.manual_seed(5)
    sizes = {**SIZES, "hidden_size": 180, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    long = Target(LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 2048}, head_dim=32)))
    tokens = torch.randint(0, VOCABULARY, (1200,)).tolist()
    table = PageTable(long.shape)
    at_once = long.forward([Segment(table, tuple(tokens), tuple(range(1200)), None)], range(1200))
    cut = PageTable(long.shape)
    for stop in (513, 1025, 1190):
        first = cut.length
        chunk = Segment(cut, tuple(tokens[first:stop]), tuple(range(stop - first)), None)
        assert torch.equal(long.forward([chunk], range(stop - first)), at_once[first:stop])
        cut.commit(range(stop - first))
    for position in (1, 500, 511, 512, 513, 600, 1023, 1024, 1100):
        cut.length = position
        alone = long.forward([Segment(cut, (tokens[position],), (0,), None)], [0])
        assert torch.equal(alone[0], at_once[position])
        tree = Segment(cut, (tokens[position], 3, tokens[position + 1]), (0, 1, 1), (-1, 0, 0))
        assert torch.equal(long.forward([tree], [2])[0], at_once[position + 1])
        restored = Segment(cut, tuple(tokens[position : position + 3]), (0, 1, 2), None)
        long.forward([restored], [])


@pytest.mark.parametrize(
    "segment",
    [
        {"tokens": (VOCABULARY,)},
        {"tokens": (-1,)},
        {"tokens": (), "depths": ()},
        {"depths": (256,)},
        {"depths": (-1,)},
        {"tokens": (1, 2), "depths": (0, 1), "parents": (-1, 1)},
        {"tokens": (1, 2), "depths": (0, 1), "parents": (-1, -2)},
        {"tokens": (1, 2), "depths": (0, 1), "parents": (-1,)},
    ],
    ids=str,
)
def test_what_is_out_of_range_fails_before_anything_is_computed(target: Target, segment: dict[str, Any]) -> None:
    good: dict[str, Any] = {"tokens": (1,), "depths": (0,), "parents": None}
    with pytest.raises(IndexError):
        target.forward([Segment(PageTable(target.shape), **{**good, **segment})], [])
    with pytest.raises(IndexError):
        target.forward([Segment(PageTable(target.shape), **good)], [1])


def test_threads_end_with_their_decoder() -> None:
    gc.collect()
    before = threading.active_count()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    mine = Target(made("qwen2"))
    torch.set_num_threads(threads)
    mine.forward([Segment(PageTable(mine.shape), (1, 2), (0, 1), None)], [1])
    assert threading.active_count() == before + 2
    del mine
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize("broken", ["no number", "zero row"])
def test_numbers_that_are_none_end_no_thread(broken: str) -> None:
    """An exception in one thread's compiled code would leave the others waiting for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = made_with(MistralConfig, MistralForCausalLM, sliding_window=9, rms_norm_eps=0.0)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan") if broken == "no number" else 0.0
    mine = Target(model)
    torch.set_num_threads(threads)
    broken_run, other = (Segment(PageTable(mine.shape), tokens, (0, 1), None) for tokens in ((1, 5), (1, 2)))
    logits = mine.forward([broken_run, other], [1, 3])
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()


PROCESSES = """
import os, sys, torch
from pathlib import Path
from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.profile import filled_table, pass_seconds
from agentspec.engine.target import Target
def loaded(threads):
    torch.set_num_threads(threads)
    return Target.load(Path(sys.argv[1]))
def compute():
    return target.forward([Segment(PageTable(target.shape), (1,), (0,), None)], [0])
ending = os.fork()
if ending == 0:
    target = loaded(3)
    pass_seconds(target, filled_table(target, 5), 8, 2)
    sys.exit()
print("ended with", os.waitpid(ending, 0)[1], flush=True)
target = loaded(2)
compute()
child = os.fork()
if child == 0:
    try:
        compute()
    except RuntimeError as error:
        os.write(1, str(error).encode())
    os.read(0, 1)
    os._exit(0)
compute()
del target
os.close(0)
print("free", flush=True)
"""
"""A process, forked before there are threads, that ends with a decoder; then one forked with a decoder's threads."""


def test_a_process_with_a_decoder_ends_in_peace_and_a_forked_one_is_told_and_holds_nobody_up(tiny_model: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROCESSES, str(tiny_model)]
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
    assert process.wait(timeout=90) == 0
    out, errors = process.communicate("x", timeout=60)
    assert errors == ""
    assert out.startswith("ended with 0\n")
    assert "only in the process that started it" in out
    assert "free" in out
