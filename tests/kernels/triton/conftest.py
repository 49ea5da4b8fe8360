"""Where kernels are tested: in Triton's interpreter by default, on a GPU with `TRITON_INTERPRET=0 pytest -m gpu`."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A device that Triton runs on."""
    pytest.importorskip("triton")
    import torch

    from agentspec.kernels.triton.backend import interpreting

    name = str(request.param)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if interpreting() != (name == "cpu"):
        pytest.skip("the interpreter is for the CPU: set TRITON_INTERPRET")
    return name
