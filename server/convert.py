"""From a parsed chat request to what the worker takes."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.server.wire import ChatRequest, Message, Speculation, Tool
from agentspec.types import GenerationRequest, Grammar, SamplingParams, SpeculationParams, Trajectory

SEED_RANGE = 2**63


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in the order they came, with content as a string or None and developer written as system."""
    return [plain_message(message) for message in messages]


def plain_message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None and not message.tool_calls:
        content = ""
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def fold_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One system message in front, because many chat templates take no other; none when there was none."""
    system = [message for message in messages if message["role"] == "system"]
    if not system:
        return list(messages)
    text = "\n\n".join(str(message["content"]) for message in system)
    return [{**system[0], "content": text}, *(message for message in messages if message["role"] != "system")]


def plain_tools(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools the model gets to see; None when there are none or none may be called."""
    if not asked.tools or asked.tool_choice == "none":
        return None
    return [plain_tool(tool) for tool in asked.tools]


def plain_tool(tool: Tool) -> dict[str, Any]:
    wanted = {"name", "description", "parameters"}
    return {"type": "function", "function": tool.function.model_dump(include=wanted, exclude_none=True)}


def generation_request(
    asked: ChatRequest, prompt: tuple[int, ...], trajectory: Trajectory, window: int, grammar: Grammar | None = None
) -> GenerationRequest:
    """The worker's request; the token limit is cut to the room that the prompt leaves, at least 1."""
    limit = asked.max_completion_tokens or asked.max_tokens or window
    return GenerationRequest(
        prompt=prompt,
        trajectory=trajectory,
        max_tokens=max(1, min(limit, window - len(prompt))),
        sampling=sampling(asked),
        speculation=speculation(asked.speculation),
        stop=tuple(asked.stop),
        stop_tokens=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logprobs=asked.top_logprobs if asked.logprobs else None,
        grammar=grammar,
    )


def sampling(asked: ChatRequest) -> SamplingParams:
    """Sampling with a seed between 0 and 2**63 - 1, drawn afresh when none was given."""
    return SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        logit_bias=tuple(asked.logit_bias),
        min_tokens=asked.min_tokens,
        seed=secrets.randbelow(SEED_RANGE) if asked.seed is None else asked.seed % SEED_RANGE,
    )


def speculation(asked: Speculation) -> SpeculationParams:
    return SpeculationParams(
        enabled=asked.enabled,
        max_draft_tokens=asked.max_draft_tokens,
        drafters=None if asked.drafters is None else tuple(asked.drafters),
        report=asked.report,
    )
