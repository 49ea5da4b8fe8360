"""Constants of the estimate of P(next token | context), fitted on recorded agent runs by `bench/retrieval.py`.

An index offers one *level* per matched context length: the tokens that followed the context, with counts. Levels are
visited from the longest context to the shortest. Each takes the share sigmoid(w . x) of what the longer ones left,
where x describes how long the context is, how often it occurred and how many different tokens followed.
"""

import numpy as np
from numpy.typing import NDArray

OWN, SHARED = 0, 1
"""Kinds of index: of the trajectory itself, and over its scope."""

WEIGHTS: NDArray[np.float64] = np.array(
    [
        [-1.4, 1.3, 0.3, -0.8, 0.0, 0.5],
        [-2.0, 1.3, 0.3, -0.8, 0.0, 0.5],
    ]
)
"""By kind: constant, log of the length, log of the occurrences, log of the number of followers, 1 if there is one
follower only; last the weight of the most recent follower beside the counts."""
