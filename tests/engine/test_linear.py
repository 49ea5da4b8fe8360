import pytest
import torch
from torch import nn

from agentspec.engine.linear import FirstOfFused, PackedLinear, prepack


@pytest.mark.parametrize("shape", [(576, 192), (64, 512), (33, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_rows_are_the_same_bits_whatever_their_number(shape: tuple[int, int], bias: bool) -> None:
    linear = nn.Linear(*shape, bias=bias)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(64, shape[0])
    together = packed(x)
    torch.testing.assert_close(together, linear(x), atol=1e-5, rtol=1e-5)
    for rows in (1, 2, 3, 8, 16, 33):
        assert torch.equal(packed(x[:rows]), together[:rows]), rows


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = nn.Linear(16, 8, bias=bias)
        self.v_proj = nn.Linear(16, 8, bias=bias)
        self.o_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out: torch.Tensor = self.o_proj(q + torch.cat([k, v, k + v], dim=-1))
        return out


@pytest.mark.parametrize("bias", [False, True])
def test_prepacking_fuses_siblings_and_keeps_the_result(bias: bool) -> None:
    module = nn.Sequential(Attention(bias), Attention(bias))
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = module(x)
        prepack(module)
        after = module(x)
    assert isinstance(module[0].q_proj, FirstOfFused)
    assert isinstance(module[0].o_proj, PackedLinear)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert not any(isinstance(m, nn.Linear) for m in module.modules())


def test_a_bias_of_one_projection_only_is_kept() -> None:
    torch.manual_seed(2)
    first, second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 6, bias=False)
    x = torch.randn(3, 8)
    fused = FirstOfFused([first, second])
    torch.testing.assert_close(fused(x), first(x))
    torch.testing.assert_close(fused.rest[0](x), second(x))
