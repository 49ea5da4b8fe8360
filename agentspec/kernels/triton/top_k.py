"""The likeliest tokens of each row with their log-probabilities, for drafters."""

import torch
from torch import Tensor

from agentspec.errors import KernelError
from agentspec.kernels.triton.backend import runs_triton

MOST = 128
"""Tokens of a row that can be asked for."""


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(rows, k) float32 log-probabilities, highest first, and (rows, k) int32 ids; of equal logits the lower id first.

    logits: (rows, vocabulary). Log-probabilities are normalised over the whole vocabulary, in float32.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise KernelError(f"logits must be (rows, vocabulary), ids side by side, got {tuple(logits.shape)}")
    if not 1 <= k <= min(MOST, logits.shape[1]):
        raise KernelError(f"k must be 1 to {min(MOST, logits.shape[1])}, got {k}")
    if logits.shape[0] == 0 or not runs_triton(logits):
        return top_k_reference(logits, k)
    from agentspec.kernels.triton.top_k_triton import launch_top_k

    return launch_top_k(logits, k)


def top_k_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_k`, by sorting."""
    exact = logits.float()
    ids = torch.sort(exact, dim=-1, descending=True, stable=True).indices[:, :k]
    return exact.log_softmax(-1).gather(1, ids), ids.to(torch.int32)
