"""From a parsed request to what the worker takes."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentspec.errors import ContextTooLong, InvalidRequest
from agentspec.server.wire import ChatRequest, Generating, Message, Speculation, TextRequest, Tool
from agentspec.types import GenerationRequest, Grammar, Outline, SamplingParams, SpeculationParams, Trajectory, Worker

SEED_RANGE = 2**63
SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of two choices (SplitMix64's increment, Steele et al. 2014): far enough apart that requests with
neighbouring seeds have no choice in common."""

MAX_PROMPT_LOGPROBS = 2**19
"""Most log-probabilities of prompt tokens in one answer, which take about 140 MB while it is made."""

Prompt = tuple[int, ...]


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


def outline_of(tools: Sequence[Mapping[str, Any]] | None, schema: Any) -> Outline:
    """What tools and a schema say of an answer's form."""
    if not tools and schema is None:
        return Outline()
    text = json.dumps((tools, schema))
    return Outline(tuple(tools or ()), schema, hashlib.blake2b(text.encode(), digest_size=16).digest())


def prediction_of(asked: ChatRequest, worker: Worker) -> Prompt:
    """The predicted answer as token ids; raises `ContextTooLong` for one that no answer could be."""
    if asked.prediction is None or not asked.prediction.content:
        return ()
    tokens = worker.tokenize(asked.prediction.content, special=False)
    if len(tokens) > worker.window:
        raise ContextTooLong(
            f"prediction: has {len(tokens)} tokens; the model's window holds {worker.window}", param="prediction"
        )
    return tokens


def prompts_of(asked: TextRequest, worker: Worker) -> list[Prompt]:
    """The prompts as token ids; raises `InvalidRequest` for one that the model cannot take."""
    several = len(asked.prompt) > 1
    prompts: list[Prompt] = []
    for index, one in enumerate(asked.prompt):
        name = f"prompt[{index}]" if several else "prompt"
        prompt = worker.tokenize(one, special=asked.add_special_tokens) if isinstance(one, str) else tuple(one)
        check_prompt(prompt, name, asked.max_tokens, worker)
        prompts.append(prompt)
    check_prompt_logprobs(asked, sum(map(len, prompts)))
    return prompts


def check_prompt(prompt: Prompt, name: str, max_tokens: int, worker: Worker) -> None:
    """Raises `InvalidRequest` for a prompt that the model cannot take."""
    if not prompt:
        raise InvalidRequest(f"{name}: has no tokens", param=name)
    wrong = next((token for token in prompt if not 0 <= token < worker.vocabulary), None)
    if wrong is not None:
        last = worker.vocabulary - 1
        raise InvalidRequest(f"{name}: the model's tokens are 0 to {last}, got {wrong!s:.40}", param=name)
    if len(prompt) + min(1, max_tokens) > worker.window:
        more = " and at least one more" if max_tokens else ""
        raise ContextTooLong(
            f"{name}: has {len(prompt)} tokens; the model's window of {worker.window} must hold it{more}", param=name
        )


def check_prompt_logprobs(asked: TextRequest, tokens: int) -> None:
    """Raises `InvalidRequest` for more log-probabilities of prompts than an answer may hold."""
    _, _, top = wanted(asked)
    if top is not None and tokens * asked.n * (1 + top) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt: {1 + top} log-probabilities for each of {tokens} tokens in {asked.n} choices are more than "
            f"{MAX_PROMPT_LOGPROBS}",
            param="prompt",
        )


def generation_requests(
    asked: Generating,
    prompts: Sequence[Prompt],
    trajectory: Trajectory,
    window: int,
    grammar: Grammar | None = None,
) -> list[GenerationRequest]:
    """The worker's requests: the choices of each prompt, prompt by prompt. The first choice of a prompt is what it is
    when it is asked for alone; the log-probabilities of equal prompts are asked for once."""
    requests: list[GenerationRequest] = []
    seen: set[Prompt] = set()
    for prompt in prompts:
        first = generation_request(asked, prompt, trajectory, window, grammar)
        if prompt in seen:
            first = replace(first, prompt_logprobs=None)
        seen.add(prompt)
        requests.append(first)
        for choice in range(1, asked.n):
            seed = choice_seed(first.sampling.seed, choice)
            requests.append(
                replace(first, sampling=replace(first.sampling, seed=seed), branch=True, prompt_logprobs=None)
            )
    return requests


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice of a request with `seed`; that of choice 0 is the request's own."""
    return (seed + choice * SEED_STEP) % SEED_RANGE


def generation_request(
    asked: Generating, prompt: Prompt, trajectory: Trajectory, window: int, grammar: Grammar | None = None
) -> GenerationRequest:
    """The worker's request for one choice; the token limit is cut to the room that the prompt leaves, at least 1."""
    limit, logprobs, prompt_logprobs = wanted(asked)
    return GenerationRequest(
        prompt=prompt,
        trajectory=trajectory,
        max_tokens=min(window if limit is None else limit, max(1, window - len(prompt))),
        sampling=sampling(asked),
        speculation=speculation(asked.speculation),
        stop=tuple(asked.stop),
        stop_tokens=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        priority=asked.priority,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def wanted(asked: Generating) -> tuple[int | None, int | None, int | None]:
    """Most tokens, and how many of the likeliest tokens are reported at each of them and at each of the prompt's."""
    if isinstance(asked, TextRequest):
        own = asked.prompt_logprobs
        echoed = asked.logprobs if asked.echo else None
        return asked.max_tokens, asked.logprobs, max((n for n in (own, echoed) if n is not None), default=None)
    assert isinstance(asked, ChatRequest)
    limit = asked.max_completion_tokens or asked.max_tokens
    return limit, asked.top_logprobs if asked.logprobs else None, None


def sampling(asked: Generating) -> SamplingParams:
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
        exact=asked.exact,
        report=asked.report,
    )
