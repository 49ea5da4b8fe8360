"""What numba cannot say, written as LLVM code: inner products of vectors of `LANES` floats, atomics, prefetches.

Addresses and strides are int64, in bytes. Nothing here checks bounds.
"""

import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from agentspec.compiled import operation

FEATURES: dict[str, bool] = dict(llvmlite.binding.get_host_cpu_features())

X86 = platform.machine() in ("x86_64", "AMD64", "i386", "i686")

WIDE = FEATURES.get("avx512f", False)

LANES = 2 * (16 if WIDE else 8 if X86 else 4)
"""Floats of a vector: two registers full. A panel of a matrix has as many columns, a block of keys as many
positions."""

BYTES = 4 * LANES
"""Bytes of such a vector."""

MOST_ROWS = 12 if WIDE or not X86 else 6
"""Rows that one sweep over a panel serves: as many as there are registers for two sums each."""

LINE = 64
"""Bytes of a cache line."""

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
KIND = f"v{LANES}f32"
FLOAT, VECTOR, INTEGERS = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
ADDRESS = types.int64


def can_compute() -> bool:
    """Whether kernels are compiled, for a processor that multiplies and adds in one operation: without, they would be
    slower than torch."""
    return not numba.config.DISABLE_JIT and (not X86 or FEATURES.get("fma", False))


