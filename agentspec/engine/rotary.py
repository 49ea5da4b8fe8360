"""Rotary positions: how far they reach, and the angles by which they turn queries and keys."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agentspec.kernels.cpu.decoder import Floats

log = logging.getLogger(__name__)

KINDS = {"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"}
"""Kinds whose angles depend on the position alone; those of `longrope` and `dynamic` do up to `reach`."""

Table = tuple[Floats, Floats]
"""Cosines and sines, (positions, turned numbers of a head / 2) each."""


def parameter_sets(config: Any) -> Sequence[Mapping[str, Any]]:
    """A configuration's rotary parameters: one set, one for each type of layer, or none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [each for each in parameters.values() if isinstance(each, Mapping)]


def reach(config: Any) -> int:
    """Positions that a model is computed for.

    LongRoPE (Ding et al. 2024, arXiv:2402.13753) has two sets of angles, and a sequence that grows beyond the original
    length takes the other one for all of its positions: whatever is kept of it would be void. `dynamic` would change
    its angles only beyond `max_position_embeddings`.
    """
    window: int = config.max_position_embeddings
    for parameters in parameter_sets(config):
        if parameters.get("rope_type") == "longrope":
            window = min(window, parameters["original_max_position_embeddings"])
    if window < config.max_position_embeddings:
        log.warning(
            "the window is %d tokens and not %d: beyond, longrope turns all positions of a sequence anew",
            window,
            config.max_position_embeddings,
        )
    return window


def kinds(rotary: Any) -> Mapping[str | None, str]:
    """Kinds of rotary positions by type of layer; one for None where all layers have the same."""
    kind = rotary.rope_type
    return kind if isinstance(kind, Mapping) else {None: kind}


def angles(rotary: Any, window: int) -> dict[str | None, Table]:
    """The angles of every position up to `window`, by type of layer as `kinds` has it."""
    tables = {}
    for layer_type in kinds(rotary):
        chosen = () if layer_type is None else (layer_type,)
        cosine, sine = rotary(torch.zeros(1), torch.arange(window).unsqueeze(0), *chosen)
        half = cosine.shape[-1] // 2
        tables[layer_type] = (cosine[0, :, :half].contiguous().numpy(), sine[0, :, :half].contiguous().numpy())
    return tables


def turned(rotary: Any) -> set[int]:
    """How many of a head's numbers positions turn: one number, but for a model whose layers differ."""
    return {2 * cosine.shape[1] for cosine, _ in angles(rotary, 1).values()}
