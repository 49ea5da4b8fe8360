"""Constants of the estimate of P(next token | context), fitted on recorded agent runs by `bench/fit.py`.

An index offers one *level* per matched context length: the tokens that followed the context, with counts. Levels are
visited from the longest context to the shortest. Each takes the share sigmoid(w . x) of what the longer ones left,
where x describes how long the context is, how often it occurred and how many different tokens followed.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.types import Origin

OWN, SHARED, SCAFFOLD, PREDICTION, CORPUS = 0, 1, 2, 3, 4
"""Kinds of index: of the trajectory itself, over its scope, of what a request's tools fix, of the text it predicts, and
static corpora."""

ORIGINS: NDArray[np.int32] = np.array(
    [Origin.TRAJECTORY, Origin.SCOPE, Origin.SCAFFOLD, Origin.PREDICTION, Origin.CORPUS], np.int32
)
"""The origin that nodes of each kind have."""

WEIGHTS: NDArray[np.float64] = np.array(
    [
        [-1.250, -0.422, 0.836, -0.902, 0.763, 0.559, 0.343, 6.096],
        [-1.086, -0.419, 0.781, -0.771, 0.434, 0.566, 0.565, 2.507],
        [-2.089, -0.968, 0.602, -0.415, 0.328, 1.230, 0.384, 0.247],
        [-1.575, 0.060, 0.474, -0.385, 0.213, 0.398, 0.509, 0.468],
        [-3.220, -0.603, 0.650, -0.796, -0.244, 0.755, 0.400, 1.057],
        [-3.617, 0.012, 0.947, -0.820, -0.013, 0.381, 0.684, 0.840],
        [-1.662, -0.416, 0.832, -0.792, 0.820, 0.090, 0.815, 1.994],
        [-1.274, -0.284, 1.025, -1.015, 0.510, 0.272, 0.506, 1.874],
        [-2.589, -0.968, 0.602, -0.415, 0.328, 1.230, 0.384, 0.247],
        [-2.075, 0.060, 0.474, -0.385, 0.213, 0.398, 0.509, 0.468],
    ]
)
"""Rows: own shorter contexts, own longest context, shared shorter ones, shared longest one; the same of scaffolds, of
predictions and of corpora, which were not fitted: shared ones with much less trust, own ones as they are, and shared
ones with a little less trust.

Columns: constant, log of the length, log of the occurrences, log of the number of followers, 1 if there is one
follower, log of the span, that again if there is one follower; last the weight of the most recent follower beside the
counts. The span is how many tokens the next shorter context that occurs more often is shorter.
"""

LOGS: NDArray[np.float64] = np.log(np.maximum(np.arange(1025), 1))
"""Logarithms of counts; 1024 stands for all larger ones."""

LONG = 32
"""Lengths and spans count up to so many tokens."""

SOLE = 1.7
"""A token without a rival is accepted length / (length + `SOLE`) of the time, or what its contexts say if more. The
only follower of a context that is long and has a long span is accepted span / (span + `SOLE`) of the time."""

ENDING = 0.03
"""A value that a scaffold leaves open ends at a token that can follow it this part of the time."""
