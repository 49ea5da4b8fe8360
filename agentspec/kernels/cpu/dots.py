"""Inner products of whole numbers of 8 bits, and the rounding of floats to them, written as LLVM code.

Numbers come in groups of `GROUP` inputs, which share a float that they are multiplied with. Within a group products
are added up as whole numbers, without rounding and so in any order; the groups' sums are added as floats, first to
last. That makes a row's result the same bits on every processor, whichever instruction computes it.
"""

from typing import Any

from llvmlite import ir
from numba import types

from agentspec.compiled import operation
from agentspec.kernels.cpu.lanes import (
    ADDRESS,
    BYTES,
    FEATURES,
    FLOAT,
    I8,
    I32,
    I64,
    INTEGERS,
    KIND,
    LANES,
    LINE,
    VECTOR,
    WIDE,
    X86,
    Code,
    constant,
)

GROUP = 64
"""Inputs that share a scale; a multiple of `LANES`."""

FOURS = FEATURES.get("avx512vnni" if WIDE else "avxvnni", False)
"""Whether the processor multiplies four pairs of bytes and adds them up in one operation."""

STEP = 4 if FOURS else 2
"""Inputs that one operation multiplies."""

NUMBER_BYTES = 1 if FOURS else 2
"""Bytes of a row's number: pairs are multiplied as numbers of 16 bits."""

REGISTER = LANES // 2
"""Whole numbers of 32 bits in a register."""

WORDS = ir.VectorType(I32, REGISTER)
SHORTS = ir.VectorType(ir.IntType(16), 2 * REGISTER)
SMALL = ir.VectorType(I8, 2 * REGISTER)
BITS = 32 * REGISTER

MOST = 127
"""Largest number that a float is rounded to."""

SHIFT = 128
"""Added to weights where the processor wants them without sign."""

GROUP_BYTES = GROUP * LANES + BYTES
"""A group of a panel: its weights, then their scales."""


def can_quantise() -> bool:
    """Whether this processor multiplies 8-bit numbers quicker than floats."""
    return X86 and FEATURES.get("avx512bw" if WIDE else "avx2", False)


def dot(code: Code, total: Any, weights: Any, numbers: Any) -> Any:
    """Adds to every 32-bit number the products of its `STEP` weights with a row's `STEP` numbers."""
    b = code.builder
    first = b.insert_element(ir.Constant(WORDS, ir.Undefined), numbers, I32(0))
    spread = b.shuffle_vector(first, ir.Constant(WORDS, ir.Undefined), ir.Constant(WORDS, [0] * REGISTER))
    if FOURS:
        return code.call(f"llvm.x86.avx512.vpdpbusd.{BITS}", WORDS, total, weights, spread)
    name = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
    return b.add(total, code.call(name, WORDS, weights, b.bitcast(spread, SHORTS)))


def load_weights(code: Code, address: Any) -> Any:
    """The weights of `REGISTER` outputs and `STEP` inputs."""
    if FOURS:
        return code.load(address, WORDS)
    return code.builder.sext(code.load(address, SMALL), SHORTS)


