"""What passes read: records of a model, of its layers and of one pass, shared by Python and compiled code."""

from typing import Any

import numpy as np


def record(**fields: str) -> np.dtype[Any]:
    """A record of named fields."""
    return np.dtype(list(fields.items()))


MODEL = record(
    hidden="i8",
    width="i8",
    heads="i8",
    kv_heads="i8",
    dim="i8",
    rotary="i8",
    inner="i8",
    vocabulary="i8",
    layers="i8",
    embedding="i8",
    embedding_lanes="i8",
    quantised="i8",
    gelu="i8",
    norm="i8",
    head="i8",
    inverse_hidden="f4",
    epsilon="f4",
    inverse_dim="f4",
    scaling="f4",
    embedding_scale="f4",
    score_cap="f4",
    logit_cap="f4",
)
"""A model's extents and the addresses of what all layers share. `width` is `hidden` filled up to whole vectors;
`rotary` is how many of a head's `dim` floats positions turn; `quantised` is 1 where matrices are of 8-bit numbers,
`gelu` where the MLP's gate is one in place of a silu; caps are 0 where there are none."""

LAYER = record(
    norm="i8",
    qkv="i8",
    qkv_bias="i8",
    query_norm="i8",
    key_norm="i8",
    output="i8",
    output_bias="i8",
    output_norm="i8",
    mlp_norm="i8",
    gate_up="i8",
    gate_up_bias="i8",
    down="i8",
    down_bias="i8",
    down_norm="i8",
    window="i8",
    cosine="i8",
    sine="i8",
)
"""Addresses of a layer's weights, 0 for what it lacks, its attention's window, 0 for none, and the addresses of the
positions' cosines and sines, 0 where positions do not turn its queries and keys."""

CALL = record(
    rows="i8",
    kept="i8",
    segments="i8",
    tokens="i8",
    positions="i8",
    owners="i8",
    keep="i8",
    segment="i8",
    x="i8",
    qkv="i8",
    attended="i8",
    inner="i8",
    logits="i8",
    normed="i8",
    products="i8",
    quantised="i8",
    quantised_bytes="i8",
    tiles="i8",
    scores="i8",
    score_stride="i8",
    paths="i8",
    path_bytes="i8",
    queries="i8",
    sums="i8",
    tops="i8",
    totals="i8",
    chunks="i8",
    own_sums="i8",
    own_sums_bytes="i8",
    claims="i8",
    sync="i8",
)
"""One pass: numbers of rows and the addresses of their input, of its result and of the memory it works in."""

FIRST, COUNT, LENGTH, PAGES, PARENTS = range(5)
"""Columns of a segment: its first row, its rows, its cached positions, the address of the list of its pages' addresses,
the address of its rows' parents (0 for a chain)."""

SEGMENT_FIELDS = 5