class Code:
    """An LLVM builder with the few words that the operations below are made of."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: Any, *arguments: Any, flags: Sequence[str] = ()) -> Any:
        """Calls an LLVM intrinsic or a function of the C library; `flags` are LLVM's fast-math flags."""
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return self.builder.call(function, arguments, fastmath=flags)

    def pointer(self, address: Any, kind: Any = VECTOR) -> Any:
        return self.builder.inttoptr(address, ir.PointerType(kind))

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        value = self.builder.load(self.pointer(address, kind))
        value.align = 4
        return value

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.pointer(address, value.type)).align = 4

    def prefetch(self, address: Any) -> None:
        """Starts to bring a line of memory into the second cache."""
        self.call("llvm.prefetch.p0", ir.VoidType(), self.pointer(address, I8), I32(0), I32(2), I32(1))

    def offset(self, address: Any, stride: Any, count: Any) -> Any:
        return self.builder.add(address, self.builder.mul(stride, count))

    def spread(self, value: Any) -> Any:
        """A vector with `value` in every lane."""
        undefined = ir.Constant(VECTOR, ir.Undefined)
        first = self.builder.insert_element(undefined, value, I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.{KIND}", VECTOR, a, b, c)

    def sum(self, vector: Any) -> Any:
        """Sum of the lanes, in an order that the processor picks, always the same: one by one would take long."""
        return self.call(f"llvm.vector.reduce.fadd.{KIND}", FLOAT, FLOAT(-0.0), vector, flags=["reassoc"])

    def for_rows(self, rows: Any, body: Callable[[int], None]) -> None:
        """Runs `body`'s code for the right one of 1 to `MOST_ROWS` rows: a number that it knows when it is written."""
        done, most = self.builder.append_basic_block("done"), self.builder.append_basic_block("rows")
        choice = self.builder.switch(rows, most)
        for number in range(1, MOST_ROWS + 1):
            block = most if number == MOST_ROWS else self.builder.append_basic_block("rows")
            if block is not most:
                choice.add_case(I64(number), block)
            self.builder.position_at_end(block)
            body(number)
            self.builder.branch(done)
        self.builder.position_at_end(done)

    def loop(self, count: Any, start: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Runs `body(index, values)`, which returns the next values, `count` times; returns the last values."""
        function, before = self.builder.function, self.builder.block
        inside, after = function.append_basic_block("loop"), function.append_basic_block("after")
        self.builder.cbranch(self.builder.icmp_signed(">", count, I64(0)), inside, after)
        self.builder.position_at_end(inside)
        index = self.builder.phi(I64)
        index.add_incoming(I64(0), before)
        values = [self.builder.phi(value.type) for value in start]
        for phi, value in zip(values, start, strict=True):
            phi.add_incoming(value, before)
        following = body(index, list(values))
        here = self.builder.block
        upper = self.builder.add(index, I64(1))
        index.add_incoming(upper, here)
        for phi, value in zip(values, following, strict=True):
            phi.add_incoming(value, here)
        self.builder.cbranch(self.builder.icmp_signed("<", upper, count), inside, after)
        self.builder.position_at_end(after)
        results = []
        for value, last in zip(start, following, strict=True):
            result = self.builder.phi(value.type)
            result.add_incoming(value, before)
            result.add_incoming(last, here)
            results.append(result)
        return results


def constant(value: float) -> Any:
    """A vector with a constant in every lane."""
    return ir.Constant(VECTOR, [value] * LANES)


@operation
def accumulate(
    typing: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    panel_stride: Any,
    count: Any,
    sums: Any,
    sums_stride: Any,
    fresh: Any,
    ahead: Any,
    ahead_stride: Any,
) -> Any:
    """The inner product of 1 to `MOST_ROWS` rows with one panel:

    sums[r] (+)= the sum over k < count, in that order, of x[r][k] * panel[k].

    `fresh` starts from zero instead of the sums in memory. At every k a vector of memory is fetched from `ahead` on,
    which goes on by `ahead_stride`.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Code(builder).for_rows(arguments[0], lambda rows: products(Code(builder), rows, *arguments[1:]))
        return context.get_dummy_value()

    return types.void(*[ADDRESS] * 11), build


def products(
    code: Code,
    rows: int,
    x: Any,
    x_stride: Any,
    panel: Any,
    panel_stride: Any,
    count: Any,
    sums: Any,
    sums_stride: Any,
    fresh: Any,
    ahead: Any,
    ahead_stride: Any,
) -> None:
    """The code of `accumulate` for one number of rows, whose sums stay in registers."""
    builder = code.builder
    places = [code.offset(sums, sums_stride, I64(row)) for row in range(rows)]
    before = builder.block
    with builder.if_then(builder.icmp_signed("==", fresh, I64(0))):
        loaded = [code.load(place) for place in places]
        loading = builder.block
    start = []
    for value in loaded:
        first = builder.phi(VECTOR)
        first.add_incoming(constant(0.0), before)
        first.add_incoming(value, loading)
        start.append(first)

    def step(k: Any, totals: list[Any]) -> list[Any]:
        weights = code.load(code.offset(panel, panel_stride, k))
        target = code.offset(ahead, ahead_stride, k)
        for line in range(0, BYTES, LINE):
            code.prefetch(builder.add(target, I64(line)))
        column = builder.add(x, builder.mul(k, I64(4)))
        following = []
        for row, total in enumerate(totals):
            value = code.load(code.offset(column, x_stride, I64(row)), FLOAT)
            following.append(code.fma(code.spread(value), weights, total))
        return following

    for place, value in zip(places, code.loop(count, start, step), strict=True):
        code.store(value, place)


@operation
def fetch_add(typing: Any, counter: Any, amount: Any) -> Any:
    """Adds to a shared int64; returns what it was."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", Code(builder).pointer(arguments[0], I64), arguments[1], "acq_rel")

    return types.int64(ADDRESS, types.int64), build


@operation
def read(typing: Any, counter: Any) -> Any:
    """A shared int64, and everything written before it was."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(Code(builder).pointer(arguments[0], I64), "acquire", 8)

    return types.int64(ADDRESS), build


@operation
def write(typing: Any, counter: Any, value: Any) -> Any:
    """Sets a shared int64 for others to `read`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], Code(builder).pointer(arguments[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.int64), build


@operation
def relax(typing: Any) -> Any:
    """Tells the processor that this thread is waiting for another."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            Code(builder).call("llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), build


@operation
def give_way(typing: Any) -> Any:
    """Lets the operating system run another thread."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Code(builder).call("sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), build


@operation
def send_bytes(typing: Any, descriptor: Any, buffer: Any, count: Any) -> Any:
    """Writes to a pipe; returns how many bytes were written, or -1."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)
        descriptor, buffer, count = arguments
        return code.call("write", I64, builder.trunc(descriptor, I32), code.pointer(buffer, I8), count)

    return types.int64(types.int64, ADDRESS, types.int64), build


@operation
def wait_for_byte(typing: Any, descriptor: Any, buffer: Any) -> Any:
    """Blocks until a pipe has a byte; 0 once its other end is closed."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Code(builder)
        descriptor = builder.trunc(arguments[0], I32)
        return code.call("read", I64, descriptor, code.pointer(arguments[1], I8), I64(1))

    return types.int64(types.int64, ADDRESS), build
