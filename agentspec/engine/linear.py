"""float32 linears for the CPU: weights reordered once for oneDNN, projections of one input fused into one product.

A prepacked product of a few rows costs little more than that of one row, and gives each row the same bits
whatever the number of rows (measured: `agentspec bench cost`, `tests/engine/test_linear.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED_ROWS = 8
"""Row count that the weight layout is chosen for; layouts for 1 row slow down others many times."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling linears that every decoder family applies to the same input, in calling order."""


class PackedLinear(nn.Module):
    """`nn.Linear` in float32 with its weight held once, in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), EXPECTED_ROWS)
        self.bias = None if bias is None else bias.detach()
        self.out_features = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return product


def joined_bias(linears: Sequence[Any]) -> Tensor | None:
    """The biases of several linears one behind the other, zeros for one that has none; None if none has."""
    if all(linear.bias is None for linear in linears):
        return None
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    return torch.cat([z if x.bias is None else x.bias.detach() for x, z in zip(linears, zeros, strict=True)])


class FirstOfFused(nn.Module):
    """The first of several linears of one input: computes all of them and hands the rest to its siblings."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.all = PackedLinear(torch.cat([linear.weight.detach() for linear in linears]), joined_bias(linears))
        self.rest = [RestOfFused() for _ in linears[1:]]

    def forward(self, x: Tensor) -> Tensor:
        first, *others = torch.split(self.all(x), self.sizes, dim=-1)
        for sibling, value in zip(self.rest, others, strict=True):
            sibling.value = value
        return first


class RestOfFused(nn.Module):
    """A later sibling of a `FirstOfFused`: gives the value that was computed with the first."""

    value: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        value, self.value = self.value, None
        assert value is not None
        return value


def fusable(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether `module` has all of the named linears, and all or none of them have a bias."""
    linears = [getattr(module, name, None) for name in names]
    if not all(isinstance(linear, nn.Linear) for linear in linears):
        return False
    return len({linear.bias is None for linear in linears if isinstance(linear, nn.Linear)}) == 1


def prepack(module: nn.Module) -> None:
    """Replace every linear below `module` by a prepacked one, fusing known siblings. Frees the old weights."""
    for names in FUSED:
        if fusable(module, names):
            linears = [getattr(module, name) for name in names]
            first = FirstOfFused(linears)
            for name, replacement in zip(names, [first, *first.rest], strict=True):
                setattr(module, name, replacement)
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        elif not isinstance(child, FirstOfFused | RestOfFused | PackedLinear):
            prepack(child)
