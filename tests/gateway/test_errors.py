"""Every error in OpenAI's shape."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from litestar.testing import TestClient
from structlog.testing import capture_logs

from surefoot.backends import errors as backend_errors
from surefoot.backends.fake import FakeBackend, Script
from surefoot.backends.types import BackendState, BackendStatus
from surefoot.gateway import errors as gateway_errors
from surefoot.gateway.app import create_app
from surefoot.gateway.decode import ELSEWHERE, decode
from surefoot.gateway.errors import UnknownField
from surefoot.gateway.schemas import ChatRequest, CompletionRequest
from surefoot.gateway.tenants import Tenants
from surefoot.policies.baseline import BaselinePolicy

CHAT = "/v1/chat/completions"
VALID: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi there"}]}


def error_of(response: Any) -> dict[str, Any]:
    """The error object, after a check that nothing else is in the body."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
def deep_http() -> Iterator[TestClient]:
    """A client of a gateway that takes bodies as large as it does by default."""
    with TestClient(create_app([FakeBackend()], Tenants(), BaselinePolicy())) as client:
        assert client.get("/health/ready").status_code == 200
        yield client


MALFORMED = [
    (b"", "The body is empty"),
    (b" \n", "The body is empty"),
    (b"{", "line 1, column 2 (byte 1 of 1)"),
    (b'{"model": "fake",\n "messages": [,]}', "line 2, column 15 (byte 32 of 35)"),
    (b'{"model": "fake", "messages": []} x', "line 1, column 35 (byte 34 of 35)"),
    (b'{"temperature": NaN}', "line 1, column 17 (byte 16 of 20)"),
    (b'{"model":\n"\xff"}', "line 2, column 2 (byte 11 of 14)"),
    (b'{"model": "\\ud800"}', "half of a surrogate pair stands alone at line 1, column 12 (byte 11 of 19)"),
    (b'{"model": "\\ud800", "messages": []}', "surrogate pair at line 1, column 18 (byte 17 of 35)"),
]


@pytest.mark.parametrize(("body", "place"), MALFORMED)
def test_bad_json_says_where_it_breaks(http: TestClient, body: bytes, place: str) -> None:
    """The message has line, column and byte of the first thing that is wrong."""
    response = http.post(CHAT, content=body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
    assert place in error["message"]


@pytest.mark.parametrize(
    "nested",
    [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000],
    ids=["lists", "objects"],
)
@pytest.mark.parametrize("field", [b"tools", b"response_format", b"prediction"])
def test_deep_nesting_is_refused(deep_http: TestClient, field: bytes, nested: bytes) -> None:
    """A body that nests deeper than can be read is the client's fault."""
    if field == b"prediction":
        nested = b'{"type": "content", "content": [{"text": ' + nested + b"}]}"
    body = json.dumps(VALID).encode()[:-1] + b', "%s": %s}' % (field, nested)
    response = deep_http.post(CHAT, content=body)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert "nested too deeply" in error["message"]


def test_a_part_of_deeply_nested_type_is_refused(http: TestClient) -> None:
    """A message's part whose type is no text is refused without being quoted."""
    part = b'{"type": ' + b"[" * 900 + b"]" * 900 + b"}"
    body = b'{"model": "fake", "messages": [{"role": "user", "content": [%s]}]}' % part
    response = http.post(CHAT, content=body)
    assert (response.status_code, error_of(response)["code"]) == (400, "unsupported_parameter")


LONG = "x" * 90_000
LONG_NAMES: list[dict[str, Any]] = [
    {"<" + " - at `$x" * 8000 + "\n>": 1},
    {LONG: 1},
    {"a - at `$" + LONG: 1},
    {"stream_options": {LONG: 1}},
    {"messages": [{"role": LONG, "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", LONG: 1}]}]},
    {"logit_bias": {LONG: 1}},
    {"model": LONG},
]


