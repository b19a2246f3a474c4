"""Every error a client can get, and the one table that says how it looks over HTTP.

    GatewayError
    ├── InvalidRequest          the request is at fault; `param` names the field
    │   ├── MalformedJson       the body is not JSON; the message says where it breaks
    │   ├── InvalidType         a value has the wrong type
    │   ├── MissingField        a required field is absent
    │   ├── UnknownField        no endpoint of this name has such a field
    │   ├── InvalidValue        a value is out of range
    │   └── Unsupported         a documented field, or a value of one, that is not implemented here
    ├── BodyTooLarge            the body exceeds the limit
    ├── HeadTooLarge            the first line and the headers exceed the limit
    ├── InvalidKey              no key, one that has expired, or one that no tenant has
    ├── NotAdmin                a key that is right, where the operators' is asked for
    ├── NotEnabled              something that this server was not set up for
    ├── TooManyRequests         one of the tenant's own limits is reached; `retry_after_s` says until when
    ├── UnknownTenant           an operator asked for a tenant that is not there
    └── ClientGone              nobody is left to answer

Beside these stand the backends' errors (`backends/errors.py`) and Litestar's for paths and methods. Anything
else is a fault of ours: the client learns nothing of it but the request id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from msgspec import Struct, field

from surefoot.backends import errors as backend

MAX_QUOTED = 100
"""A name or value that a client sent is quoted up to so many characters."""


class GatewayError(Exception):
    """The root. `str(error)` is fit for a client. `param` is the field at fault, if it is a single one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(GatewayError):
    """The request is at fault."""


class MalformedJson(InvalidRequest):
    """The body is not JSON."""


class InvalidType(InvalidRequest):
    """A value has the wrong type."""


class MissingField(InvalidRequest):
    """A required field is absent."""


class UnknownField(InvalidRequest):
    """The field is not one of OpenAI's, nor one of our additions."""


class InvalidValue(InvalidRequest):
    """A value is out of range, or does not go with another one."""


class Unsupported(InvalidRequest):
    """Something documented that is not implemented here."""


class BodyTooLarge(GatewayError):
    """The body exceeds the limit."""


class HeadTooLarge(GatewayError):
    """The first line and the headers exceed the limit."""


class InvalidKey(GatewayError):
    """No key was sent, one that has expired, or one that no tenant has."""


class NotAdmin(GatewayError):
    """The operator's key was asked for, and a tenant's was sent."""


class NotEnabled(GatewayError):
    """The server was started without what this needs."""


