"""Text completions and several choices over HTTP, on a tiny model; transformers says what is true."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentspec.engine.service import Engine
from agentspec.server.convert import choice_seed
from tests.serving import in_process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RUN = "X-AgentSpec-Trajectory"
OFF: dict[str, Any] = {"speculation": {"enabled": False}}
REPORT: dict[str, Any] = {"speculation": {"report": True}}
PROMPT = "for name in names:\n    print(name)  # Grüße \U0001f680\n" * 3


async def whole(client: httpx.AsyncClient, path: str = TEXT, run: str = "run", **fields: Any) -> dict[str, Any]:
    if path == TEXT:
        fields.setdefault("prompt", PROMPT)
    else:
        fields.setdefault("messages", [{"role": "user", "content": PROMPT}])
    fields.setdefault("max_tokens", 24)
    response = await client.post(path, json=fields, headers={RUN: run})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """Chunks of a stream with usage."""
    wanted = {"prompt": PROMPT, "max_tokens": 24, **fields, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(TEXT, json=wanted)
    frames = [frame.removeprefix("data: ") for frame in response.text.strip().split("\n\n")]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stop", [[], ["e"]])
def test_each_choice_has_a_grammar_of_its_own(tiny_model: Path, path: str, stop: list[str]) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        wanted: dict[str, Any] = {"guided_regex": "(red|green|blue)( and (red|green|blue)){2}", "seed": 2, "stop": stop}
        made = texts(await whole(client, path, n=5, temperature=1.5, **wanted))
        off = {"enabled": False}
        assert made == texts(await whole(client, path, n=5, temperature=1.5, speculation=off, **wanted))
        assert len(set(made)) > 1
        whole_text = r"(red|green|blue)( and (red|green|blue)){2}"
        assert all(re.fullmatch("r|gr|blu" if stop else whole_text, text) for text in made)

    in_process(tiny_model, scenario)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_each_choice_equals_the_request_with_its_seed(tiny_model: Path, path: str, temperature: float) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        fields: dict[str, Any] = {"temperature": temperature, "seed": 11}
        alone = [
            await whole(client, path, "off", **fields | {"seed": choice_seed(11, number)}, **OFF) for number in range(3)
        ]
        for number in range(3):
            again = await whole(client, path, **fields, n=3, **(OFF if number == 0 else REPORT))
            assert texts(again) == [texts(one)[0] for one in alone]
            completion = sum(one["usage"]["completion_tokens"] for one in alone)
            assert again["usage"]["completion_tokens"] == completion
            assert again["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
        assert sum(report["accepted_total"] for report in again["agentspec"]["choices"]) > 0

    in_process(tiny_model, scenario)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
def test_drafts_change_nothing_and_streams_say_the_same(tiny_model: Path, sampling: dict[str, Any]) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        fields: dict[str, Any] = {
            "prompt": [PROMPT, "x = 1\n", PROMPT],
            "n": 2,
            "logprobs": 2,
            "echo": True,
            **sampling,
        }
        off = await whole(client, **fields, **OFF)
        for _repeat in range(2):
            on = await whole(client, **fields, **REPORT)
            assert on["choices"] == off["choices"]
        assert sum(report["accepted_total"] for report in on["agentspec"]["choices"]) > 0
        *chunks, last = await streamed(client, **fields)
        assert last["usage"]["total_tokens"] == off["usage"]["total_tokens"]
        for choice in off["choices"]:
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in mine) == choice["text"]
            found = [chunk["logprobs"] for chunk in mine if chunk["logprobs"]]
            for name, column in choice["logprobs"].items():
                assert [one for part in found for one in part[name]] == column

    in_process(tiny_model, scenario)


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("warm", [False, True])
def test_echo_and_logprobs_equal_a_plain_forward(tiny_model: Path, max_tokens: int, warm: bool) -> None:
    models: Any = AutoModelForCausalLM
    plain = models.from_pretrained(tiny_model, dtype=torch.float32).eval()

    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        if warm:
            await whole(client, max_tokens=1)
        fields: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": 0,
            "echo": True,
            "logprobs": 3,
            "prompt_logprobs": 1,
        }
        answer = await whole(client, **fields, **REPORT)
        choice = answer["choices"][0]
        prompt = list(engine.tokenize(PROMPT, special=True))
        tokens = prompt + list(answer["agentspec"]["token_ids"])
        with torch.inference_mode():
            logs = torch.log_softmax(plain(torch.tensor([tokens])).logits[0].double(), -1)
        expected = [float(logs[at, token]) for at, token in enumerate(tokens[1:])]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is choice["prompt_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        for at, best in enumerate(found["top_logprobs"][1:]):
            assert sorted(best.values(), reverse=True)[:3] == pytest.approx(logs[at].topk(3).values.tolist(), abs=1e-4)
        own = [one[str(token)]["logprob"] for one, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)]
        assert own == pytest.approx(expected[: len(prompt) - 1], abs=1e-4)
        assert choice["text"].startswith(PROMPT)
        ends = [*found["text_offset"][1 : len(prompt)], len(PROMPT)]
        assert found["text_offset"] == sorted(found["text_offset"]) and ends[-2] < ends[-1]
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    in_process(tiny_model, scenario, prefill_chunk=32)


def test_offsets_cut_the_text_into_its_tokens(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        choice = (await whole(client, prompt="a b\nc", echo=True, logprobs=0, max_tokens=0))["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        cut = [choice["text"][start:stop] for start, stop in zip(offsets, [*offsets[1:], None], strict=True)]
        assert cut == choice["logprobs"]["tokens"]

    in_process(tiny_model, scenario)


def test_str_08_stop_strings_end_completions_as_they_end_chats(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}
        full = await whole(client, **fields)
        text = texts(full)[0]
        stop = text[10:13]
        cut = await whole(client, **fields, stop=[stop])
        assert texts(cut)[0] == text[: text.find(stop)]
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert len(cut["choices"][0]["logprobs"]["tokens"]) == cut["usage"]["completion_tokens"]
        pieces = [chunk["choices"][0]["text"] for chunk in (await streamed(client, **fields, stop=[stop]))[:-1]]
        assert "".join(pieces) == texts(cut)[0]

    in_process(tiny_model, scenario)


def test_choices_leave_the_next_turn_what_one_choice_leaves(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        follow: dict[str, dict[str, Any]] = {}
        for run, n in (("one", 1), ("many", 4)):
            prompt = f"{run}: {PROMPT}"
            first = await whole(client, run=run, prompt=prompt, n=n, seed=5, **REPORT)
            again = prompt + texts(first)[0]
            follow[run] = await whole(client, run=run, prompt=again, temperature=0, **REPORT)
            known = first["usage"]["prompt_tokens"]
            assert follow[run]["usage"]["prompt_tokens_details"]["cached_tokens"] >= known
        drafted = [follow[run]["agentspec"]["drafted"].get("trajectory", 0) for run in follow]
        assert drafted[0] > 0 and drafted[1] > 0

    in_process(tiny_model, scenario, max_running=8)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({}, "prompt", "invalid_request"),
    "an empty prompt": ({"prompt": ""}, "prompt", "invalid_request"),
    "no token of the model": ({"prompt": [1, 100_000]}, "prompt", "invalid_request"),
    "over the window": ({"prompt": ["a", "x" * 600]}, "prompt[1]", "context_length_exceeded"),
    "the window itself": ({"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    "a suffix": ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    "too many": ({"prompt": ["a"] * 100, "n": 2}, "n", "invalid_request"),
    "a bias of no token": ({"prompt": "a", "n": 2, "logit_bias": {"100000": 1}}, "logit_bias", "invalid_request"),
    "a minimum above the maximum": ({"prompt": "a", "min_tokens": 17}, "min_tokens", "invalid_request"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_gets_its_envelope_and_the_next_request_its_answer(tiny_model: Path, stream: bool) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        for name, (body, param, code) in BAD.items():
            refused = await client.post(TEXT, json={**body, "stream": stream})
            assert refused.status_code == 400, name
            assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (param, code), name
        assert engine.stats()["history_sessions"] == engine.stats()["running_requests"] == 0
        assert len(texts(await whole(client, n=2))) == 2

    in_process(tiny_model, scenario)


def test_as_many_choices_as_allowed_share_a_small_batch(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        answer = await whole(client, prompt=["a", "b"], n=64, max_tokens=2, ignore_eos=True)
        assert len(answer["choices"]) == 128
        assert answer["usage"]["completion_tokens"] == 256
        assert engine.stats()["running_requests"] == engine.stats()["waiting_requests"] == 0

    in_process(tiny_model, scenario, max_running=4, max_queue=1)