def test_a_long_name_is_read_in_linear_time() -> None:
    """A megabyte of what looks like msgspec's own words is refused; in quadratic time it takes minutes."""
    name = "<" + " - at `$x" * 80_000 + "\n>"
    with pytest.raises(UnknownField, match="Unknown parameter"):
        decode(json.dumps(VALID | {name: 1}).encode(), ChatRequest)


@pytest.mark.parametrize("fields", LONG_NAMES)
def test_long_names_are_quoted_in_part(http: TestClient, fields: dict[str, Any]) -> None:
    """What a client sent is refused at once, however long, and its first 100 characters are quoted."""
    response = http.post(CHAT, json=VALID | fields)
    error = error_of(response)
    assert response.status_code in (400, 404)
    assert len(error["message"]) < 400
    assert len(error["param"] or "") < 150


WRONG_SHAPES: list[tuple[Any, str, str | None, str]] = [
    ([1], "invalid_type", None, "expected `object`, got `array`"),
    ("x", "invalid_type", None, "got `str`"),
    ({"messages": []}, "missing_required_parameter", "model", "'model'"),
    ({"model": "fake"}, "missing_required_parameter", "messages", "'messages'"),
    (VALID | {"model": 3}, "invalid_type", "model", "expected `str`, got `int`"),
    (VALID | {"messages": "Hi"}, "invalid_type", "messages", "expected `array`, got `str`"),
    (VALID | {"messages": [{"role": 1}]}, "invalid_type", "messages[0].role", "messages[0].role"),
    (VALID | {"messages": [None]}, "invalid_type", "messages[0]", "null"),
    (VALID | {"temperature": "hot"}, "invalid_type", "temperature", "got `str`"),
    (VALID | {"max_tokens": 1.5}, "invalid_type", "max_tokens", "got `float`"),
    (VALID | {"n": True}, "invalid_type", "n", "got `bool`"),
    (VALID | {"stream": "yes"}, "invalid_type", "stream", "got `str`"),
    (
        VALID | {"logit_bias": {"1": "x"}},
        "invalid_type",
        "logit_bias",
        "a value of 'logit_bias': expected",
    ),
    (VALID | {"stop": [1]}, "invalid_type", "stop[0]", "got `int`"),
    (VALID | {"metadata": {"a": 1}}, "invalid_type", "metadata", "got `int`"),
    (VALID | {"temprature": 1}, "unknown_parameter", "temprature", "Did you mean 'temperature'?"),
    (VALID | {"n_predict": 1}, "unknown_parameter", "n_predict", "Did you mean 'max_tokens'?"),
    (VALID | {"priority": 1}, "unknown_parameter", "priority", "Did you mean 'service_tier'?"),
    (VALID | {"zzz": 1}, "unknown_parameter", "zzz", "'zzz'."),
    (
        VALID | {"stream_options": {"usage": True}},
        "unknown_parameter",
        "stream_options.usage",
        "stream_options.usage",
    ),
]


