"""The nouns of AgentSpec: plain frozen records, no behaviour beyond what their fields imply, no heavy import."""

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import Any, Protocol


class Origin(IntFlag):
    """Who proposed a draft node; a node that several sources propose carries several bits."""

    TRAJECTORY = 1
    """This trajectory's own history: prompts, tool results and outputs."""

    SCOPE = 2
    """Recent trajectories of the same tenant and model."""

    GRAMMAR = 4
    """Text that the request's grammar leaves no choice about."""

    SCAFFOLD = 8
    """What the request's tools and schema fix of an answer: names, keys, and the markup around them."""

    PREDICTION = 16
    """The text that the request predicts as its answer."""

    TLAR = 32
    """Continuations of nearly equal contexts in this trajectory's own answers; only where a request asks for it."""

    CORPUS = 64
    """Static corpora that the server was started with, for all tenants."""


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """In the syntax of Rust's `regex` crate; the whole text must match."""

    CONTEXT_FREE = "context_free"
    """In Lark's or llama.cpp's (GBNF) notation."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must match as a whole."""

    kind: GrammarKind
    text: str
    param: str
    """Field of the request that it came from, for errors."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a request says of the form of its answer; drafts are made of it, nothing is enforced."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that may be called, as the model sees them."""

    schema: Any = None
    """JSON schema of an answer; None where there is none."""

    digest: bytes = b""
    """Equal for equal outlines alone."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything cached lives under one scope; nothing crosses it."""

    tenant: str
    model: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent run. A sub-agent names its parent and inherits the parent's history read-only."""

    id: str
    scope: Scope
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A token tree to verify in one target pass, as flat arrays in parent-before-child order.

    Node 0 is the root: the last committed token, which is not in the KV cache yet. Siblings carry distinct
    tokens, so a node is identified by (parent, token). A tree of one node proposes nothing.
    """

    token: tuple[int, ...]

    parent: tuple[int, ...]
    """Index of the parent node; -1 for the root."""

    depth: tuple[int, ...]
    """Distance from the root; a node's position in the sequence is `committed - 1 + depth`."""

    logp: tuple[float, ...]
    """Drafter's estimate of log P(node accepted | parent accepted); 0 for the root."""

    cum: tuple[float, ...]
    """Sum of `logp` along the path from the root."""

    origin: tuple[int, ...]
    """`Origin` bits of the sources that proposed the node; 0 for the root."""

    def __len__(self) -> int:
        return len(self.token)

    @staticmethod
    def root(token: int) -> "DraftTree":
        """The tree that proposes nothing after `token`."""
        return DraftTree((token,), (-1,), (0,), (0.0,), (0.0,), (0,))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is chosen. Temperature 0 is greedy and ignores the filters and the seed."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""

    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest."""

    seed: int = 0
    """Keys the uniform of every position; equal seeds give equal output, with or without drafts."""

    repetition_penalty: float = 1.0
    """Divides the logits of tokens of the prompt and the completion that are above 0, and multiplies those below."""

    frequency_penalty: float = 0.0
    """Taken off a token's logit for every time it was generated."""

    presence_penalty: float = 0.0
    """Taken off a token's logit once it was generated."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, value) pairs: added to the token's logit."""

    min_tokens: int = 0
    """Tokens before which none may be chosen that ends the turn."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """A request's own control over drafting."""

    enabled: bool = True
    max_draft_tokens: int = 32
    """Most draft nodes in one step, the root not counted."""

    drafters: tuple[str, ...] | None = None
    """Allowed sources by lower-case `Origin` name; None allows all but `tlar`."""

    exact: bool = False
    """Draft only where a row's logits have the same bits in any pass, so that drafts provably change nothing."""

    report: bool = False
    """Attach a `Report` to the response."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to generate."""

    prompt: tuple[int, ...]
    trajectory: Trajectory
    max_tokens: int
    """Most tokens to emit; 0 only reads the prompt. The engine also stops at the model's window."""

    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    stop: tuple[str, ...] = ()
    """Strings that end the generation; they are not part of the text."""

    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the generation, beside the model's own; they give no text."""

    ignore_eos: bool = False
    """Go on after the model's own end tokens."""

    priority: int = 0
    """Requests of a lower number are served first, and take the places of running ones of a higher number."""

    logprobs: int | None = None
    """Report log-probabilities of the tokens and of so many of the likeliest at each position; None for none."""

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, all of which are computed then, known or not; None for none."""

    branch: bool = False
    """A further choice beside one that continues the trajectory: it reads the history and adds nothing to it."""

    grammar: Grammar | None = None
    """What the completion must match; the engine raises `InvalidRequest` for one that it cannot compile."""

    outline: Outline = Outline()
    """What is known of the form of the completion."""

    prediction: tuple[int, ...] = ()
    """What the completion is likely to be for the most part; drafts are made of it, nothing is enforced."""

    rendered: bool = False
    """The prompt is made of chat messages: answers in it may be put in token by token as they were generated."""

    received: float = field(default_factory=time.monotonic, compare=False)
    """When it came, by the monotonic clock: nothing of it stays if its trajectory is deleted from then on."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one generation cost and where its tokens came from."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was reused."""

    completion_tokens: int
    steps: int
    """Target passes that emitted tokens, the prefill's last one included."""

    drafted: Mapping[str, int]
    """Draft nodes sent to verification, by lower-case source name; those that two sources proposed under both names,
    as `trajectory+scope`. They add up to `drafted_total`."""

    accepted: Mapping[str, int]
    """Accepted draft nodes that were emitted, by source, counted like `drafted`."""

    drafted_total: int
    accepted_total: int
    queue_s: float
    prefill_s: float
    """From leaving the queue until the prompt was computed, which gives the first token; 0 where all of it but its last
    token was known."""

    decode_s: float
    """From then to the last token."""

    decode_tokens: int
    """Tokens that came in `decode_s`: all, or all but the first."""

    draft_s: float
    """Part of `decode_s` spent proposing drafts."""

    token_ids: tuple[int, ...]
    """Emitted token ids, the end-of-turn token included when one was generated."""

    reason: str | None = None
    """Why nothing was drafted; None if something was."""

    spliced: int = 0
    """Earlier answers in the prompt whose text is tokenised otherwise than it was generated, and which were put in as
    they were generated."""


