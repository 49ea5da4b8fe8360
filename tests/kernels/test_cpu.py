"""The CPU's kernels, each against a slow twin in numpy."""

from typing import Any

import numpy as np
import pytest
from numba import types
from numpy.typing import NDArray

from agentspec.compiled import compiled
from agentspec.kernels.cpu.attend import CHUNK, PAGE, attend_chunk, finish, join
from agentspec.kernels.cpu.lanes import BYTES, LANES
from agentspec.kernels.cpu.product import aligned, pack, sweep
from agentspec.kernels.cpu.vectors import LOWEST, bend, exponentiate, gate_gelu, gate_silu, largest, square_sum

Floats = NDArray[np.float32]


def random(*shape: int) -> Floats:
    array = aligned(shape)
    array[:] = np.random.default_rng(sum(shape)).standard_normal(shape)
    return array


@pytest.mark.parametrize("outputs", [1, LANES - 1, LANES, 3 * LANES + 5])
@pytest.mark.parametrize("inputs", [1, 7, 64, 700, 1500])
def test_products_of_rows_are_the_same_bits_whatever_their_number(inputs: int, outputs: int) -> None:
    weight, x = random(outputs, inputs), random(40, inputs)
    packed = pack(weight)
    together = products(x, packed)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(together[:, :outputs], expected, atol=2e-4)
    assert not together[:, outputs:].any()
    for rows in range(1, 40):
        assert np.array_equal(products(x[:rows], packed), together[:rows])


def products(x: Floats, packed: Floats) -> Floats:
    rows, panels = len(x), packed.shape[0]
    out = np.full((rows, panels * LANES), np.nan, np.float32)
    for panel in range(panels):
        at = out.ctypes.data + panel * BYTES
        place = packed[panel].ctypes.data
        sweep(rows, x.ctypes.data, x.strides[0], place, BYTES, x.shape[1], at, out.strides[0], 1)
    return out


def test_a_product_adds_to_what_is_there_in_the_order_of_the_inputs() -> None:
    weight, x = random(LANES, 900), random(5, 900)
    packed = pack(weight)
    out = np.zeros((5, LANES), np.float32)
    for first, last, fresh in ((0, 300, 1), (300, 301, 0), (301, 900, 0)):
        place = packed.ctypes.data + first * BYTES
        arguments = (BYTES, last - first, out.ctypes.data, out.strides[0], fresh)
        sweep(5, x.ctypes.data + first * 4, x.strides[0], place, *arguments)
    assert np.array_equal(out, products(x, packed))


@compiled
def reductions(values: Floats, vectors: int, most: np.float32) -> tuple[float, float, float]:
    squares = square_sum(values.ctypes.data, vectors)
    top = largest(values.ctypes.data, vectors)
    return squares, top, exponentiate(values.ctypes.data, vectors, most)


def test_exponentials_are_right_to_the_last_bits_and_zero_for_what_is_hidden() -> None:
    values = aligned((64 * LANES,))
    values[:] = np.linspace(-120, 0, len(values), dtype=np.float32)
    values[:5] = -np.inf
    expected, normal = np.exp(values.astype(np.float64)), values >= np.float32(LOWEST)
    reductions(values, 64, np.float32(0))
    np.testing.assert_allclose(values[normal], expected[normal], rtol=3e-7)
    assert not values[~normal].any()


def test_reductions() -> None:
    values = random(6 * LANES)
    before = values.astype(np.float64)
    squares, top, total = reductions(values, 6, np.float32(before.max()))
    assert top == np.float32(before.max())
    assert squares == pytest.approx((before**2).sum(), rel=1e-6)
    assert total == pytest.approx(np.exp(before - before.max()).sum(), rel=1e-6)


@compiled
def gated(gates: Floats, ups: Floats, silu: Floats, gelu: Floats) -> None:
    gate_silu(gates.ctypes.data, ups.ctypes.data, silu.ctypes.data)
    gate_gelu(gates.ctypes.data, ups.ctypes.data, gelu.ctypes.data)


@pytest.mark.parametrize("reach", [200, 3, 0.01])
def test_gates_saturate_and_keep_their_sign(reach: float) -> None:
    gates, ups, silu, gelu = aligned((LANES,)), random(LANES), aligned((LANES,)), aligned((LANES,))
    gates[:] = np.linspace(-reach, reach, LANES)
    gated(gates, ups, silu, gelu)
    exact = gates.astype(np.float64)
    np.testing.assert_allclose(silu, exact / (1 + np.exp(-exact)) * ups, rtol=1e-6, atol=1e-30)
    inner = np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)
    np.testing.assert_allclose(gelu, 0.5 * exact * (1 + np.tanh(inner)) * ups, rtol=1e-6, atol=1e-14)


@compiled
def bent(values: Floats, vectors: int, cap: np.float32) -> None:
    bend(values.ctypes.data, vectors, cap)


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_a_soft_cap_is_right_to_the_last_bits(cap: float) -> None:
    values = aligned((64 * LANES,))
    values[:] = np.concatenate([np.linspace(-400, 400, 32 * LANES), np.linspace(-1, 1, 32 * LANES)])
    exact = cap * np.tanh(values.astype(np.float64) / cap)
    bent(values, 64, np.float32(cap))
    np.testing.assert_allclose(values, exact, rtol=5e-7)
    assert np.abs(values).max() <= np.float32(cap)


def slow(
    q: Floats, keys: Floats, values: Floats, parents: list[int], length: int, window: int, cap: float = 0.0
) -> Floats:
    """Row by row: softmax over the cached positions, the ancestors and the row itself."""
    out = np.zeros_like(q)
    for node in range(len(parents)):
        line, at = [], node
        while at >= 0:
            line.append(length + at)
            at = parents[at]
        seen = [*range(length), *reversed(line)]
        seen = seen[-window:] if window else seen
        scores = q[node].astype(np.float64) @ keys[seen].astype(np.float64).T
        if cap:
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[node] = weights / weights.sum(-1, keepdims=True) @ values[seen]
    return out


