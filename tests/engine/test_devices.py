"""The device that the settings ask for: found, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.config import Config, Dtype, EngineConfig, ModelConfig, load
from agentspec.engine.devices import load_target
from agentspec.engine.placement import chosen_device
from agentspec.engine.target import Target
from agentspec.errors import ConfigError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def config_of(device: str, dtype: Dtype = Dtype.FLOAT32, **engine: Any) -> Config:
    return Config(ModelConfig(dtype=dtype), EngineConfig(device=device, **engine))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that it sees two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:one", "cuda:1.5", "CPU", "cuda:N", ""])
def test_a_device_that_there_cannot_be_is_named(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"AGENTSPEC_ENGINE_DEVICE must be auto or cpu or cuda or cuda:N, got '{text}'"
    ):
        load({"AGENTSPEC_ENGINE_DEVICE": text})


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_are_read_from_the_environment(text: str) -> None:
    assert load({"AGENTSPEC_ENGINE_DEVICE": text}).engine.device == text


@without_gpu
def test_a_gpu_that_is_absent_is_named_and_auto_does_without() -> None:
    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"AGENTSPEC_ENGINE_DEVICE is '{wanted}': torch sees no GPU"):
            chosen_device(config_of(wanted))
    for wanted in ("auto", "cpu"):
        assert chosen_device(config_of(wanted)) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_taken_where_it_is_asked_for_or_can_be_used() -> None:
    pytest.importorskip("triton")
    found = {wanted: str(chosen_device(config_of(wanted))) for wanted in ("auto", "cpu", "cuda", "cuda:1")}
    assert found == {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda:1"}
    with pytest.raises(ConfigError, match="'cuda:2': torch sees 2 GPUs, numbered from 0"):
        chosen_device(config_of("cuda:2"))
    with pytest.raises(ConfigError, match="'cuda': int8 is for the CPU"):
        chosen_device(config_of("cuda", Dtype.INT8))
    assert chosen_device(config_of("auto", Dtype.INT8)) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.engine.placement.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Triton is not installed \(extra `gpu`\)"):
        chosen_device(config_of("cuda"))
    assert chosen_device(config_of("auto")) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_trees_that_the_kernels_cannot_walk_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="AGENTSPEC_ENGINE_MAX_DRAFT_TOKENS must be below 256 on a GPU, got 256"):
        load_target(tmp_path, config_of("cuda", max_draft_tokens=256))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_half_precision_needs_a_gpu(dtype: Dtype, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=f"AGENTSPEC_MODEL_DTYPE is {dtype}: that needs a GPU"):
        load_target(tiny_model, config_of("cpu", dtype))


def test_on_the_cpu_the_target_is_the_cpus(tiny_model: Path) -> None:
    assert isinstance(load_target(tiny_model, config_of("cpu")), Target)
