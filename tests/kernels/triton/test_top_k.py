"""The likeliest tokens equal those of the twin, to the order of equal ones."""

import pytest
import torch

from agentspec.errors import KernelError
from agentspec.kernels.triton.top_k import top_k, top_k_reference


@pytest.mark.parametrize(("vocabulary", "k", "dtype"), [
    *((*sizes, torch.float32) for sizes in ((1, 1), (5, 5), (4095, 3), (4096, 8), (4097, 8), (4100, 12), (9000, 1))),
    (4097, 4, torch.float16),
    (4097, 4, torch.bfloat16),
])  # fmt: skip
def test_the_kernel_equals_its_twin(vocabulary: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Rounded logits: many are equal, the sign of zero included."""
    noise = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, vocabulary, generator=noise).mul(3).round()
    logits[0] = torch.where(torch.arange(vocabulary) % 2 == 0, 0.0, -0.0)
    logits[1, ::2] = -torch.inf
    logits[1, 0] = 1e30 if dtype != torch.float16 else 6e4
    logits = logits.to(device, dtype)
    values, ids = top_k(logits, k)
    expected, its = top_k_reference(logits, k)
    assert torch.equal(ids, its)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=2e-5)


def test_rows_that_are_not_side_by_side(device: str) -> None:
    logits = torch.randn(4, 2, 50, generator=torch.Generator().manual_seed(0)).to(device)[:, 1]
    values, ids = top_k(logits, 9)
    expected, its = top_k_reference(logits, 9)
    assert torch.equal(ids, its)
    torch.testing.assert_close(values, expected)


def test_shapes_that_are_refused() -> None:
    with pytest.raises(KernelError, match="k must be 1 to 7, got 8"):
        top_k(torch.zeros(2, 7), 8)
    with pytest.raises(KernelError, match="k must be 1 to 128, got 0"):
        top_k(torch.zeros(2, 700), 0)
    with pytest.raises(KernelError, match="ids side by side"):
        top_k(torch.zeros(7), 1)
    assert top_k(torch.zeros(0, 7), 2)[0].shape == (0, 2)
