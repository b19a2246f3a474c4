"""The forms of answers, and that a stream and a whole answer say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from litestar.testing import TestClient
from msgspec.structs import replace

from surefoot.backends.fake import FakeBackend, Script
from surefoot.backends.types import Chunk, FinishReason, TokenLogprob, TopLogprob, Usage
from surefoot.gateway.answers import ChatAnswer, Label, TextAnswer, Totals, text_logprobs
from surefoot.gateway.sse import ChunkEvents, data_event
from surefoot.gateway.text_offsets import token_offsets

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi there"}]


def events(text: str) -> list[Any]:
    """The data of each event; the last is `[DONE]`."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part if (part := each.removeprefix("data: ")) == "[DONE]" else json.loads(part) for each in parts]


def test_a_chat_streams_role_text_and_reason(http: TestClient) -> None:
    """The role comes first, then the text, then why it ended, then `[DONE]`; there is no usage unasked."""
    response = http.post(CHAT, json={"model": "fake", "messages": MESSAGES, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert [each["choices"][0]["delta"] for each in chunks] == [
        {"role": "assistant", "content": ""},
        *({"content": piece} for piece in ("Hello", ",", " world", "!")),
        {},
    ]
    assert [each["choices"][0]["finish_reason"] for each in chunks] == [None] * 5 + ["stop"]
    assert {each["object"] for each in chunks} == {"chat.completion.chunk"}
    assert len({each["id"] for each in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {each["system_fingerprint"] for each in chunks} == {"fp_fake_baseline"}
    assert not any("usage" in each for each in chunks)


def test_a_whole_chat(http: TestClient, backend: FakeBackend) -> None:
    """A whole answer has message, usage and fingerprint."""
    backend.script = Script(num_cached_tokens=1)
    body = http.post(CHAT, json={"model": "fake", "messages": MESSAGES, "service_tier": "auto"}).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "system_fingerprint": "fp_fake_baseline",
        "service_tier": "default",
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        },
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_chunk(http: TestClient, path: str) -> None:
    """Asked for usage, a stream ends with a chunk that has it and no choices; the others have null."""
    body = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi there"}
    *chunks, last, done = events(http.post(path, json=body).text)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 8)
    assert all(each["usage"] is None for each in chunks)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"n": 3}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "n": 2}),
    (CHAT, {"max_tokens": 2}),
    (TEXT, {"prompt": "a b"}),
    (TEXT, {"prompt": ["a b", "c"], "n": 2, "logprobs": 1, "echo": True}),
    (TEXT, {"prompt": [[1, 2], [3]], "echo": True, "max_tokens": 1}),
    (TEXT, {"prompt": "a b", "logprobs": 0}),
]


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
def test_a_stream_and_a_whole_answer_say_the_same(
    http: TestClient, path: str, fields: dict[str, Any]
) -> None:
    """Text, log-probabilities, reasons and usage of a stream add up to the whole answer."""
    body = {"model": "fake"} | ({"messages": MESSAGES} if path == CHAT else {}) | fields
    whole = http.post(path, json=body).json()
    stream = http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, last, _ = events(stream.text)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        if path == CHAT:
            assert (
                "".join(each["delta"].get("content", "") for each in pieces) == choice["message"]["content"]
            )
        else:
            assert "".join(each["text"] for each in pieces) == choice["text"]
        assert [each["finish_reason"] for each in pieces if each["finish_reason"]] == [
            choice["finish_reason"]
        ]
        for name in choice["logprobs"] or ():
            parts = [each["logprobs"][name] for each in pieces if each["logprobs"] is not None]
            if choice["logprobs"][name] is not None:
                assert [entry for part in parts for entry in part] == choice["logprobs"][name]