@dataclass(frozen=True, slots=True)
class TrajectoryState:
    """What is kept of a trajectory."""

    tokens: int
    """Tokens of its history."""

    turns: int
    last_used: float
    """Seconds since 1970."""

    memory_bytes: int
    """Of its indexed history and the token ids of its answers, in the memory of this process."""

    stored_bytes: int
    """Of its history in the store: of its chunks in a Redis; of its records in the file of this process, once that is
    written anew."""

    kv_bytes: int
    """Of pages of keys and values, those included that other trajectories begin with too."""

    drafted: int
    """Draft nodes verified in its turns in this process, whoever proposed them."""

    accepted: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a text with its natural log-probability, and the likeliest tokens there with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int
    """Place of the token among all by probability; the likeliest has 1."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a generation: text that is final, in order, never taken back."""

    text: str
    tokens: int
    """Tokens committed since the previous delta; text may lag behind while bytes or a stop string are held back."""

    finish: FinishReason | None = None
    """Set on the last delta only."""

    report: Report | None = None
    """Set on the last delta only."""

    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens committed since the previous delta, if they were asked for."""

    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of further prompt tokens, in order, if they were asked for: of all but the first, before any token."""

    index: int = 0
    """Which of the requests that were given to the worker together it belongs to."""


class Worker(Protocol):
    """What the server needs of an engine; a test's fake has the same members."""

    @property
    def model(self) -> str:
        """Name under which the model is served."""
        ...

    @property
    def window(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        """Token ids of the chat prompt with the generation prompt appended.

        Messages are OpenAI chat messages whose content is a string or None. Safe to call from any thread.
        Raises `InvalidRequest` when the chat template refuses the messages.
        """
        ...

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def control_tokens(self) -> Collection[int]:
        """Tokens that give no text when they are generated."""
        ...

    def tokenize(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of a text in which control tokens may be spelled; with `special`, those included that the
        tokenizer puts around every text. Safe to call from any thread."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token of the vocabulary; those of its name for a control token."""
        ...

    def generate(self, *requests: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of a completion for each request, side by side, the last one of each with `finish` and `report`.

        The requests are taken as a whole or not at all; a prompt that several of them have is computed once. Closing
        the iterator stops all of them and frees their memory within one step. Raises `Overloaded` when the queue is
        full, `ContextTooLong` when a prompt leaves no room for a token, `InvalidRequest` for a grammar that cannot be
        compiled or whose masks take too long.
        """
        ...

    async def inspect(self, trajectory: Trajectory) -> TrajectoryState | None:
        """What is kept of a trajectory; None where nothing is. Raises `Unavailable` when the worker is gone."""
        ...

    async def forget(self, trajectory: Trajectory) -> bool:
        """Delete all that is kept of a trajectory: whether there was anything.

        Requests of it that were received before go on and leave nothing. Raises `Unavailable` when the store does not
        confirm that it deleted its part, or the worker is gone.
        """
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges for `/metrics`, by metric name without the `agentspec_` prefix.

        Names that end in `_total` are counters, the others gauges. Raises `Unavailable` when the worker is gone.
        """
        ...

    async def close(self) -> None:
        """End the worker: running requests fail with `Unavailable`, memory is freed, histories are stored.

        Called on the event loop that `generate` was used on.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one verification step told a drafter."""

    tokens: tuple[int, ...]
    """Tokens committed by the step, the target's own last one included."""

    proposed: DraftTree
    accepted: tuple[int, ...] = field(default=())
    """Node indices of the accepted path, root excluded."""


class Drafter(Protocol):
    """An untrusted proposer of token trees for one request; a fault disables it for that request only."""

    def propose(self, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes beside the root, likeliest first by `cum`."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a verified step; called once per step, drafted or not, in order."""
        ...
