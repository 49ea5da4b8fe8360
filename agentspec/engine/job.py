"""One request on its way through the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from agentspec.engine.adjust import Adjuster
from agentspec.engine.commit import Completion
from agentspec.engine.constraint import Constraint
from agentspec.engine.kv import Holding
from agentspec.types import Delta, Drafter, DraftTree, GenerationRequest, Origin, Report


@dataclass(slots=True)
class Clock:
    """Moments of a job, in `perf_counter` seconds."""

    submitted: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    prefilled: float = 0.0
    """When the last prompt token but one was computed; the step after it emits the first token."""

    last: float = 0.0
    drafting: float = 0.0


@dataclass(slots=True)
class Tally:
    """Draft nodes by lower-case source name; a node of two sources counts for both."""

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    drafted_total: int = 0
    accepted_total: int = 0
    steps: int = 0

    def add(self, tree: DraftTree, accepted: tuple[int, ...]) -> None:
        """Count a verified tree and the accepted nodes that were emitted."""
        self.steps += 1
        self.drafted_total += len(tree) - 1
        self.accepted_total += len(accepted)
        for node in range(1, len(tree)):
            for source in Origin(tree.origin[node]):
                name = str(source.name).lower()
                self.drafted[name] = self.drafted.get(name, 0) + 1
                self.accepted[name] = self.accepted.get(name, 0) + (node in accepted)


@dataclass(eq=False, slots=True)
class Job:
    """A request, its sequence and its way back to the caller. Owned by the engine's thread but for `cancelled`."""

    request: GenerationRequest
    completion: Completion
    drafter: Drafter | None
    emit: Callable[[Delta], None]
    fail: Callable[[Exception], None]
    tokens: list[int]
    """Prompt and completion."""

    reason: str | None = None
    """Why drafting is off or found nothing so far."""

    adjuster: Adjuster | None = None
    """Changes logits before tokens are chosen; None where nothing is to be changed."""

    constraint: Constraint | None = None
    """Hides the tokens that the request's grammar forbids; None where there is no grammar."""

    cancelled: bool = False
    """Set by the caller's thread; the job leaves before the next step."""

    holding: Holding | None = None
    cached_tokens: int = 0
    clock: Clock = field(default_factory=Clock)
    tally: Tally = field(default_factory=Tally)

    @property
    def slab_length(self) -> int:
        """Committed positions with keys and values."""
        return self.holding.slab.length if self.holding else 0

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens before the last committed one still have to be computed."""
        return self.slab_length < len(self.tokens) - 1

    @property
    def most_tokens(self) -> int:
        """Tokens the sequence may grow to."""
        return len(self.request.prompt) + self.completion.max_tokens

    def report(self) -> Report:
        """What the job cost, once it has finished."""
        clock, tally = self.clock, self.tally
        return Report(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.completion.tokens),
            steps=tally.steps,
            drafted=dict(tally.drafted),
            accepted=dict(tally.accepted),
            drafted_total=tally.drafted_total,
            accepted_total=tally.accepted_total,
            queue_s=clock.admitted - clock.submitted,
            prefill_s=clock.prefilled - clock.admitted,
            decode_s=clock.last - clock.prefilled,
            draft_s=clock.drafting,
            token_ids=tuple(self.completion.tokens),
            reason=None if tally.drafted_total else self.reason,
        )
