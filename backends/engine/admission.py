"""What the engine takes in: a message's texts become tokens, and with them a `Request`, or are refused."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from msgspec import Struct

from surefoot.backends.errors import ContextTooLong, InvalidPrompt, RequestError
from surefoot.backends.types import (
    CachePlan,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)

from .cache_rule import PLAN_FORMATS, CacheSpace
from .sequence import Request
from .tokenizer import Tokenizer

LIMIT_IS = "This model's maximum context length is"
"""OpenAI's words. Proxies and agents (LiteLLM, CrewAI) know by them that a shorter prompt would do."""


def admit(
    message: GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    *,
    key: int,
    space: CacheSpace,
    vocab_size: int,
    now_s: float,
    prediction_token_ids: tuple[int, ...] = (),
) -> Request:
    """Check a request against model and cache; raises `RequestError`.

    Without `max_tokens` a choice may fill the context. Without a seed one is drawn.
    """
    params = message.params
    if not prompt_token_ids:
        raise InvalidPrompt("the prompt is empty: it has no tokens", "prompt")
    _check_token_ids("prompt", prompt_token_ids, vocab_size)
    _check_token_ids("logit_bias", params.logit_bias, vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    num_prompt = len(prompt_token_ids)
    limit = context_limit(message.plan.cache, space)
    longest = space.longest(message.plan.cache, num_prompt)
    room = min(limit, longest) - num_prompt
    if room < (1 if params.max_tokens is None else params.max_tokens):
        asked, or_less = "", ""
        if params.max_tokens is not None:
            asked, or_less = f", and {params.max_tokens} more were asked for", " or ask for fewer"
        raise ContextTooLong(
            f"{_what_holds(message.plan.cache, limit, longest, num_prompt)}. The prompt has"
            f" {num_prompt}{asked}: shorten the prompt{or_less}.",
            _param_of(message.prompt),
        )
    return Request(
        message,
        prompt_token_ids,
        key=key,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        arrived_s=now_s,
        prediction_token_ids=prediction_token_ids,
    )


def context_limit(plan: CachePlan, space: CacheSpace) -> int:
    """The longest that a plan lets prompt and output be together, whatever the cache then has room for.

    Raises `RequestError` for a format that there is not.
    """
    if plan.format not in PLAN_FORMATS:
        raise RequestError(f"the plan's cache format {plan.format!r} is none of {', '.join(PLAN_FORMATS)}")
    model_len = space.max_full if space.rule(plan, 1) is None else space.max_context
    return model_len if plan.max_context is None else min(plan.max_context, model_len)


def _what_holds(plan: CachePlan, limit: int, longest: int, num_prompt: int) -> str:
    """The limit that a request does not keep."""
    if longest <= num_prompt < limit:
        return f"{LIMIT_IS} {limit} tokens, and the whole cache has no room for such a prompt"
    if longest < limit:
        return f"{LIMIT_IS} {longest} tokens after such a prompt, since the whole cache holds no more"
    if limit == plan.max_context:
        return f"{LIMIT_IS} {limit} tokens by the request's plan"
    return f"{LIMIT_IS} {limit} tokens"


class Tokens(Struct, frozen=True):
    """A request's texts as tokens."""

    prompt: tuple[int, ...]
    prediction: tuple[int, ...]


def encode(request: GenerateRequest, tokenizer: Tokenizer, longest: int) -> Tokens:
    """Tokenise a request whose context may have up to `longest` tokens. Slow; raises `RequestError`."""
    return Tokens(
        _encode_prompt(request.prompt, tokenizer, longest), _encode_prediction(request, tokenizer, longest)
    )


def _encode_prompt(prompt: Prompt, tokenizer: Tokenizer, longest: int) -> tuple[int, ...]:
    _check_length(prompt, longest, tokenizer.max_token_chars)
    match prompt:
        case ChatPrompt(messages):
            return tuple(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False))
        case TextPrompt(text):
            return tuple(tokenizer.encode(text))
        case TokenPrompt(token_ids):
            return token_ids


def _encode_prediction(request: GenerateRequest, tokenizer: Tokenizer, longest: int) -> tuple[int, ...]:
    """Its first tokens, as many as a context holds; none where the plan does not draft from them.

    One that is longer than any context is refused: it is tokenised like a prompt.
    """
    text, drafts = request.prediction, request.plan.speculation
    if text is None:
        return ()
    if len(text) > longest * tokenizer.max_token_chars:
        raise ContextTooLong(
            f"{LIMIT_IS} {longest} tokens, which the prediction's {len(text)} characters"
            " exceed by far: shorten the prediction.",
            "prediction",
        )
    if "prediction" not in drafts.proposers or not drafts.max_draft:
        return ()
    return tuple(tokenizer.encode(text, add_special_tokens=False)[:longest])


def _check_length(prompt: Prompt, longest: int, max_token_chars: int) -> None:
    """Refuse what is too long for any tokenizer to make fit, before time is spent on it."""
    match prompt:
        case ChatPrompt(messages):
            num_chars = sum(len(message.get("content") or "") for message in messages)
            num_parts = len(messages)
        case TextPrompt(text):
            num_chars, num_parts = len(text), 0
        case TokenPrompt(token_ids):
            num_chars, num_parts = 0, len(token_ids)
    if num_parts > longest or num_chars > longest * max_token_chars:
        size = f"{num_parts} parts" if num_parts > longest else f"{num_chars} characters"
        raise ContextTooLong(
            f"{LIMIT_IS} {longest} tokens, which the prompt's {size} exceed by far: shorten the prompt.",
            _param_of(prompt),
        )


def _param_of(prompt: Prompt) -> str:
    """The request's field that a prompt came in."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} has token id {token_id}; this model's are 0 to {vocab_size - 1}", param
            )
