"""What a GGUF file says about positions and attention and transformers' reader drops: put back, or refused."""

from pathlib import Path
from typing import Any

import gguf

from agentspec.engine.decoder import FAMILIES
from agentspec.errors import ModelError

LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models of a family whose queries are scaled by hidden size over heads; no field of a file says so."""


class Fields:
    """Fields of a GGUF file by their names without the architecture, and its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = gguf.GGUFReader(path)
        architecture = self._reader.fields["general.architecture"].contents()
        self._prefix = f"{architecture}."
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, name: str) -> Any:
        """The value of a field; None where there is none."""
        field = self._reader.fields.get(self._prefix + name)
        return None if field is None else field.contents()

    def numbers(self, name: str) -> list[float] | None:
        """A tensor as a list; None where there is none."""
        tensor = self.tensors.get(name)
        return None if tensor is None else [float(value) for value in tensor.data]


def restore(config: Any, path: Path) -> None:
    """Completes the configuration that transformers read from a GGUF file, for the families that the compiled decoder
    knows. Raises `ModelError` where it cannot."""
    if config.model_type not in FAMILIES:
        return
    fields = Fields(path)
    restore_positions(config, fields)
    if config.model_type == "phi3":
        config.sliding_window = fields.get("attention.sliding_window") or None
    if config.num_hidden_layers == LARGEST.get(config.model_type):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def restore_positions(config: Any, fields: Fields) -> None:
    """Rotary positions: how much of a head they turn, and by which angles."""
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = fields.get("rope.dimension_count") or head
    if config.model_type == "phi3":
        parameters["partial_rotary_factor"] = turned / head
    elif turned != head:
        raise ModelError(f"{fields.path}: positions that turn {turned} of {head} numbers of a head are not supported")
    parameters.update(scaling(config, fields))
    if parameters["rope_type"] == "longrope" and config.model_type == "phi3":
        config.original_max_position_embeddings = parameters["original_max_position_embeddings"]


def scaling(config: Any, fields: Fields) -> dict[str, Any]:
    """The rotary parameters of transformers for what the file says of scaling; none of nothing."""
    kind, factor = fields.get("rope.scaling.type"), fields.get("rope.scaling.factor")
    original = fields.get("rope.scaling.original_context_length") or config.max_position_embeddings
    short, long = fields.numbers("rope_factors_short.weight"), fields.numbers("rope_factors_long.weight")
    if short is not None and long is not None:
        return longrope(short, long, original, fields.get("rope.scaling.attn_factor"))
    whole = fields.numbers("rope_freqs.weight")
    if whole is not None:
        return longrope(whole, whole, config.max_position_embeddings, 1.0)
    if kind in (None, "none"):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{fields.path}: positions of kind {kind} are not supported")


def longrope(short: list[float], long: list[float], original: int, attention: float | None) -> dict[str, Any]:
    """Angles divided by a factor each, by others beyond `original` positions; Llama 3's are such, with the same
    factors everywhere."""
    parameters = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    return parameters if attention is None else {**parameters, "attention_factor": attention}