@operation
def accumulate_groups(
    typing: Any,
    rows: Any,
    x: Any,
    scales: Any,
    starts: Any,
    stride: Any,
    panel: Any,
    groups: Any,
    sums: Any,
    sums_stride: Any,
    ahead: Any,
) -> Any:
    """The inner product of 1 to `MOST_ROWS` rows of whole numbers with one panel of them, group by group:

    sums[r] += (starts[r][g] + the sum over k of x[r][g][k] * panel[g][k]) * scales[r][g] * the panel's scales[g].

    The three parts of a row have one stride. Fetches the weights that lie `ahead` bytes behind those in use.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Code(builder).for_rows(arguments[0], lambda rows: group_products(Code(builder), rows, *arguments[1:]))
        return context.get_dummy_value()

    return types.void(*[ADDRESS] * 10), build


def group_products(
    code: Code,
    rows: int,
    x: Any,
    scales: Any,
    starts: Any,
    stride: Any,
    panel: Any,
    groups: Any,
    sums: Any,
    sums_stride: Any,
    ahead: Any,
) -> None:
    """The code of `accumulate_groups` for one number of rows, whose whole sums stay in registers."""
    b = code.builder
    offsets = [code.offset(I64(0), stride, I64(row)) for row in range(rows)]
    none = ir.Constant(WORDS, [0] * REGISTER)

    def group(index: Any, _: list[Any]) -> list[Any]:
        weights = code.offset(panel, I64(GROUP_BYTES), index)
        numbers = code.offset(x, I64(GROUP * NUMBER_BYTES), index)
        begin = []
        for offset in offsets:
            place = b.add(b.add(starts, offset), b.mul(index, I64(4)))
            first = b.insert_element(ir.Constant(WORDS, ir.Undefined), code.load(place, I32), I32(0))
            begin += [b.shuffle_vector(first, none, none)] * 2

        def step(k: Any, totals: list[Any]) -> list[Any]:
            here = code.offset(weights, I64(STEP * LANES), k)
            for line in range(0, STEP * LANES, LINE):
                code.prefetch(b.add(b.add(here, ahead), I64(line)))
            halves = [load_weights(code, b.add(here, I64(half * STEP * REGISTER))) for half in range(2)]
            following = []
            for row, offset in enumerate(offsets):
                place = b.add(b.add(numbers, offset), b.mul(k, I64(STEP * NUMBER_BYTES)))
                pair = code.load(place, I32)
                following += [dot(code, totals[2 * row + half], halves[half], pair) for half in range(2)]
            return following

        totals = code.loop(I64(GROUP // STEP), begin, step)
        factors = code.load(b.add(weights, I64(GROUP * LANES)))
        for row, offset in enumerate(offsets):
            whole = b.shuffle_vector(totals[2 * row], totals[2 * row + 1], ir.Constant(INTEGERS, list(range(LANES))))
            scale = code.load(b.add(b.add(scales, offset), b.mul(index, I64(4))), FLOAT)
            factor = b.fmul(factors, code.spread(scale))
            place = code.offset(sums, sums_stride, I64(row))
            code.store(code.fma(b.sitofp(whole, VECTOR), factor, code.load(place)), place)
        return []

    code.loop(groups, [], group)


@operation
def round_group(typing: Any, x: Any, vectors: Any, numbers: Any, scale: Any, start: Any) -> Any:
    """Rounds the floats of a group, `vectors` vectors full and zeros behind them, to multiples of a `MOST`th of the
    largest.

    Writes the multiples, what one is worth, and what a sum of products starts from: what weights that were shifted
    have too much.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, vectors, numbers, scale, start = arguments
        code, b = Code(builder), builder

        def largest(index: Any, values: list[Any]) -> list[Any]:
            size = code.call(f"llvm.fabs.{KIND}", VECTOR, code.load(code.offset(x, I64(BYTES), index)))
            bits = b.bitcast(size, INTEGERS)
            return [b.select(b.icmp_unsigned(">", bits, values[0]), bits, values[0])]

        (sizes,) = code.loop(vectors, [ir.Constant(INTEGERS, [0] * LANES)], largest)
        top = b.bitcast(code.call(f"llvm.vector.reduce.umax.v{LANES}i32", I32, sizes), FLOAT)
        some = b.fcmp_unordered("!=", top, FLOAT(0.0))
        factor = code.spread(b.select(some, b.fdiv(FLOAT(MOST), top), FLOAT(0.0)))
        kind = ir.VectorType(ir.IntType(8 * NUMBER_BYTES), LANES)
        least = constant(-float(MOST))

        def rounded(index: Any, values: list[Any]) -> list[Any]:
            near = b.fmul(code.load(code.offset(x, I64(BYTES), index)), factor)
            near = b.select(b.fcmp_ordered(">=", near, least), near, least)
            whole = b.fptosi(code.call(f"llvm.rint.{KIND}", VECTOR, near), INTEGERS)
            code.store(b.trunc(whole, kind), code.offset(numbers, I64(LANES * NUMBER_BYTES), index))
            return [b.add(values[0], whole)]

        (total,) = code.loop(vectors, [ir.Constant(INTEGERS, [0] * LANES)], rounded)

        def nothing(index: Any, _: list[Any]) -> list[Any]:
            place = code.offset(numbers, I64(LANES * NUMBER_BYTES), b.add(vectors, index))
            code.store(ir.Constant(kind, [0] * LANES), place)
            return []

        code.loop(b.sub(I64(GROUP // LANES), vectors), [], nothing)
        code.store(b.fdiv(top, FLOAT(MOST)), scale)
        sum_ = code.call(f"llvm.vector.reduce.add.v{LANES}i32", I32, total)
        code.store(b.mul(sum_, I32(-SHIFT if FOURS else 0)), start)
        return context.get_dummy_value()

    return types.void(*[ADDRESS] * 5), build
