"""Loads a model's weights in float32. Quantised ones are unpacked where that is exact, and refused elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils import logging as transformers_logging

from agentspec.engine.attention import NAME
from agentspec.errors import ModelError

SCALE = "_scale_inv"
"""What the name of an fp8 weight's scales ends with."""


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The language model of a folder with `config.json` and safetensors of any floating type, in `dtype`.

    Raises `ModelError` for what cannot be read, and for weights that are quantised in a way that is not unpacked here.
    """
    quiet_transformers()
    unpacking = unpacking_of(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            output_loading_info=True,
            quantization_config=unpacking,
        )
    except Exception as error:  # whatever a broken or foreign configuration makes its family's code raise
        raise ModelError(f"cannot load a model from {folder}: {error}") from error
    model, report = loaded
    check_report(model, report, folder)
    return text_part(model)


def quiet_transformers() -> None:
    """Leave progress and log lines to AgentSpec."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def unpacking_of(folder: Path) -> Any:
    """How the weights are unpacked while they are loaded; None where they are not quantised."""
    given = quantisation_of(folder)
    if given is None:
        return None
    method = given.get("quant_method")
    if method != "fp8":
        raise ModelError(
            f"{folder}: weights quantised with {method or 'a method without a name'} are not read here (fp8 is, as "
            "float32); take the model as it was before, in float32, bfloat16 or float16, or a GGUF file of it, and "
            "--dtype int8 for speed"
        )
    check_blocks(folder, given.get("weight_block_size"))
    return FineGrainedFP8Config.from_dict({**given, "dequantize": True})  # type: ignore[no-untyped-call]


def quantisation_of(folder: Path) -> Mapping[str, Any] | None:
    """What `config.json` says about quantised weights, if anything; whether it is whole is for transformers to say."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and isinstance(part.get(key), dict):
                return dict(part[key])
    return None


def check_blocks(folder: Path, block: Any) -> None:
    """Refuses fp8 weights that are no whole number of blocks: transformers would take blocks of another size."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in [name for name in tensors.keys() if name.endswith(SCALE)]:  # noqa: SIM118
                scales = tensors.get_slice(name).get_shape()
                shape = tensors.get_slice(name.removesuffix(SCALE)).get_shape()
                if len(scales) == 2 and block and [a * b for a, b in zip(scales, block, strict=True)] != shape:
                    raise ModelError(
                        f"{folder}: {name.removesuffix(SCALE)} is quantised in blocks of {block} that do not fill its "
                        f"{shape}; take the model as it was before, in bfloat16"
                    )


def check_report(model: nn.Module, report: Mapping[str, Any], folder: Path) -> None:
    """Refuses weights that are not those of the model: what lacks would be random, what is left over was meant to
    change the result."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{folder}: the weights lack {listed(missing)}")
    modules = dict(model.named_modules())
    extra = [key for key in sorted(report["unexpected_keys"]) if is_layer(modules.get(key.rpartition(".")[0]))]
    if extra:
        raise ModelError(f"{folder}: the weights hold {listed(extra)}, which the model has no use for")


def is_layer(module: nn.Module | None) -> bool:
    """Whether every tensor that is stored for a module belongs to its computation."""
    return isinstance(module, nn.Linear | nn.Embedding)


def listed(names: list[str]) -> str:
    """The first of some names, and how many others there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def text_part(model: Any) -> Any:
    """The language model of a Gemma 3 that also sees images; any other model as it is."""
    config = model.config
    if config.model_type != "gemma3":
        return model
    with torch.device("meta"):
        part: Any = AutoModelForCausalLM.from_config(config.text_config)  # type: ignore[no-untyped-call]
    part.model, part.lm_head = model.model.language_model, model.lm_head
    part.generation_config = model.generation_config
    part.config.eos_token_id = getattr(config, "eos_token_id", None) or part.config.eos_token_id
    return part