def test_chat_logprobs(http: TestClient) -> None:
    """Each token has its bytes, its log-probability and the alternatives asked for."""
    body = {"model": "fake", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    alternative = {"token": "<alt 1>", "logprob": -1.0, "bytes": list(b"<alt 1>")}
    token = {"token": "Hello", "logprob": -0.125, "bytes": list(b"Hello"), "top_logprobs": [alternative]}
    assert choice["logprobs"] == {"content": [token], "refusal": None}


def test_choices_of_several_prompts(http: TestClient) -> None:
    """Choice j of prompt i has index i * n + j, and an echo comes before its choice's text."""
    body = {"model": "fake", "prompt": ["a b", "c"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    choices = http.post(TEXT, json=body).json()["choices"]
    assert [(each["index"], each["text"]) for each in choices] == [
        (0, "a bHello"),
        (1, "a bHello"),
        (2, "cHello"),
        (3, "cHello"),
    ]
    assert choices[0]["logprobs"] == {
        "tokens": ["a", " b", "Hello"],
        "token_logprobs": [None, -0.25, -0.125],
        "top_logprobs": [None, {"<alt 1>": -1.0, " b": -0.25}, {"<alt 1>": -1.0, "Hello": -0.125}],
        "text_offset": [0, 1, 3],
    }
    assert {each["finish_reason"] for each in choices} == {"length"}


def token(raw: bytes, logprob: float | None = -1.0, top: tuple[TopLogprob, ...] = ()) -> TokenLogprob:
    """A token of these bytes."""
    return TokenLogprob(0, raw.decode(errors="replace"), raw, logprob, top)


def test_offsets_count_characters() -> None:
    """A token that is part of a character has that character's offset, and a name of its own."""
    emoji = "é🙂".encode()
    tokens = [token(emoji[:2]), token(emoji[2:3]), token(emoji[3:6]), token(b"x")]
    made = text_logprobs(tokens, 2, "é🙂x")
    assert made.text_offset == [2, 3, 3, 4]
    assert made.tokens == ["é", "bytes:\\xf0", "bytes:\\x9f\\x99\\x82", "x"]


def test_offsets_stay_within_the_text() -> None:
    """When a stop string ends the text within its last token, that token's offset is where it begins."""
    assert text_logprobs([token(b"a"), token(b"bcSTOP")], 0, "abc").text_offset == [0, 1]


OFFSETS: list[tuple[str, str, list[bytes], list[int]]] = [
    ("an end token that was left out", "ab", [b"a", b"<|end|>", b"b"], [0, 1, 1]),
    ("one at the beginning", "ab", [b"<s>", b"a", b"b"], [0, 0, 1]),
    ("one at the end", "a", [b"a", b"<|end|>"], [0, 1]),
    ("several", "ab", [b"<s>", b"a", b"<|end|>", b"<|end|>", b"b"], [0, 0, 1, 1, 1]),
    ("one within a character", "🙂x", [b"\xf0\x9f", b"<|end|>", b"\x99\x82", b"x"], [0, 0, 0, 1]),
    ("one that is echoed verbatim", "<s>a", [b"<s>", b"a"], [0, 3]),
    ("one whose name is spelled out behind it", "<s>a", [b"<s>", b"<", b"s>", b"a"], [0, 3, 3, 3]),
    ("SentencePiece's first space", "a b", [b"<s>", b" a", b" b"], [0, 0, 1]),
    ("a prompt that was normalised", "e\u0301 b c", ["é".encode(), b" b", b" c"], [0, 2, 4]),
    ("bytes of no character", "\ufffdx", [b"\xf0", b"x"], [0, 0]),
    ("no text at all", "", [b"<|end|>"], [0]),
]


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"), [row[1:] for row in OFFSETS], ids=[r[0] for r in OFFSETS]
)
def test_offsets_point_into_the_text_that_was_sent(
    text: str, tokens: list[bytes], offsets: list[int]
) -> None:
    """A token that is not in the text has the offset where it stands and moves no other."""
    assert token_offsets(tokens, text, begins=True) == offsets


def test_offsets_go_on_behind_earlier_chunks() -> None:
    """Within a text a leading space is a token's own."""
    assert text_logprobs([token(b"<|end|>"), token(b" a"), token(b"b")], 7, " ab").text_offset == [7, 7, 9]


def test_impossible_tokens_have_a_number() -> None:
    """A log-probability of minus infinity, which JSON lacks, is -9999."""
    top = (TopLogprob(1, "y", b"y", float("-inf")),)
    made = text_logprobs([token(b"x", float("-inf"), top)], 0, "x")
    assert made.token_logprobs == [-9999.0]
    assert made.top_logprobs == [{"y": -9999.0, "x": -9999.0}]


def test_text_and_reason_of_one_event_share_a_chunk() -> None:
    """A raw completion's last chunk may have both text and the reason; one without either is not sent."""
    label = Label(id="cmpl-1", created=0, model="m", num_choices=1, includes_usage=False)
    answer = TextAnswer(label, 1)
    list(answer.opening("fp"))
    assert list(answer.pieces(0, Chunk(0, "", (1,)))) == []
    (piece,) = answer.pieces(0, Chunk(0, "a", (2,), None, FinishReason.STOP))
    assert (piece.text, piece.finish_reason) == ("a", "stop")
    assert list(answer.closing(Totals(Usage(num_prompt_tokens=1, num_output_tokens=2)))) == []


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("make", [lambda label: TextAnswer(label, 1), ChatAnswer])
def test_a_chunk_encoded_in_parts_is_the_chunk(make: Callable[[Label], Any], includes_usage: bool) -> None:
    """The event of a piece has the bytes of the chunk with that piece, whatever characters are in it."""
    label = Label(
        id="id-1",
        created=7,
        model='a "model"',
        num_choices=1,
        includes_usage=includes_usage,
        service_tier="x",
    )
    answer = make(label)
    list(answer.opening("fp"))
    chunks = ChunkEvents(answer.empty())
    for piece in answer.pieces(0, Chunk(0, ']}\n"é', (1,), None, FinishReason.STOP)):
        assert chunks.event(piece) == data_event(replace(answer.empty(), choices=[piece]))


def test_models(http: TestClient) -> None:
    """Models are listed and found by id, with the length of their context."""
    model = {
        "id": "fake",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "surefoot",
        "max_model_len": 2048,
    }
    assert http.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert http.get("/v1/models/fake").json() == model
    missing = http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "org/other" in missing.json()["error"]["message"]
