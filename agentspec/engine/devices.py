"""The target on the device that the settings ask for."""

import logging
from pathlib import Path

import torch

from agentspec.config import Config
from agentspec.engine.placement import chosen_device, obstacle_to_gpu
from agentspec.engine.target import AnyTarget, Target

log = logging.getLogger(__name__)


def load_target(folder: Path, config: Config) -> AnyTarget:
    """The model of a folder on the configured device. Raises `ConfigError` for a device that is not there and for what
    it cannot do, `ModelError` for a model that cannot be computed on it."""
    device, wanted, dtype = chosen_device(config), config.engine.device, config.model.dtype
    if device.type == "cpu":
        log.info("computing on the CPU%s", f": {obstacle_to_gpu(wanted, dtype)}" if wanted == "auto" else "")
        return Target.load(folder, dtype)
    log.info("computing on %s, %s", device, torch.cuda.get_device_name(device))
    from agentspec.engine.device_target import DeviceTarget

    return DeviceTarget.load(folder, device, config.engine.kv_bytes, dtype, config.model.home)
