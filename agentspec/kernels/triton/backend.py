"""Whether Triton computes, or the twins in torch: one answer for each kind of device, said in the log."""

import logging
from functools import cache
from importlib.util import find_spec

from torch import Tensor

logger = logging.getLogger(__name__)


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels run on the device of `tensor`; otherwise their twins do."""
    return device_runs_triton(tensor.device.type)


@cache
def device_runs_triton(device: str) -> bool:
    """`runs_triton` for a kind of device; says why not."""
    if find_spec("triton") is None:
        logger.warning("kernels on %s run in torch: Triton is not installed (extra `gpu`)", device)
        return False
    if device == "cuda" or interpreting():
        return True
    logger.info("kernels on %s run in torch: Triton needs a GPU", device)
    return False


def interpreting() -> bool:
    """Whether Triton's own interpreter runs the kernels, on the CPU; Triton reads `TRITON_INTERPRET`."""
    import triton

    return bool(triton.knobs.runtime.interpret)
