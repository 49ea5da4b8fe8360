"""Fit the constants of `cache/estimate.py` on recorded runs: how much of the probability a context's followers explain.

    python -m bench.fit trajectories.jsonl.gz [more ...]

Maximises the likelihood of the recorded answers' tokens under the mixture that drafts are made from, over the half of
the tasks that `bench.arctic` does not report on, with as many positions from each file. Needs torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agentspec.cache.automaton import DEGREE, FOLLOWED, LENGTH, LINK, RECENT, Floats, Int32s, Int64s, find
from agentspec.cache.draft import columns
from agentspec.cache.estimate import LONG, WEIGHTS
from agentspec.cache.tree import LEVELS, followed, locate, log_of, longest_of, opened
from agentspec.compiled import compiled
from agentspec.config import CacheConfig
from agentspec.traces.simulate import Retrieval
from bench.arctic import for_fitting, recordings

COLUMNS = 11
"""Of a level: the row of weights, its 7 features, how often the token followed, how often any did, whether it was
the most recent."""


@compiled
def explain(
    layouts: Int64s,
    kinds: Int32s,
    ends: Int32s,
    tail: Int32s,
    token: int,
    levels: Floats,
) -> int:
    """Describe what each context says about the token that came; the number of contexts."""
    automata = opened(layouts)
    at, lengths = locate(automata, ends, tail)
    level = 0
    while level < LEVELS:
        source = longest_of(lengths)
        length, state, states, edges = lengths[source], at[source], automata[0][source], automata[1][source]
        if length == 0:
            break
        link, degree = states[state, LINK], states[state, DEGREE]
        shorter = max(0, states[link, LENGTH])
        if degree > 0:
            out, span = levels[level], log_of(min(length - shorter, LONG))
            total = followed(states, edges, state)
            out[0], out[1] = 2 * kinds[source] + (level == 0), 1
            out[2], out[3] = log_of(min(length, LONG)), log_of(total)
            out[4] = 0.0 if degree == 1 else log_of(degree)
            out[5], out[6], out[7] = degree == 1, span, span * (degree == 1)
            out[8], out[9], out[10] = 0, total, states[state, RECENT] == token
            if degree == 1:
                out[8] = total * out[10]
            else:
                edge = find(states, edges, automata[2][source], state, token)
                out[8] = edges[edge, FOLLOWED] if edge >= 0 else 0
            level += 1
        at[source], lengths[source] = link, shorter
    return level


def positions(files: Sequence[Path], model: str, most: int) -> Iterator[NDArray[np.float32]]:
    """Levels of at most `most` positions of each file: float32[LEVELS, COLUMNS], those not used 0."""
    for file in files:
        drafting, seen, levels = Retrieval(CacheConfig(), None), 0, np.zeros((LEVELS, COLUMNS))
        for recording in recordings([file], model, None):
            for prompt, answer in recording.prompts():
                drafting.open(recording, prompt)
                for at in range(answer.size if for_fitting(recording.group) else 0):
                    session = drafting.current
                    levels[:] = 0
                    explain(*columns(session.offers(), session.conversation.document.tail), int(answer[at]), levels)
                    yield levels.astype(np.float32)
                    drafting.observe(answer[at : at + 1])
                    seen += 1
                if not for_fitting(recording.group):
                    drafting.observe(answer)
                drafting.close()
            if seen >= most:
                break


def likelihood(weights: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Log-likelihood of each position's token."""
    row = levels[..., 0].long()
    used = levels[..., 1]
    chosen = weights[row]
    part = torch.sigmoid((chosen[..., :7] * levels[..., 1:8]).sum(-1)) * used
    bonus = chosen[..., 7].exp()
    here = (levels[..., 8] + bonus * levels[..., 10]) / (levels[..., 9] + bonus)
    left = torch.cumprod(1 - part, dim=-1)
    before = torch.cat((torch.ones_like(left[..., :1]), left[..., :-1]), dim=-1)
    return torch.log((before * part * here).sum(-1) + left[..., -1] * 1e-5 + 1e-9)


def fitted(levels: torch.Tensor, rounds: int) -> tuple[torch.Tensor, float, float]:
    """Weights, and the mean log-likelihood before and after."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float32)
    weights[:, 7] = weights[:, 7].log()
    weights.requires_grad_()
    before = float(likelihood(weights, levels).mean().detach())
    optimizer = torch.optim.Adam([weights], lr=0.03)
    for step in range(rounds):
        chosen = levels[torch.randint(len(levels), (8192,))]
        loss = -likelihood(weights, chosen).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step == rounds * 2 // 3:
            optimizer.param_groups[0]["lr"] = 0.005
    after = float(likelihood(weights, levels).mean().detach())
    result = weights.detach().clone()
    result[:, 7] = result[:, 7].exp()
    return result, before, after


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument("--positions", type=int, default=12_000, help="of each file")
    parser.add_argument("--rounds", type=int, default=600)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    levels = torch.from_numpy(np.stack(list(positions(arguments.files, arguments.model, arguments.positions))))
    weights, before, after = fitted(levels, arguments.rounds)
    print(f"{len(levels)} positions, mean log-likelihood {before:.4f}, fitted {after:.4f}")
    for row in weights.tolist():
        print("        [" + ", ".join(f"{value:.3f}" for value in row) + "],")


if __name__ == "__main__":
    main()
