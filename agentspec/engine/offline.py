"""A completion straight from a step loop, without threads or sockets: for measurements and tests."""

from collections.abc import Sequence

from agentspec.engine.commit import Completion
from agentspec.engine.job import Job
from agentspec.engine.loop import StepLoop
from agentspec.engine.text import TextStream
from agentspec.types import Delta, GenerationRequest, Report, Scope, Trajectory


def complete(loop: StepLoop, prompt: Sequence[int], max_tokens: int) -> Report:
    """Greedy tokens without drafts; no token ends the turn. Raises what the engine raises."""
    deltas: list[Delta] = []
    errors: list[Exception] = []
    trajectory = Trajectory("offline", Scope("offline", "offline"))
    request = GenerationRequest(tuple(prompt), trajectory, max_tokens)
    completion = Completion(TextStream([b""] * loop.target.vocabulary), max_tokens, frozenset())
    loop.add(Job(request, completion, None, deltas.append, errors.append, list(prompt)))
    while not loop.idle:
        loop.step()
    if errors:
        raise errors[0]
    report = deltas[-1].report
    assert report is not None
    return report
