"""Which trajectory a request belongs to.

The first that applies decides: our own headers, the session headers that gateways and coding agents already send,
ids in the body, and at last the messages themselves (`agentspec.server.chain`).
"""

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from agentspec.errors import InvalidRequest
from agentspec.server.arrivals import Arrivals
from agentspec.server.chain import Chain, prefix_digests
from agentspec.server.wire import Generating
from agentspec.types import Scope, Trajectory

TENANT = "default"
MAX_ID = 200
PARENT = "x-agentspec-parent"
FINAL = ("x-agentspec-final", "x-dynamo-session-final")
CLAUDE_SESSION, CLAUDE_AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"
CLAUDE_PARENT = "x-claude-code-parent-agent-id"

SESSION_HEADERS = (
    ("x-agentspec-trajectory", PARENT),
    ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    (CLAUDE_SESSION, None),
    ("session-id", None),
    ("x-session-id", "x-parent-session-id"),
    ("x-litellm-session-id", None),
)
"""Header of the id and of the parent's, in order of precedence: AgentSpec, NVIDIA Dynamo, Claude Code, Codex,
OpenCode, LiteLLM."""


@dataclass(frozen=True, slots=True)
class Name:
    """A trajectory as a request names it."""

    id: str
    parent: str | None = None


class Identity:
    """Finds the trajectory of each request of one served model."""

    def __init__(self, model: str, chain: Chain | None = None) -> None:
        self._scope = Scope(TENANT, model)
        self._chain = chain or Chain()
        self._arrivals = Arrivals()

    def receiving(self) -> AbstractContextManager[float]:
        """Around all that is done with a request from when it was received until it is resolved; that moment."""
        return self._arrivals.receiving()

    def digests(
        self, asked: Generating, tools: Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
    ) -> list[bytes]:
        """What `resolve` compares; apart because it takes long for long conversations and may run in any thread.

        `user` keeps the conversations of different people apart.
        """
        return prefix_digests([self._scope.tenant, self._scope.model, asked.user or ""], tools, messages)

    def resolve(
        self, headers: Mapping[str, str], asked: Generating, digests: Sequence[bytes], received: float = math.inf
    ) -> Trajectory:
        """The request's trajectory, also where that was deleted since the request was received; remembers its messages
        where it was not."""
        named = named_by_headers(headers) or named_by_body(asked) or self._named_by_messages(digests, received)
        parent = header_id(headers, PARENT) or named.parent
        if parent == named.id:
            raise InvalidRequest(f"{PARENT}: a trajectory cannot be its own parent", param=PARENT)
        if not self._arrivals.deleted(named.id, received):
            self._chain.learn(digests, named.id, final=is_final(headers))
        return Trajectory(named.id, self._scope, parent)

    def named(self, text: str) -> Trajectory:
        """The trajectory of the caller's tenant that has an id; raises `InvalidRequest` for what is no id."""
        return Trajectory(check_id(text, "id"), self._scope)

    def forget(self, trajectory: Trajectory) -> bool:
        """Recognises a deleted trajectory's messages no longer; whether it did."""
        digests = self._chain.forget(trajectory.id)
        self._arrivals.note(trajectory.id, digests)
        return bool(digests)

    def _named_by_messages(self, digests: Sequence[bytes], received: float) -> Name:
        for digest in reversed(digests):
            match = self._chain.find([digest])
            if match is not None:
                return Name(match.owner) if match.continues else Name(new_id(), match.owner)
            deleted = self._arrivals.sender(digest, received)
            if deleted is not None:
                return Name(deleted)
        return Name(new_id())


def named_by_headers(headers: Mapping[str, str]) -> Name | None:
    for id_header, parent_header in SESSION_HEADERS:
        found = header_id(headers, id_header)
        if found is None:
            continue
        if id_header == CLAUDE_SESSION:
            return claude_name(headers, found)
        return Name(found, header_id(headers, parent_header) if parent_header else None)
    return None


def claude_name(headers: Mapping[str, str], session: str) -> Name:
    """Claude Code names the session, and in a sub-agent also the agent and the agent above it."""
    agent, above = header_id(headers, CLAUDE_AGENT), header_id(headers, CLAUDE_PARENT)
    if agent is None:
        return Name(session)
    name = Name(f"{session}/{agent}", f"{session}/{above}" if above else session)
    return Name(check_id(name.id, CLAUDE_AGENT), name.parent)


def named_by_body(asked: Generating) -> Name | None:
    for key in ("trajectory_id", "session_id"):
        value = asked.metadata.get(key)
        if value is not None:
            return Name(check_id(value, f"metadata.{key}"))
    return Name(hint_id(asked.prompt_cache_key)) if asked.prompt_cache_key else None


def header_id(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    return None if value is None else check_id(value, name)


def check_id(value: Any, name: str) -> str:
    """`value` as an id; raises `InvalidRequest` that names where it came from."""
    if isinstance(value, str) and is_id(value):
        return value
    raise InvalidRequest(f"{name}: an id has 1 to {MAX_ID} printable ASCII characters", param=name)


def is_id(value: str) -> bool:
    return 0 < len(value) <= MAX_ID and value.isascii() and value.isprintable()


def hint_id(value: str) -> str:
    """A hint was not made to be an id, so any text will do."""
    return value if is_id(value) else hashlib.sha256(value.encode()).hexdigest()


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the request says that it is the last of its trajectory."""
    return any(headers.get(name, "").lower() in ("true", "1") for name in FINAL)


def new_id() -> str:
    return f"traj-{secrets.token_hex(12)}"
