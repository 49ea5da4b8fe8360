"""The lossless walk: every visited node emits the target's own choice; drafts decide only how far one pass goes.

With deterministic proposals this coupled rule is exact for greedy and for sampled output alike, and accepts as
much as any exact rule can (Leviathan et al. 2023, Chen et al. 2023 for chains; one draw per node for trees).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from agentspec.types import DraftTree, SamplingParams


@dataclass(frozen=True, slots=True)
class Walk:
    """Result of verifying one tree."""

    path: tuple[int, ...]
    """Visited nodes, the root first; their keys and values become part of the sequence."""

    tokens: tuple[int, ...]
    """One token per visited node: the accepted drafts, then the target's own last one."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a target may choose by itself the tokens after a sequence's rows: nothing else has a say in them."""

    sampling: SamplingParams

    position: int
    """Number of the completion's token that follows the sequence's first row."""


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a pass gave."""

    logits: Tensor
    """(kept rows, vocabulary) float32 on the target's device; valid until its next pass."""

    walks: tuple[Walk | None, ...]
    """For each segment, the walk that the target made by itself, whose rows it has moved behind the committed ones
    already; None where the host has to walk."""


def walk(tree: DraftTree, choice: Callable[[int, int], int]) -> Walk:
    """Follow the target's choices through the tree.

    `choice(node, depth)` is the target's token after `node`; it is asked for visited nodes only, in order.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parent, tree.token, strict=True))}
    path, tokens = [0], []
    while True:
        node = path[-1]
        tokens.append(choice(node, tree.depth[node]))
        following = child.get((node, tokens[-1]))
        if following is None:
            return Walk(tuple(path), tuple(tokens))
        path.append(following)