@pytest.mark.parametrize(("body", "code", "param", "words"), WRONG_SHAPES)
def test_wrong_shapes_are_named_by_path(
    http: TestClient, body: Any, code: str, param: str | None, words: str
) -> None:
    """A wrong type, a missing field and an unknown one are told apart, and `param` is the path to it."""
    response = http.post(CHAT, json=body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert words in error["message"]


def test_each_name_from_elsewhere_means_a_field() -> None:
    """What another server calls a field leads to a field that both endpoints have."""
    common = {*ChatRequest.__struct_fields__} & {*CompletionRequest.__struct_fields__}
    assert set(ELSEWHERE.values()) <= common
    assert not ELSEWHERE.keys() & common


def test_a_number_too_large_to_hold_is_out_of_range(http: TestClient) -> None:
    """Numbers beyond a float, or with thousands of digits, are refused and not misread."""
    for text in (b"1e999", b"1" * 5000):
        body = json.dumps(VALID).encode()[:-1] + b', "temperature": ' + text + b"}"
        error = error_of(http.post(CHAT, content=body))
        assert (error["code"], error["param"]) == ("invalid_value", "temperature")


BACKEND_ERRORS: list[tuple[Exception, int, str, str, str | None, str | None]] = [
    (
        backend_errors.ContextTooLong("The context is 2048 tokens, not 3000.", "messages"),
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "messages",
        None,
    ),
    (
        backend_errors.InvalidPrompt("No such token: 99999.", "prompt"),
        400,
        "invalid_request_error",
        "invalid_prompt",
        "prompt",
        None,
    ),
    (backend_errors.RequestError("No.", "n"), 400, "invalid_request_error", "invalid_request", "n", None),
    (
        backend_errors.UnknownModel("No model x."),
        404,
        "invalid_request_error",
        "model_not_found",
        "model",
        None,
    ),
    (backend_errors.DeadlineExceeded("Too late."), 504, "server_error", "deadline_exceeded", None, None),
    (backend_errors.RequestFault("Broken."), 500, "server_error", "request_fault", None, None),
    (backend_errors.NotReady("Loading."), 503, "server_error", "not_ready", None, "5"),
    (backend_errors.Overloaded("Full."), 429, "rate_limit_error", "overloaded", None, "1"),
    (backend_errors.EngineFailed("Down."), 503, "server_error", "engine_failed", None, "5"),
]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Whether the answer is asked for as a stream."""
    return bool(request.param)


@pytest.mark.parametrize(
    ("raised", "status", "kind", "code", "param", "retry_after"),
    BACKEND_ERRORS,
    ids=lambda each: type(each).__name__,
)
def test_a_backends_refusal_is_an_http_error(
    http: TestClient,
    backend: FakeBackend,
    stream: bool,
    raised: Exception,
    status: int,
    kind: str,
    code: str,
    param: str | None,
    retry_after: str | None,
) -> None:
    """An error before the first event has its own status, for streams as well."""
    backend.script = Script(error_at_start=raised)
    response = http.post(CHAT, json=VALID | {"stream": stream})
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert (error["message"], error["param"]) == (str(raised), param)
    assert response.headers.get("retry-after") == retry_after


def test_every_backend_error_has_a_row() -> None:
    """A new class of backend error cannot be forgotten in the table."""
    classes = [
        each
        for each in vars(backend_errors).values()
        if isinstance(each, type) and each is not backend_errors.BackendError
    ]
    assert classes
    assert set(classes) <= set(gateway_errors.RULES)


@pytest.fixture
def bug(backend: FakeBackend) -> str:
    """A fault that no error class foresees; gives the text that must not leak."""
    secret = "the prompt was: Hi there"
    backend.script = Script(error_at_start=ValueError(secret))
    return secret


def test_a_bug_is_a_500_that_leaks_nothing(http: TestClient, bug: str) -> None:
    """The client and the log learn that something broke and where, but not what was in it."""
    with capture_logs() as logs:
        response = http.post(CHAT, json=VALID)
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert bug not in response.text
    assert [each["event"] for each in logs] == ["request.crashed", "request.finished"]
    assert logs[1]["error"] == "internal_error"


def test_an_error_in_the_midst_of_a_whole_answer_is_an_http_error(
    http: TestClient, backend: FakeBackend
) -> None:
    """Nothing of a whole answer is sent before it is whole."""
    backend.script = Script(error=backend_errors.EngineFailed("Down."), error_at=2)
    response = http.post(CHAT, json=VALID)
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_failed")


def test_context_too_long_has_the_numbers(http: TestClient) -> None:
    """The backend's message reaches the client as it is."""
    response = http.post(CHAT, json=VALID | {"max_tokens": 4000})
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert "4000" in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v2/models", "/v1/embeddings"])
def test_unknown_paths(http: TestClient, path: str) -> None:
    """A path that does not exist is named in a 404."""
    response = http.get(path)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "unknown_path")
    assert path in error["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions"])