def attended(
    q: Floats,
    memory: Floats,
    parents: list[int] | None,
    length: int,
    window: int,
    first: int,
    last: int,
    cap: float = 0.0,
) -> Floats:
    """Rows `first` to `last` of q (rows, groups, dim), chunk by chunk; pages lie in `memory` last one first."""
    rows, groups, dim = q.shape
    count = (last - first) * groups
    scores = np.full((count, CHUNK + rows + 3 * LANES), np.nan, np.float32)
    path = np.zeros(rows, np.int64)
    pages = np.asarray([page.ctypes.data for page in memory[::-1]], np.int64)
    links = None if parents is None else np.asarray(parents, np.int64)
    results: list[tuple[Floats, Floats, Floats]] = []
    for begin in range(0, length + rows, CHUNK):
        tops, totals = np.full(count, np.nan, np.float32), np.full(count, np.nan, np.float32)
        sums = np.full((count, dim), np.nan, np.float32)
        attend_chunk(
            begin,
            q[first:].ctypes.data,
            groups,
            pages.ctypes.data,
            0,
            PAGE * dim * 4,
            dim,
            length,
            first,
            last,
            rows,
            0 if links is None else links.ctypes.data,
            window,
            np.float32(cap),
            scores.ctypes.data,
            scores.strides[0],
            path.ctypes.data,
            tops.ctypes.data,
            totals.ctypes.data,
            4,
            sums.ctypes.data,
            sums.strides[0],
        )
        results.append((tops, totals, sums))
    out = np.full((count, dim), np.nan, np.float32)
    (tops, totals, sums), *others = results
    for i in range(count):
        for more in others:
            places = [part[i:].ctypes.data for part in (tops, totals, sums, *more)]
            join(dim, *places)
        finish(dim, totals[i:].ctypes.data, sums[i:].ctypes.data, out[i:].ctypes.data)
    return out.reshape(last - first, groups, dim)


TREES = [[-1], [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 1, 0, 3, 3, 1], [-1, *[max(0, i // 2) for i in range(19)]]]


@pytest.mark.parametrize("window", [0, 1, 700])
@pytest.mark.parametrize("length", [0, LANES - 1, 150, CHUNK - 3, 2 * CHUNK + 77])
@pytest.mark.parametrize("dim", [LANES, 3 * LANES])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_attention_equals_its_slow_twin(parents: list[int], groups: int, dim: int, length: int, window: int) -> None:
    rows = len(parents)
    q, memory, k, v = sequence(rows, groups, dim, length)
    out = attended(q, memory, parents, length, window, 0, rows)
    np.testing.assert_allclose(out, slow(q, k, v, parents, length, window), atol=2e-5)
    for node in range(rows):
        assert np.array_equal(attended(q, memory, parents, length, window, node, node + 1)[0], out[node])


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("length", [0, LANES - 1, CHUNK - 3])
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_capped_scores_equal_the_slow_twins(parents: list[int], length: int, window: int) -> None:
    rows = len(parents)
    q, memory, k, v = sequence(rows, 2, LANES, length)
    out = attended(q, memory, parents, length, window, 0, rows, 0.7)
    np.testing.assert_allclose(out, slow(q, k, v, parents, length, window, 0.7), atol=2e-5)
    assert np.abs(out - slow(q, k, v, parents, length, window)).max() > 1e-3 or length + rows == 1
    for node in range(rows):
        assert np.array_equal(attended(q, memory, parents, length, window, node, node + 1, 0.7)[0], out[node])


@pytest.mark.parametrize("window", [0, 5, 700])
@pytest.mark.parametrize("length", [0, 40, CHUNK - 10])
def test_rows_of_a_chain_have_the_bits_that_each_has_alone(length: int, window: int) -> None:
    rows = 45
    q, memory, k, v = sequence(rows, 2, LANES, length)
    out = attended(q, memory, None, length, window, 0, rows)
    chain = list(range(-1, rows - 1))
    np.testing.assert_allclose(out, slow(q, k, v, chain, length, window), atol=2e-5)
    assert np.array_equal(attended(q, memory, chain, length, window, 0, rows), out)
    for row in (0, 1, 20, 44):
        alone = attended(q[row : row + 1].copy(), memory, None, length + row, window, 0, 1)
        assert np.array_equal(alone[0], out[row])


def sequence(rows: int, groups: int, dim: int, length: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Queries, pages, and keys and values apart; NaN where nothing may be read into a result."""
    total = length + rows
    count = -(-total // PAGE)
    q, k, v = random(rows, groups, dim) * np.float32(0.4), random(total + 1, dim)[:total], random(total, dim)
    memory = aligned((count, 2, PAGE * dim))
    memory[:] = np.nan
    for position in range(total):
        keys, values = memory[count - 1 - position // PAGE]
        at = position % PAGE
        keys.reshape(PAGE // LANES, dim, LANES)[at // LANES, :, at % LANES] = k[position]
        values.reshape(PAGE, dim)[at] = v[position]
    return q, memory, k, v


def test_a_kernel_is_not_compiled_again_for_a_constant() -> None:
    """A version for each constant that it is called with, and of all that it calls, made the first pass slow."""

    def doubled(x: int) -> int:
        return 2 * x

    kernel: Any = compiled(doubled)
    assert kernel(4) == 8
    for constant in (1, 128):
        kernel.get_call_template([types.literal(constant)], {})
    assert kernel.signatures == [(types.int64,)]