class TooManyRequests(GatewayError):
    """The tenant reached a limit of its own; `reason` is the limit's name.

    `retry_after_s` says when it will have room again, as far as that is known.
    """

    def __init__(self, message: str, *, retry_after_s: float, reason: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class UnknownTenant(GatewayError):
    """There is no tenant of that id. Only operators ask."""


class ClientGone(GatewayError):
    """The client closed the connection."""


def shortened(text: str) -> str:
    """As much of a client's own text as a message may quote."""
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "…"


class ErrorBody(Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, frozen=True):
    """The body of an error, and the data of an error event within a stream."""

    error: ErrorBody


class HttpError(Struct, frozen=True):
    """An error, ready to be sent."""

    status: int
    body: ErrorResponse
    headers: Mapping[str, str]


class Rule(Struct, frozen=True):
    """How one class of errors looks. `message` replaces the error's own where that is not ours.

    `retry_after_s` says when to come back, unless the error itself knows better.
    """

    status: int
    type: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str | None = None
    retry_after_s: float | None = None


INVALID = "invalid_request_error"
SERVER = "server_error"
LIMIT = "rate_limit_error"
# The openai client obeys this one: the same request would meet the same end.
NO_RETRY = {"x-should-retry": "false"}
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
"""What a client with a base_url that lacks /v1, or has it twice, means."""
LATER_S = 5.0
MAX_RETRY_AFTER_S = 60.0
"""Nobody is told to wait longer: by then what the answer was computed from says little."""

RULES: Mapping[type[BaseException], Rule] = {
    InvalidRequest: Rule(400, INVALID, "invalid_request"),
    MalformedJson: Rule(400, INVALID, "invalid_json"),
    InvalidType: Rule(400, INVALID, "invalid_type"),
    MissingField: Rule(400, INVALID, "missing_required_parameter"),
    UnknownField: Rule(400, INVALID, "unknown_parameter"),
    InvalidValue: Rule(400, INVALID, "invalid_value"),
    Unsupported: Rule(400, INVALID, "unsupported_parameter"),
    InvalidKey: Rule(401, INVALID, "invalid_api_key", {"www-authenticate": "Bearer"}),
    UnknownTenant: Rule(404, INVALID, "unknown_tenant"),
    BodyTooLarge: Rule(413, INVALID, "request_too_large"),
    HeadTooLarge: Rule(431, INVALID, "headers_too_large"),
    NotAdmin: Rule(403, INVALID, "admin_key_required"),
    NotEnabled: Rule(404, INVALID, "not_enabled"),
    TooManyRequests: Rule(429, LIMIT, "rate_limit_exceeded"),
    # nginx's number. Nobody receives it; logs and metrics do.
    ClientGone: Rule(499, INVALID, "client_gone"),
    backend.RequestError: Rule(400, INVALID, "invalid_request"),
    backend.ContextTooLong: Rule(400, INVALID, "context_length_exceeded"),
    backend.InvalidPrompt: Rule(400, INVALID, "invalid_prompt"),
    backend.UnknownModel: Rule(404, INVALID, "model_not_found"),
    backend.DeadlineExceeded: Rule(504, SERVER, "deadline_exceeded", NO_RETRY),
    backend.RequestFault: Rule(500, SERVER, "request_fault", NO_RETRY),
    backend.Unavailable: Rule(503, SERVER, "unavailable", retry_after_s=LATER_S),
    backend.NotReady: Rule(503, SERVER, "not_ready", retry_after_s=LATER_S),
    backend.Overloaded: Rule(429, LIMIT, "overloaded"),
    backend.EngineFailed: Rule(503, SERVER, "engine_failed", retry_after_s=LATER_S),
    NotFoundException: Rule(404, INVALID, "unknown_path"),
    MethodNotAllowedException: Rule(405, INVALID, "method_not_allowed"),
    Exception: Rule(500, SERVER, "internal_error", message="The server failed to process the request."),
}


def is_ours(error: BaseException) -> bool:
    """Whether the error was foreseen; any other one is a bug and worth a traceback."""
    return isinstance(error, (GatewayError, backend.BackendError, HTTPException))


def to_http(error: BaseException, *, method: str = "", path: str = "") -> HttpError:
    """Look an error up in the table. `method` and `path` are told to clients that asked for a wrong one."""
    rule = _rule(error)
    body = ErrorBody(_message(error, rule, method, path), rule.type, _param(error), rule.code)
    own_headers = error.headers if isinstance(error, HTTPException) else None
    headers = {**(own_headers or {}), **rule.headers, **_retry_headers(error, rule)}
    return HttpError(rule.status, ErrorResponse(body), headers)


def refusal_reason(error: BaseException) -> str | None:
    """One word for why a good request was not taken; None if that is not what the error says."""
    if isinstance(error, (TooManyRequests, backend.Overloaded)):
        return error.reason
    return _rule(error).code if isinstance(error, backend.Unavailable) else None


def _retry_headers(error: BaseException, rule: Rule) -> Mapping[str, str]:
    """When to come back: to the millisecond for OpenAI's clients, in whole seconds for all others."""
    if isinstance(error, (TooManyRequests, backend.Overloaded)):
        after_s: float | None = error.retry_after_s
    else:
        after_s = rule.retry_after_s
    if after_s is None:
        return {}
    after_ms = math.ceil(min(max(after_s, 0.001), MAX_RETRY_AFTER_S) * 1000)
    return {
        "retry-after": str(math.ceil(after_ms / 1000)),
        "retry-after-ms": str(after_ms),
        "x-should-retry": "true",
    }


def _rule(error: BaseException) -> Rule:
    for cls in type(error).__mro__:
        if cls in RULES and cls is not Exception:
            return RULES[cls]
    if isinstance(error, HTTPException) and 400 <= error.status_code < 500:
        return Rule(error.status_code, INVALID, "invalid_request", message=error.detail)
    return RULES[Exception]


def _message(error: BaseException, rule: Rule, method: str, path: str) -> str:
    if isinstance(error, NotFoundException):
        meant = "/v1" + path.removeprefix("/v1").removeprefix("/v1")
        hint = (
            f". Did you mean '{meant}'? A client's base_url ends with /v1." if meant in OPENAI_PATHS else ""
        )
        return f"Unknown path: {method} {path}{hint}"
    if isinstance(error, MethodNotAllowedException):
        allowed: Any = (error.headers or {}).get("allow", "")
        return f"{method} is not allowed on {path}, only {allowed}."
    return str(error) if rule.message is None else rule.message


def _param(error: BaseException) -> str | None:
    if isinstance(error, backend.UnknownModel):
        return "model"
    return error.param if isinstance(error, (GatewayError, backend.RequestError)) else None
