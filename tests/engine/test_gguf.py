"""GGUF files of tiny models: what is read from them computes what the model computed that they were written of."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentspec.engine.attention import Segment
from agentspec.engine.convert import read_model, save_config, save_weights
from agentspec.engine.kv import PageTable
from agentspec.engine.target import Target
from agentspec.errors import ModelError
from tests.engine.tiny_models import LINEAR, LLAMA3, VOCABULARY, YARN, by_transformers, gemma3, longrope, made_with

TOKENS = tuple((7 * i) % VOCABULARY for i in range(60))
KINDS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16, "8 bits": Kind.Q8_0, "4 bits": Kind.Q4_0}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "phi3": gguf.MODEL_ARCH.PHI3}


def write(model: Any, path: Path, kind: Kind = Kind.F32, **fields: Any) -> Any:
    """Writes a model as llama.cpp's converter does; returns it with its matrices as the file's blocks have them.

    `fields` are by their names without the architecture; arrays become tensors.
    """
    config = model.config
    name = config.model_type.removesuffix("_text")
    architecture = ARCHITECTURES.get(name, gguf.MODEL_ARCH.GEMMA3)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {"rope.dimension_count": head, "rope.freq_base": 10000.0} | fields
    for field, value in fields.items():
        add_field(writer, name, field, value)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            base, _, suffix = key.rpartition(".")
            stored = rounded(weight, kind) if weight.ndim == 2 else weight
            weight.copy_(stored)
            data = permuted(key, stored, config) if name == "llama" else stored
            data = data + 1 if name == "gemma3" and "norm" in key else data
            blocks = gguf.quantize(data.numpy(), kind if weight.ndim == 2 else Kind.F32)
            writer.add_tensor(f"{names.get_name(base)}.{suffix}", blocks, raw_dtype=kind if weight.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_field(writer: Any, architecture: str, field: str, value: Any) -> None:
    """A field of the type that its value has, or a tensor."""
    if isinstance(value, list):
        writer.add_tensor(field, np.asarray(value, np.float32))
    elif isinstance(value, str):
        writer.add_string(f"{architecture}.{field}", value)
    elif isinstance(value, float):
        writer.add_float32(f"{architecture}.{field}", value)
    else:
        writer.add_uint32(f"{architecture}.{field}", value)


def rounded(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """What is left of a matrix in blocks of a kind."""
    return torch.from_numpy(np.array(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))


def permuted(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Llama's queries and keys, whose halves lie interleaved in GGUF files."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for name, count in heads.items() if name in key), None)
    if count is None:
        return weight
    return weight.view(count, 2, weight.shape[0] // count // 2, -1).transpose(1, 2).reshape(weight.shape)


def read(path: Path, folder: Path) -> Target:
    """The target of a converted file; its tokenizer is left out."""
    model = read_model(path)
    save_weights(model, folder / "model.safetensors", path)
    save_config({**model.config.to_dict(), "architectures": [type(model).__name__]}, 1, folder)
    return Target.load(folder)


def check(model: Any, path: Path, folder: Path) -> None:
    target = read(path, folder)
    assert target.decoder is not None
    tokens = TOKENS[: target.window]
    segment = Segment(PageTable(target.shape), tokens, tuple(range(len(tokens))), None)
    logits = target.forward([segment], range(len(tokens)))
    torch.testing.assert_close(logits, by_transformers(model, tokens), atol=1e-4, rtol=1e-4)


WIDE = {"intermediate_size": 96}
"""Rows in whole blocks of 32."""


def llama(**changes: Any) -> Any:
    return made_with(LlamaConfig, LlamaForCausalLM, **WIDE, **changes)


def phi3(**changes: Any) -> Any:
    """With a vocabulary that holds the token that pads, which is the same in all GGUF files."""
    return made_with(Phi3Config, Phi3ForCausalLM, **WIDE, vocab_size=32064, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind(tmp_path: Path, kind: str) -> None:
    model = write(made_with(Qwen2Config, Qwen2ForCausalLM, **WIDE), tmp_path / "m.gguf", KINDS[kind])
    check(model, tmp_path / "m.gguf", tmp_path)


def test_gemma_3(tmp_path: Path) -> None:
    positions = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    model = gemma3(rope_parameters=positions, query_pre_attn_scalar=256, sliding_window_pattern=6, num_hidden_layers=6)
    fields = {"attention.key_length": 32, "attention.sliding_window": 19, "rope.freq_base": 1e6}
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    check(write(model, tmp_path / "m.gguf", **fields, **scaled), tmp_path / "m.gguf", tmp_path)


def test_phi_4_mini(tmp_path: Path) -> None:
    positions = longrope(24, 40, partial_rotary_factor=0.75)
    model = phi3(tie_word_embeddings=True, sliding_window=11, **positions)
    write(
        model,
        tmp_path / "m.gguf",
        **{
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 40,
            "rope_factors_short.weight": positions["rope_parameters"]["short_factor"],
            "rope_factors_long.weight": positions["rope_parameters"]["long_factor"],
            "attention.sliding_window": 11,
        },
    )
    check(model, tmp_path / "m.gguf", tmp_path)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"rope_type": "default", "rope_theta": 10000.0}, {}),
    "linear": (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    "yarn": (
        YARN,
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_positions_are_scaled_as_the_file_says(tmp_path: Path, name: str) -> None:
    parameters, fields = SCALINGS[name]
    check(write(llama(rope_parameters=parameters), tmp_path / "m.gguf", **fields), tmp_path / "m.gguf", tmp_path)


def test_the_frequencies_of_llama_3(tmp_path: Path) -> None:
    model = llama(rope_parameters={**LLAMA3, "rope_theta": 10000.0})
    plain = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq).tolist()
    write(model, tmp_path / "m.gguf", **{"rope_freqs.weight": factors})
    check(model, tmp_path / "m.gguf", tmp_path)
    assert max(factors) == pytest.approx(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "positions of kind longrope"),
        ({"rope.dimension_count": 16}, "turn 16 of 32 numbers"),
    ],
)
def test_positions_that_would_come_out_wrong_are_refused(tmp_path: Path, fields: Any, message: str) -> None:
    write(made_with(Qwen2Config, Qwen2ForCausalLM, **WIDE), tmp_path / "m.gguf", **fields)
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path / "m.gguf")


def test_biases_that_nobody_adds_are_refused(tmp_path: Path) -> None:
    write(llama(attention_bias=True), tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="the file has 12 biases, of which llama models know 0"):
        read_model(tmp_path / "m.gguf")
