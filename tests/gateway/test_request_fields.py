"""Every documented request field is honoured, harmless, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from litestar.testing import TestClient
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from surefoot.backends.fake import FakeBackend
from surefoot.backends.types import ChatPrompt, SamplingParams, TextPrompt, TokenPrompt
from surefoot.gateway.errors import InvalidValue
from surefoot.gateway.fields import INERT, NEUTRAL
from surefoot.gateway.limits import MAX_TOKEN_IDS, check_token_ids
from surefoot.gateway.schemas import ChatRequest, CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(http: TestClient, path: str, **fields: Any) -> Any:
    """Send a small valid request with the given fields."""
    base: dict[str, Any] = {"model": "fake"} | ({"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"})
    return http.post(path, json=base | fields)


@pytest.mark.parametrize(
    ("documented", "shape"),
    [
        (chat_params.CompletionCreateParamsStreaming, ChatRequest),
        (text_params.CompletionCreateParamsStreaming, CompletionRequest),
    ],
)
def test_every_documented_field_is_known(documented: Any, shape: Any) -> None:
    """No field that OpenAI documents is unknown to us."""
    names = {name for cls in (documented, *documented.__orig_bases__) for name in cls.__annotations__}
    assert names
    assert names <= set(shape.__struct_fields__)


def test_a_field_has_one_fate() -> None:
    """No field is both harmless and refused."""
    assert not INERT & NEUTRAL.keys()


HONOURED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"temperature": 0}, {"temperature": 0.0}),
    (CHAT, {"temperature": 2}, {"temperature": 2.0}),
    (CHAT, {"temperature": None}, {"temperature": 1.0}),
    (CHAT, {"top_p": 0.1}, {"top_p": 0.1}),
    (CHAT, {"top_k": 40}, {"top_k": 40}),
    (CHAT, {"top_k": -1}, {"top_k": 0}),
    (CHAT, {"min_p": 0.05}, {"min_p": 0.05}),
    (CHAT, {"seed": -(2**63)}, {"seed": -(2**63)}),
    (CHAT, {"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    (CHAT, {"presence_penalty": -2}, {"presence_penalty": -2.0}),
    (CHAT, {"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    (CHAT, {"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    (CHAT, {"logit_bias": {"50": -100, "0": 1.5}}, {"logit_bias": {50: -100.0, 0: 1.5}}),
    (CHAT, {"stop": "\n"}, {"stop": ("\n",)}),
    (CHAT, {"stop": ["a", "b", "c", "d"]}, {"stop": ("a", "b", "c", "d")}),
    (CHAT, {"stop_token_ids": [2, 3]}, {"stop_token_ids": (2, 3)}),
    (CHAT, {"ignore_eos": True}, {"ignore_eos": True}),
    (CHAT, {"max_tokens": 3}, {"max_tokens": 3}),
    (CHAT, {"max_completion_tokens": 3}, {"max_tokens": 3}),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
    (CHAT, {"min_tokens": 2, "max_tokens": 3}, {"min_tokens": 2, "max_tokens": 3}),
    (CHAT, {"n": 3}, {"n": 3}),
    (CHAT, {"logprobs": False}, {"logprobs": None}),
    (CHAT, {"logprobs": True}, {"logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    (TEXT, {}, {"max_tokens": 16}),
    (TEXT, {"max_tokens": 1}, {"max_tokens": 1}),
    (TEXT, {"logprobs": 5}, {"logprobs": 5, "max_tokens": 16}),
    (TEXT, {"n": 2, "best_of": 2}, {"n": 2, "max_tokens": 16}),
    (TEXT, {"max_tokens": 0, "echo": True}, {"max_tokens": 0}),
]


@pytest.mark.parametrize(("path", "fields", "expected"), HONOURED)
def test_honoured_fields_reach_the_backend(
    http: TestClient, backend: FakeBackend, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A sampling field arrives at the backend as it was sent; all others have OpenAI's defaults."""
    response = ask(http, path, **fields)
    assert response.status_code == 200, response.text
    assert backend.requests[-1].params == SamplingParams(**expected)


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"user": "u-1", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}),
    (CHAT, {"prediction": {"type": "content", "content": "Hello"}}),
    (CHAT, {"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h"}),
    (CHAT, {"parallel_tool_calls": False}),
    (CHAT, {"store": False, "service_tier": None, "verbosity": "medium", "reasoning_effort": "none"}),
    (CHAT, {"response_format": {"type": "text"}, "modalities": ["text"]}),
    (CHAT, {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"}),
    (CHAT, {"tool_choice": "auto", "function_call": "auto"}),
    (CHAT, dict.fromkeys(sorted(NEUTRAL.keys() - {"suffix"}))),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": False}}),
    (CHAT, {"stream": None, "stream_options": None, "n": None, "stop": None, "logit_bias": None}),
    (TEXT, {"suffix": None, "user": "u"}),
    (TEXT, {"suffix": ""}),
]


@pytest.mark.parametrize(("path", "fields"), ACCEPTED)
def test_values_that_ask_for_nothing_are_accepted(
    http: TestClient, path: str, fields: dict[str, Any]
) -> None:
    """A field that cannot change the answer, or a value that asks for the default, is no reason to refuse."""
    response = ask(http, path, **fields)
    assert response.status_code == 200, response.text


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"moderation": {"model": "m"}}, "moderation"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"store": 0}, "store"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"n": 2, "best_of": 3}, "best_of"),
]


