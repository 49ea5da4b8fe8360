"""The device that the settings ask for, judged before anything is loaded."""

from importlib.util import find_spec

import torch

from agentspec.config import Config, Dtype
from agentspec.errors import ConfigError
from agentspec.kernels.triton.batch import MOST_NODES

DEVICE = "AGENTSPEC_ENGINE_DEVICE"


def chosen_device(config: Config) -> torch.device:
    """The device of the settings; `auto` is the GPU where one can be used. Raises `ConfigError` where it is absent and
    for what it cannot do."""
    wanted, dtype = config.engine.device, config.model.dtype
    obstacle = obstacle_to_gpu(wanted, dtype)
    if wanted == "cpu" or (wanted == "auto" and obstacle):
        if dtype in (Dtype.FLOAT16, Dtype.BFLOAT16):
            raise ConfigError(f"AGENTSPEC_MODEL_DTYPE is {dtype}: that needs a GPU, and {DEVICE} leads to the CPU")
        return torch.device("cpu")
    if obstacle:
        raise ConfigError(f"{DEVICE} is {wanted!r}: {obstacle}")
    most = config.engine.max_draft_tokens
    if most >= MOST_NODES:
        raise ConfigError(f"AGENTSPEC_ENGINE_MAX_DRAFT_TOKENS must be below {MOST_NODES} on a GPU, got {most}")
    return torch.device("cuda" if wanted == "auto" else wanted)


def obstacle_to_gpu(wanted: str, dtype: Dtype) -> str | None:
    """Why the wanted GPU cannot be used; None where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    number, count = int(wanted.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= count:
        return f"torch sees {count} GPU{'s' if count > 1 else ''}, numbered from 0"
    if find_spec("triton") is None:
        return "Triton is not installed (extra `gpu`)"
    if dtype == Dtype.INT8:
        return "int8 is for the CPU"
    return None
