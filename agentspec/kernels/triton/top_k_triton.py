"""The kernels of the likeliest tokens: parts of the vocabulary first, then the best of the parts.

A logit and its id make one whole number, so that its order is that of logits and, among equal ones, of falling ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Logits of a part."""

NOTHING = tl.constexpr(-(2**63))
"""Below the number of any logit."""


@triton.jit
def packed(logits, ids):
    """One int64 of a float32 and an id: the bits of the float, made to rise with it, above the complement of the id."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def id_of(number):
    """The id of a packed number."""
    return (0xFFFFFFFF - (number & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def logit_of(number):
    """The logit of a packed number."""
    order = (number >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def log_of_sum(values):
    """Of the exponentials; minus infinity if that is all there is."""
    highest = tl.max(values, 0)
    nothing = highest == float("-inf")
    total = tl.sum(tl.exp(values - tl.where(nothing, 0.0, highest)), 0)
    return highest + tl.log(tl.where(nothing, 1.0, total))


@triton.jit
def best_of_part(logits, best, weight, vocabulary, row_stride, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The best of one part of a row, packed, and the logarithm of its sum.

    best: (rows, parts, K) int64; weight: (rows, parts) float32.
    """
    row = tl.program_id(0)
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = ids < vocabulary
    values = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=there, other=float("-inf")).to(tl.float32)
    tl.store(weight + place, log_of_sum(values))
    left = tl.where(there, packed(values, ids), NOTHING)
    for rank in range(K):
        first = tl.max(left, 0)
        tl.store(best + place * K + rank, first)
        left = tl.where(left == first, NOTHING, left)


@triton.jit
def best_of_row(
    best, weight, logprobs, ids, parts,
    K: tl.constexpr, CANDIDATES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The best of a row's parts, with their log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PARTS)
    weights = tl.load(weight + row * parts + number, mask=number < parts, other=float("-inf"))
    total = log_of_sum(weights)
    candidate = tl.arange(0, CANDIDATES)
    left = tl.load(best + row * parts * K + candidate, mask=candidate < parts * K, other=NOTHING)
    for rank in range(K):
        first = tl.max(left, 0)
        tl.store(logprobs + row * K + rank, logit_of(first) - total)
        tl.store(ids + row * K + rank, id_of(first))
        left = tl.where(left == first, NOTHING, left)


def launch_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_k.top_k`."""
    rows, vocabulary = logits.shape
    columns = min(COLUMNS, triton.next_power_of_2(max(vocabulary, k)))
    parts = triton.cdiv(vocabulary, columns)
    best = torch.empty(rows, parts, k, dtype=torch.int64, device=logits.device)
    weight = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    logprobs = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    best_of_part[rows, parts](logits, best, weight, vocabulary, logits.stride(0), K=k, COLUMNS=columns)
    best_of_row[rows,](
        best, weight, logprobs, ids, parts,
        K=k, CANDIDATES=triton.next_power_of_2(parts * k), PARTS=triton.next_power_of_2(parts), num_warps=8,
    )  # fmt: skip
    return logprobs, ids
