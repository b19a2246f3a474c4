"""Why a backend could not serve a request.

    BackendError
    ├── RequestError            the request is at fault; `param` names the field
    │   ├── ContextTooLong      prompt and output do not fit the context (the model's, or the whole cache)
    │   └── InvalidPrompt       the prompt cannot be turned into tokens
    ├── UnknownModel            no such model here
    ├── DeadlineExceeded        the request's own deadline passed
    ├── RequestFault            a fault inside this one request; others go on
    └── Unavailable             the backend is at fault; trying again later may help
        ├── NotReady            still starting, or draining
        ├── Overloaded          too much waits; `retry_after_s` says when it may be less
        └── EngineFailed        the engine broke down while it served the request

`gateway/errors.py` has the one table that maps these to HTTP.
"""

from __future__ import annotations


class BackendError(Exception):
    """The root. `str(error)` is fit for a client: no prompt text, no paths, no keys."""


class RequestError(BackendError):
    """The request is at fault. `param` is the request's field, None if no single one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    """Prompt and requested output exceed the model's context."""


class InvalidPrompt(RequestError):
    """The prompt cannot be rendered or tokenised."""


class UnknownModel(BackendError):
    """No backend serves a model of this name."""


class DeadlineExceeded(BackendError):
    """The request's own deadline passed before it was done."""


class RequestFault(BackendError):
    """Something broke inside this one request."""


class Unavailable(BackendError):
    """The backend cannot serve now."""


class NotReady(Unavailable):
    """The backend is starting or draining."""


class Overloaded(Unavailable):
    """Too much waits to take the request, or to keep what it was promised.

    `retry_after_s` is computed from the backlog. `reason` is one word for metrics: `requests` (too many
    wait), `seconds` (too much work waits) or `target` (the first token would come too late).
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "requests") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class EngineFailed(Unavailable):
    """The engine failed while it served the request."""
