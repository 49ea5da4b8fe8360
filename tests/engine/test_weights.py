"""Weights of every floating type and of none: computed as transformers computes them in float32, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SiglipVisionConfig,
)

from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.target import Target
from agentspec.errors import ModelError
from tests.engine.tiny_models import SIZES, VOCABULARY, by_transformers, made, made_with

TOKENS = tuple((7 * i) % VOCABULARY for i in range(30))


def logits_of(target: Target) -> torch.Tensor:
    return target.forward(
        [Segment(PageTable(target.shape), TOKENS, tuple(range(len(TOKENS))), None)], range(len(TOKENS))
    )


def stored(model: PreTrainedModel, folder: Path, dtype: Callable[[str], torch.dtype], shard: str = "1GB") -> None:
    """Saves a model with each weight in the type that `dtype` says."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype(name))
    model.save_pretrained(folder, max_shard_size=shard)


KINDS: dict[str, Callable[[str], torch.dtype]] = {
    "float32": lambda name: torch.float32,
    "bfloat16": lambda name: torch.bfloat16,
    "float16": lambda name: torch.float16,
    "mixed": lambda name: torch.float32 if "norm" in name else torch.float16 if "mlp" in name else torch.bfloat16,
}


@pytest.mark.parametrize("shard", ["1GB", "100KB"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma 3"])
def test_weights_of_every_floating_type_are_computed_in_float32(
    tmp_path: Path, family: str, kind: str, shard: str
) -> None:
    model = made(family)
    stored(model, tmp_path, KINDS[kind], shard)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard == "100KB")
    target = Target.load(tmp_path)
    assert target.decoder is not None
    expected = by_transformers(model.float(), TOKENS)
    torch.testing.assert_close(logits_of(target), expected, atol=5e-5, rtol=1e-5)


def test_the_language_model_of_one_that_sees_images_is_taken(tmp_path: Path) -> None:
    text = made("gemma 3")
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    make_config: Any = Gemma3Config
    config = make_config(text_config=text.config, vision_config=vision, mm_tokens_per_image=4, eos_token_id=[1, 7])
    whole: Any = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(tmp_path)
    target = Target.load(tmp_path)
    assert target.decoder is not None
    assert target.model.config.eos_token_id == [1, 7]  # type: ignore[union-attr]
    torch.testing.assert_close(logits_of(target), by_transformers(text, TOKENS), atol=5e-5, rtol=1e-5)


def changed_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def fp8(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in blocks of fp8 numbers, and what each block is multiplied with; zeros fill the last ones up."""
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, block, columns, block).abs().amax((1, 3)) / 448
    grid = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / grid).to(torch.float8_e4m3fn), scales


def stored_in_fp8(folder: Path, block: int, **changes: Any) -> Any:
    """Saves a model with fp8 projections; returns the one that it stands for."""
    model = made_with(LlamaConfig, LlamaForCausalLM, **{"intermediate_size": 96, **changes})
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in model.state_dict().items():
        if "proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8(weight, block)
            grid = tensors[f"{name}_scale_inv"].repeat_interleave(block, 0).repeat_interleave(block, 1)
            weight.copy_(tensors[name].float() * grid[: weight.shape[0], : weight.shape[1]])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    changed_config(folder, quantization_config=method)
    return model


def test_fp8_weights_are_unpacked(tmp_path: Path) -> None:
    model = stored_in_fp8(tmp_path, 32)
    target = Target.load(tmp_path)
    assert target.decoder is not None
    torch.testing.assert_close(logits_of(target), by_transformers(model, TOKENS), atol=5e-5, rtol=1e-5)


def test_fp8_weights_that_end_within_a_block_are_refused(tmp_path: Path) -> None:
    """Transformers divides 72 rows into three blocks of 24 where they were quantised in two of 32 and one of 8."""
    stored_in_fp8(tmp_path, 32, intermediate_size=72)
    with pytest.raises(ModelError, match=r"blocks of \[32, 32\] that do not fill its \[128, 72\]"):
        Target.load(tmp_path)


def test_fp8_weights_whose_configuration_says_nothing_are_refused(tmp_path: Path) -> None:
    stored_in_fp8(tmp_path, 32)
    changed_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelError, match="weight_scale_inv and 20 more, which the model has no use for"):
        Target.load(tmp_path)


METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
    "bitnet": {"quant_method": "bitnet"},
    "mxfp4": {"quant_method": "mxfp4"},
    "gemma": {"quant_method": "gemma"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "a method without a name": {"bits": 4},
}


@pytest.mark.parametrize("method", METHODS)
def test_other_quantised_weights_are_refused_with_what_to_do(tiny_model: Path, tmp_path: Path, method: str) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    changed_config(tmp_path, quantization_config=METHODS[method])
    with pytest.raises(ModelError, match=f"quantised with {method} are not read here .* or a GGUF file"):
        Target.load(tmp_path)


@pytest.mark.parametrize("part", ["text_config", "compression_config"])
def test_quantised_weights_are_found_wherever_they_are_told(tiny_model: Path, tmp_path: Path, part: str) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    told = METHODS["gptq"]
    changed_config(tmp_path, **{part: {"quantization_config": told} if part == "text_config" else told})
    with pytest.raises(ModelError, match="quantised with gptq"):
        Target.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.layers.1.mlp.up_proj.bias", 72, r"hold model\.layers\.1\.mlp\.up_proj\.bias"),
        ("model.layers.1.mlp.up_proj.weight_scale", 1, r"hold model\.layers\.1\.mlp\.up_proj\.weight_scale"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(
    tmp_path: Path, name: str, new: int | None, message: str
) -> None:
    made_with(LlamaConfig, LlamaForCausalLM, **SIZES).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if new is None:
        del tensors[name]
    else:
        tensors[name] = torch.ones(new)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        Target.load(tmp_path)


def test_what_no_layer_computes_with_may_be_left_over(tmp_path: Path) -> None:
    model = made_with(LlamaConfig, LlamaForCausalLM)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(Target.load(tmp_path)), by_transformers(model, TOKENS), atol=5e-5, rtol=1e-5)