def test_a_wrong_base_url_is_noticed(http: TestClient, path: str) -> None:
    """A client whose base_url lacks /v1, or has it twice, is told the right path; others get no such hint."""
    assert (
        f"Did you mean '{CHAT}'? A client's base_url ends with /v1." in error_of(http.post(path))["message"]
    )
    assert "Did you mean" not in error_of(http.post("/v1/embeddings"))["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("DELETE", "/v1/models/fake"), ("POST", "/metrics")]
)
def test_wrong_methods(http: TestClient, method: str, path: str) -> None:
    """A wrong method is a 405 that says which ones are right."""
    response = http.request(method, path)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] in error["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_unknown_models(http: TestClient, path: str) -> None:
    """A model that nobody serves is a 404 that names it."""
    response = http.post(
        path, json={"model": "gpt-9", "prompt": "x"} if "chat" not in path else VALID | {"model": "gpt-9"}
    )
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"]


def test_not_ready(http: TestClient, backend: FakeBackend) -> None:
    """While the backend cannot take requests the answer is a 503 that says why and when to come back."""
    backend.status = BackendStatus(BackendState.FAILED, "the engine is being restarted")
    response = http.post(CHAT, json=VALID)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (503, "not_ready")
    assert "the engine is being restarted" in error["message"]
    assert response.headers["retry-after"]


def test_a_compressed_body_is_refused(http: TestClient) -> None:
    """What is announced as compressed is refused by that name, and not as bad JSON."""
    response = http.post(CHAT, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "content-encoding")
    assert "'gzip'" in error["message"]
    plain = http.post(CHAT, content=json.dumps(VALID), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_an_announced_body_that_is_too_large(http: TestClient) -> None:
    """A body whose announced length exceeds the limit is refused with both numbers."""
    response = http.post(CHAT, content=b"x" * 100_001)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (413, "request_too_large")
    assert "100001" in error["message"]
    assert "100000" in error["message"]


@pytest.mark.parametrize("length", ["0" * 5000 + "47", "9" * 30, "-1", "1e3", "٣"])
def test_a_length_that_is_none(http: TestClient, length: str) -> None:
    """A content-length that no body has is a 400, and not a failure to read it."""
    response = http.post(CHAT, content=b"{}", headers={"content-length": length.encode()})
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "invalid_request")
    assert "content-length" in error["message"]


def test_a_chunked_body_that_is_too_large(http: TestClient) -> None:
    """A body without announced length is cut off at the limit."""
    response = http.post(CHAT, content=(b"x" * 10_000 for _ in range(11)))
    assert response.status_code == 413
    assert "100000" in error_of(response)["message"]


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "9" * 30, "١"])
def test_bad_deadlines(http: TestClient, value: str) -> None:
    """A deadline is a positive whole number of milliseconds."""
    response = http.post(CHAT, json=VALID, headers={"x-surefoot-deadline-ms": value.encode()})
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert error["param"] == "x-surefoot-deadline-ms"


def test_a_deadline_reaches_the_backend(http: TestClient, backend: FakeBackend) -> None:
    """The backend gets what is left of the deadline, in seconds."""
    http.post(CHAT, json=VALID, headers={"x-surefoot-deadline-ms": "3600000"})
    deadline_s = backend.requests[-1].deadline_s
    assert deadline_s is not None
    assert 3000 < deadline_s < 3600


@pytest.mark.parametrize("sent", ["abc-123", "A.b_c", "x" * 128])
def test_a_sane_request_id_is_kept(http: TestClient, sent: str) -> None:
    """The client's own id comes back."""
    assert http.get("/v1/models", headers={"x-request-id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "a\tb", "<script>", "é"])
def test_an_insane_request_id_is_replaced(http: TestClient, sent: str) -> None:
    """What could confuse a log is not repeated; two requests get two ids."""
    ids = [
        http.get("/nope", headers={"x-request-id": sent.encode()}).headers["x-request-id"] for _ in range(2)
    ]
    assert sent not in ids
    assert ids[0] != ids[1]
