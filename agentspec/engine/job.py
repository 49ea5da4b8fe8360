"""One request on its way through the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from agentspec.engine.adjust import Adjuster
from agentspec.engine.commit import Completion
from agentspec.engine.constraint import Constraint
from agentspec.engine.prefix import Holding, Owner
from agentspec.types import Delta, Drafter, DraftTree, GenerationRequest, Origin, Report, Scope


@dataclass(slots=True)
class Clock:
    """Moments of a job, in `perf_counter` seconds."""

    submitted: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    prefilled: float = 0.0
    """When the pass ended that computed the last prompt tokens and gave the first one of the completion; the moment of
    admission where the whole prompt but its last token was known."""

    last: float = 0.0
    drafting: float = 0.0


@dataclass(slots=True)
class Tally:
    """Draft nodes by lower-case source name; those of two sources under both names, as `trajectory+scope`."""

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    drafted_total: int = 0
    accepted_total: int = 0
    steps: int = 0
    prefilled: int = 0
    """Tokens, 1 or 0, that the last pass of the prompt gave."""

    def add(self, tree: DraftTree, accepted: tuple[int, ...]) -> None:
        """Count a verified tree and the accepted nodes that were emitted."""
        self.steps += 1
        self.drafted_total += len(tree) - 1
        self.accepted_total += len(accepted)
        for node in range(1, len(tree)):
            name = "+".join(str(source.name).lower() for source in Origin(tree.origin[node])) or "unnamed"
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

    forgotten: bool = False
    """Its trajectory was deleted: nothing that it computed stays when it leaves."""

    leader: "Job | None" = None
    """A job with the same prompt, which computes it before this one starts."""

    scored: int = 0
    """Prompt tokens, the first left out, whose log-probabilities were told."""

    holding: Holding | None = None
    """Its memory while it runs."""

    cached_tokens: int = 0
    clock: Clock = field(default_factory=Clock)
    tally: Tally = field(default_factory=Tally)

    @property
    def scope(self) -> Scope:
        return self.request.trajectory.scope

    @property
    def owner(self) -> Owner:
        """The trajectory that its pages belong to."""
        return self.scope, self.request.trajectory.id

    @property
    def computed(self) -> int:
        """Committed positions with keys and values."""
        return self.holding.table.length if self.holding else 0

    @property
    def uncomputed(self) -> int:
        """Committed tokens whose keys and values are missing; at least 1, the last one."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether tokens before the last committed one still have to be computed."""
        return self.uncomputed > 1

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens have still to be told."""
        return self.request.prompt_logprobs is not None and self.scored < len(self.request.prompt) - 1

    @property
    def reusable(self) -> list[int]:
        """The tokens whose keys and values may be taken over. A log-probability that has still to be told needs the
        position before it computed in any case: nothing keeps the logits of positions that were computed earlier."""
        return self.tokens[: self.scored + 1] if self.scoring else self.tokens

    def report(self) -> Report:
        """What the job cost, once it has finished."""
        clock, tally = self.clock, self.tally
        return Report(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.completion.tokens),
            steps=tally.steps,
            decode_tokens=len(self.completion.tokens) - tally.prefilled,
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