@pytest.mark.parametrize(("path", "fields", "param"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(
    http: TestClient, backend: FakeBackend, path: str, fields: dict[str, Any], param: str
) -> None:
    """A documented value that would change the answer, but is not implemented, is a 400 that names it."""
    response = ask(http, path, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert param in error["message"]
    assert "not supported" in error["message"]
    assert not backend.requests


def test_unsupported_table_is_complete() -> None:
    """Every field that is refused by value has a refusal above."""
    assert {param for _, _, param in UNSUPPORTED} >= set(NEUTRAL)


INVALID: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"temperature": 2.1}, "temperature", "between 0 and 2, but it is 2.1"),
    (CHAT, {"service_tier": "gold"}, "service_tier", "'priority', 'scale', but it is 'gold'"),
    (TEXT, {"service_tier": ""}, "service_tier", "must be one of 'auto', 'default', 'fast', 'flex'"),
    (CHAT, {"temperature": -0.1}, "temperature", "-0.1"),
    (CHAT, {"top_p": 0}, "top_p", "greater than 0 and at most 1, but it is 0"),
    (CHAT, {"top_p": 1.01}, "top_p", "1.01"),
    (CHAT, {"min_p": 1.5}, "min_p", "between 0 and 1"),
    (CHAT, {"top_k": -2}, "top_k", "-2"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty", "between -2 and 2, but it is 3"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty", "between -2 and 2, but it is -3"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 100, but it is 0"),
    (CHAT, {"repetition_penalty": 1e39}, "repetition_penalty", "between 0.01 and 100, but it is 1e+39"),
    (CHAT, {"seed": 2**63}, "seed", str(2**63)),
    (TEXT, {"max_tokens": 0}, "max_tokens", "but it is 0"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "but it is 0"),
    (CHAT, {"max_completion_tokens": -5}, "max_completion_tokens", "-5"),
    (CHAT, {"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "contradict"),
    (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "9, more than the limit of 3"),
    (CHAT, {"n": 0}, "n", "between 1 and 128, but it is 0"),
    (CHAT, {"n": 129}, "n", "129"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20, but it is 21"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs", "'logprobs' is true"),
    (CHAT, {"logit_bias": {"Hello": 1}}, "logit_bias", "'Hello'"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    (CHAT, {"logit_bias": {"7": 1, "07": -1}}, "logit_bias", "'07'"),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    (CHAT, {"logit_bias": {"7": 101}}, "logit_bias.7", "between -100 and 100, but it is 101"),
    (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, "stop", "5 strings, more than 4"),
    (CHAT, {"stop": ""}, "stop", "empty"),
    (CHAT, {"stop": ["a", ""]}, "stop", "empty"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
    (CHAT, {"messages": []}, "messages", "empty"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
    (TEXT, {"logprobs": 6}, "logprobs", "between 0 and 5, but it is 6"),
    (TEXT, {"logprobs": -1}, "logprobs", "-1"),
    (TEXT, {"prompt": []}, "prompt", "empty"),
    (TEXT, {"prompt": [[1], []]}, "prompt[1]", "empty"),
    (TEXT, {"prompt": ["a", 1]}, "prompt", "all"),
    (TEXT, {"prompt": [[1], "a"]}, "prompt", "all"),
    (TEXT, {"prompt": [-1]}, "prompt", "-1"),
    (TEXT, {"prompt": [1, "a"]}, "prompt", "token ids throughout"),
    (TEXT, {"prompt": [[1], [5, 2**31]]}, "prompt[1]", str(2**31)),
    (TEXT, {"prompt": ["a"] * 129}, "prompt", "129 prompts, more than 128"),
    (
        TEXT,
        {"prompt": ["a", "b"], "n": 65},
        "n",
        "65 for each of 2 prompts, which makes 130 sequences, more than 128",
    ),
    (TEXT, {"prompt": [[1]] * 128, "n": 2}, "n", "256 sequences"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 entries, more than 1024"),
    (CHAT, {"stop_token_ids": [7] * 1025}, "stop_token_ids", "1025 entries, more than 1024"),
]


def test_more_than_a_million_token_ids_are_refused() -> None:
    """As many as are allowed pass, and one more is refused by number."""
    ids = [7] * MAX_TOKEN_IDS
    check_token_ids("prompt", ids)
    with pytest.raises(InvalidValue, match="1000001 token ids, more than 1000000"):
        check_token_ids("prompt", [*ids, 7])


@pytest.mark.parametrize(("path", "fields", "param", "words"), INVALID)
def test_values_out_of_range_are_refused(
    http: TestClient, backend: FakeBackend, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    """The message has the value and the limit, and `param` the field."""
    response = ask(http, path, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert not backend.requests


MESSAGE_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        ".content[0]",
        "unsupported",
    ),
    (
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}],
        },
        ".content[1]",
        "unsupported",
    ),
    ({"role": "user", "content": [{"type": "file", "file": {}}]}, ".content[0]", "unsupported"),
    ({"role": "user", "content": [{"text": "a"}]}, ".content[0]", "unsupported"),
    ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, ".content[0].x", "unsupported"),
    ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "invalid_type"),
    ({"role": "user", "content": [{"type": "text", "text": 3}]}, ".content[0].text", "invalid_type"),
    ({"role": "user", "content": ["a"]}, ".content[0]", "invalid_type"),
    ({"role": "user", "content": 3}, ".content", "invalid_type"),
    ({"role": "user", "content": None}, ".content", "missing"),
    ({"role": "user"}, ".content", "missing"),
    ({"content": "x"}, ".role", "missing"),
    ({"role": "user", "content": "x", "nam": "y"}, ".nam", "unknown"),
    ({"role": "user", "content": "x", "name": "Ada"}, ".name", "unsupported"),
    ({"role": "tool", "content": "x", "tool_call_id": "c"}, ".role", "unsupported"),
    ({"role": "function", "content": "x", "name": "f"}, ".role", "unsupported"),
    ({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, ".tool_calls", "unsupported"),
    ({"role": "assistant", "refusal": "no"}, ".refusal", "unsupported"),
    ({"role": "assistant", "audio": {"id": "a"}}, ".audio", "unsupported"),
    (
        {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]},
        ".annotations",
        "unsupported",
    ),
]


@pytest.mark.parametrize(("message", "place", "code"), MESSAGE_ERRORS)
def test_a_bad_message_is_refused_by_its_place(
    http: TestClient, message: dict[str, Any], place: str, code: str
) -> None:
    """`param` is the path to what is wrong within the messages."""
    error = ask(http, CHAT, messages=[*MESSAGES, message]).json()["error"]
    assert error["param"] == "messages[1]" + place
    assert error["param"] in error["message"]
    assert error["code"].startswith(code)


def test_messages_become_roles_and_text(http: TestClient, backend: FakeBackend) -> None:
    """Parts of text are joined, and a developer's message is a system message to the model."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "In"}, {"type": "text", "text": " verse."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "tool_calls": None, "refusal": None},
        {"role": "user", "content": ""},
    ]
    assert ask(http, CHAT, messages=messages).status_code == 200
    assert backend.requests[-1].prompt == ChatPrompt(
        (
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "In verse."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": ""},
        )
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", [TextPrompt("a b")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
    ],
)
def test_all_four_forms_of_a_prompt(
    http: TestClient, backend: FakeBackend, prompt: Any, expected: list[Any]
) -> None:
    """A text, several, token ids, or several lists of them."""
    assert ask(http, TEXT, prompt=prompt).status_code == 200
    assert [request.prompt for request in backend.requests] == expected
    assert len({request.request_id for request in backend.requests}) == len(expected)
