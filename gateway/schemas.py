"""Requests as clients send them: OpenAI's two completion endpoints, with vLLM's names for what OpenAI lacks.

A null is as good as an absent field. `check` refuses what cannot be served; after it the properties turn the
request into the backends' vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from surefoot.backends.types import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokenPrompt

from .errors import InvalidValue, MissingField, Unsupported, shortened
from .fields import refuse_unsupported
from .hints import CacheWish, Prediction, SpeculationWish
from .limits import (
    BIAS,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    MAX_STOPS,
    MAX_TEXT_LOGPROBS,
    MAX_TOKENS,
    MAX_TOKENS_WITH_ECHO,
    RANGES,
    TOKEN_ID,
    Range,
    check_range,
    check_token_ids,
    check_token_rules,
)
from .messages import Message, read_messages
from .sla import check_tier

# Without leading zeros: of two keys for one token the first would be lost.
TOKEN_ID_TEXT = re.compile(r"0|[1-9][0-9]{0,9}")


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream. Obfuscation (padding against traffic analysis) is not implemented."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints have in common."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    prediction: Prediction | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Our own.
    speculation: SpeculationWish | None = None
    cache: CacheWish | None = None
    return_metrics: bool | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is wanted piece by piece."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def max_tokens_range(self) -> Range:
        """What `max_tokens` may be."""
        return MAX_TOKENS

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def predicted(self) -> str | None:
        """Text that much of the answer may repeat; None for none."""
        return None if self.prediction is None else self.prediction.read()

    @property
    def max_draft(self) -> int | None:
        """The longest draft that is wanted; None for as long as the plan says."""
        return None if self.speculation is None else self.speculation.ceiling

    def check(self) -> None:
        """Raise an `InvalidRequest` for the first thing that cannot be served."""
        values = asdict(self)
        refuse_unsupported(values)
        check_tier(self.service_tier)
        for name, allowed in RANGES.items():
            if values.get(name) is not None:
                check_range(name, values[name], allowed)
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, self.max_tokens_range)
        for wish in (self.speculation, self.cache):
            if wish is not None:
                wish.check()
        self._check_lists()
        self._check_stream()

    def _check_lists(self) -> None:
        for stop in _check_stops(self.stop):
            if not stop:
                raise InvalidValue("'stop' must not contain an empty string.", "stop")
        check_token_ids("stop_token_ids", self.stop_token_ids or ())
        check_token_rules("stop_token_ids", len(self.stop_token_ids or ()))
        _read_logit_bias(self.logit_bias)

    def _check_stream(self) -> None:
        if self.stream_options is None:
            return
        if not self.streams:
            raise InvalidValue("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise Unsupported(f"'{name}' is not supported by this server; only false is accepted.", name)

    def _params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        min_tokens = self.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidValue(
                f"'min_tokens' is {min_tokens}, more than the limit of {max_tokens}.", "min_tokens"
            )
        return SamplingParams(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            # vLLM's clients say -1 for "no limit", we say 0.
            top_k=max(0, self.top_k or 0),
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=_read_logit_bias(self.logit_bias),
            stop=_check_stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            n=self.num_choices,
            logprobs=logprobs,
        )


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`. Fields of type Any are those of `fields.NEUTRAL`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: dict[str, str] | None = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: Any = None
    response_format: Any = None
    safety_identifier: str | None = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """As `SamplingFields.check`."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidValue("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidValue(
                f"'max_tokens' ({self.max_tokens}) and 'max_completion_tokens' ({self.max_completion_tokens})"
                " contradict each other.",
                "max_completion_tokens",
            )

    def prompts(self) -> tuple[Prompt, ...]:
        """One conversation."""
        return (ChatPrompt(read_messages(self.messages)),)

    def params(self, limit: int | None) -> SamplingParams:
        """How to sample. `limit` is the most tokens that may be asked for; None leaves it to the model."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = _cap(name, getattr(self, name), default=None, limit=limit)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(max_tokens=max_tokens, logprobs=logprobs)


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None

    @property
    def max_tokens_range(self) -> Range:
        """Nothing need be generated if the prompt is echoed."""
        return MAX_TOKENS_WITH_ECHO if self.echo else MAX_TOKENS

    def check(self) -> None:
        """As `SamplingFields.check`."""
        super().check()
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, Range(low=0, high=MAX_TEXT_LOGPROBS))
        if self.best_of is not None and self.best_of != self.num_choices:
            raise Unsupported(
                f"'best_of' is not supported by this server; only the value of 'n' is, {self.num_choices}.",
                "best_of",
            )

    def prompts(self) -> tuple[Prompt, ...]:
        """One prompt, or several."""
        if self.prompt is None:
            raise MissingField("Missing required parameter: 'prompt'.", "prompt")
        if isinstance(self.prompt, str):
            return (TextPrompt(self.prompt),)
        if not self.prompt:
            raise InvalidValue("'prompt' must not be empty.", "prompt")
        if isinstance(self.prompt[0], int):
            return (_token_prompt(self.prompt, "prompt"),)
        self._check_count(len(self.prompt))
        if all(isinstance(each, str) for each in self.prompt):
            return tuple(TextPrompt(str(each)) for each in self.prompt)
        return tuple(_token_prompt(each, f"prompt[{i}]") for i, each in enumerate(self.prompt))

    def _check_count(self, num_prompts: int) -> None:
        if num_prompts > MAX_PROMPTS:
            raise InvalidValue(f"'prompt' has {num_prompts} prompts, more than {MAX_PROMPTS}.", "prompt")
        num_sequences = num_prompts * self.num_choices
        if num_sequences > MAX_SEQUENCES:
            raise InvalidValue(
                f"'n' is {self.num_choices} for each of {num_prompts} prompts, which makes {num_sequences}"
                f" sequences, more than {MAX_SEQUENCES}.",
                "n",
            )

    def params(self, limit: int | None) -> SamplingParams:
        """How to sample. `limit` is the most tokens that may be asked for; OpenAI's default is 16."""
        max_tokens = _cap("max_tokens", self.max_tokens, default=16, limit=limit)
        return self._params(max_tokens=max_tokens, logprobs=self.logprobs)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _cap(name: str, asked: int | None, *, default: int | None, limit: int | None) -> int | None:
    if asked is not None and limit is not None and asked > limit:
        raise InvalidValue(f"'{name}' is {asked}, more than your limit of {limit}.", name)
    if asked is not None:
        return asked
    return min((each for each in (default, limit) if each is not None), default=None)


def _check_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidValue(f"'stop' has {len(stops)} strings, more than {MAX_STOPS}.", "stop")
    return stops


def _read_logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    read = {}
    check_token_rules("logit_bias", len(bias or ()))
    for key, value in (bias or {}).items():
        if not (TOKEN_ID_TEXT.fullmatch(key) and int(key) in TOKEN_ID):
            raise InvalidValue(
                f"'logit_bias' must map token ids to numbers, but has the key '{shortened(key)}'.",
                "logit_bias",
            )
        check_range(f"logit_bias.{key}", value, BIAS)
        read[int(key)] = value
    return read


def _token_prompt(token_ids: Any, param: str) -> TokenPrompt:
    if not isinstance(token_ids, list):
        raise InvalidValue(
            "'prompt' must be all strings, all token ids, or all lists of token ids.", "prompt"
        )
    if not token_ids:
        raise InvalidValue(f"'{param}' must not be empty.", param)
    check_token_ids(param, token_ids)
    return TokenPrompt(tuple(token_ids))
