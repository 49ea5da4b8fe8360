"""Functions of vectors of floats in memory, written as LLVM code: exponentials, gates, caps, reductions.

As in `lanes`, addresses are int64, in bytes, and nothing checks bounds.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from agentspec.compiled import operation
from agentspec.kernels.cpu.lanes import ADDRESS, BYTES, FLOAT, I32, I64, INTEGERS, KIND, LANES, VECTOR, Code, constant

LOWEST, HIGHEST = -87.3, 88.7
"""Where the exponential leaves the range of normal floats."""

EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of the Cephes library's expf for the remainder of a division by ln 2."""


def exponential(code: Code, x: Any) -> Any:
    """e to the power of every lane, to about one unit in the last place; 0 below `LOWEST`."""
    b = code.builder
    low = b.fcmp_ordered("<", x, constant(LOWEST))
    bounded = b.select(b.fcmp_ordered(">", x, constant(HIGHEST)), constant(HIGHEST), x)
    bounded = b.select(low, constant(LOWEST), bounded)
    power = code.call(f"llvm.rint.{KIND}", VECTOR, b.fmul(bounded, constant(1.44269504088896341)))
    rest = code.fma(power, constant(-0.693359375), bounded)
    rest = code.fma(power, constant(2.12194440e-4), rest)
    total = constant(EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        total = code.fma(total, rest, constant(coefficient))
    total = b.fadd(code.fma(total, b.fmul(rest, rest), rest), constant(1.0))
    exponent = b.shl(b.fptosi(power, INTEGERS), ir.Constant(INTEGERS, [23] * LANES))
    scaled = b.bitcast(b.add(b.bitcast(total, INTEGERS), exponent), VECTOR)
    return b.select(low, constant(0.0), scaled)


@operation
def largest(typing: Any, at: Any, vectors: Any) -> Any:
    """The largest of `vectors` vectors' floats; minus infinity of none. What is no number does not count."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, vectors = arguments
        code = Code(builder)

        def step(index: Any, values: list[Any]) -> list[Any]:
            here = code.load(code.offset(at, I64(BYTES), index))
            return [builder.select(builder.fcmp_ordered(">", here, values[0]), here, values[0])]

        (most,) = code.loop(vectors, [constant(float("-inf"))], step)
        return code.call(f"llvm.vector.reduce.fmax.{KIND}", FLOAT, most, flags=["nnan", "nsz"])

    return types.float32(ADDRESS, types.int64), build


@operation
def exponentiate(typing: Any, at: Any, vectors: Any, most: Any) -> Any:
    """Replaces floats by e to the power of their distance from `most`; returns their sum, lane by lane first."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, vectors, most = arguments
        code = Code(builder)
        shift = code.spread(most)

        def step(index: Any, values: list[Any]) -> list[Any]:
            place = code.offset(at, I64(BYTES), index)
            weight = exponential(code, builder.fsub(code.load(place), shift))
            code.store(weight, place)
            return [builder.fadd(values[0], weight)]

        (total,) = code.loop(vectors, [constant(0.0)], step)
        return code.sum(total)

    return types.float32(ADDRESS, types.int64, types.float32), build


@operation
def power(typing: Any, x: Any) -> Any:
    """e to the power of one float, with the bits that `exponentiate` gives it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)
        return builder.extract_element(exponential(code, code.spread(arguments[0])), I32(0))

    return types.float32(types.float32), build


@operation
def square_sum(typing: Any, at: Any, vectors: Any) -> Any:
    """Sum of the squares of `vectors` vectors' floats, lane by lane first."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, vectors = arguments
        code = Code(builder)

        def step(index: Any, values: list[Any]) -> list[Any]:
            here = code.load(code.offset(at, I64(BYTES), index))
            return [code.fma(here, here, values[0])]

        (total,) = code.loop(vectors, [constant(0.0)], step)
        return code.sum(total)

    return types.float32(ADDRESS, types.int64), build


def gated(power: Callable[[Code, Any], Any]) -> Any:
    """The signature and the code of one vector of gate / (1 + e to the power of `power(gate)`) * up."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)
        gates, ups = code.load(arguments[0]), code.load(arguments[1])
        decayed = exponential(code, power(code, gates))
        code.store(builder.fmul(builder.fdiv(gates, builder.fadd(constant(1.0), decayed)), ups), arguments[2])
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS), build


@operation
def gate_silu(typing: Any, gates: Any, ups: Any, out: Any) -> Any:
    """One vector of silu(gate) * up."""
    return gated(lambda code, gates: code.builder.fsub(constant(0.0), gates))


GELU = -2 * math.sqrt(2 / math.pi)
"""1 + tanh(x) is 2 / (1 + e to the power of -2x): so the tanh of the usual approximation becomes one exponential."""


@operation
def gate_gelu(typing: Any, gates: Any, ups: Any, out: Any) -> Any:
    """One vector of gelu(gate) * up, the gelu of Hendrycks and Gimpel (2016) that is made of a tanh."""

    def power(code: Code, gates: Any) -> Any:
        square = code.builder.fmul(gates, gates)
        return code.builder.fmul(gates, code.fma(square, constant(0.044715 * GELU), constant(GELU)))

    return gated(power)


NEAR = 0.625
"""Below, the exponentials of a tanh would cancel."""

TANGENT = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""Coefficients of the Cephes library's tanhf below `NEAR`."""


def hyperbolic_tangent(code: Code, x: Any) -> Any:
    """tanh of every lane, to about two units in the last place."""
    b = code.builder
    square = b.fmul(x, x)
    total = constant(TANGENT[0])
    for coefficient in TANGENT[1:]:
        total = code.fma(total, square, constant(coefficient))
    near = code.fma(b.fmul(total, square), x, x)
    size = code.call(f"llvm.fabs.{KIND}", VECTOR, x)
    grown = b.fadd(exponential(code, b.fadd(size, size)), constant(1.0))
    far = b.fsub(constant(1.0), b.fdiv(constant(2.0), grown))
    far = code.call(f"llvm.copysign.{KIND}", VECTOR, far, x)
    return b.select(b.fcmp_ordered("<", size, constant(NEAR)), near, far)


@operation
def bend(typing: Any, at: Any, vectors: Any, cap: Any) -> Any:
    """Replaces floats by cap * tanh(float / cap): a soft cap, which keeps them within `cap` on either side."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, vectors, cap = arguments
        code = Code(builder)
        most = code.spread(cap)

        def step(index: Any, _: list[Any]) -> list[Any]:
            place = code.offset(at, I64(BYTES), index)
            bent = hyperbolic_tangent(code, builder.fdiv(code.load(place), most))
            code.store(builder.fmul(bent, most), place)
            return []

        code.loop(vectors, [], step)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.int64, types.float32), build


@operation
def add(typing: Any, source: Any, out: Any) -> Any:
    """Adds one vector to another in memory."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)
        source, out = arguments
        code.store(builder.fadd(code.load(out), code.load(source)), out)
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS), build


@operation
def copy(typing: Any, source: Any, out: Any) -> Any:
    """Copies one vector."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)
        code.store(code.load(arguments[0]), arguments[1])
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS), build
