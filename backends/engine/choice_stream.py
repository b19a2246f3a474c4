"""From sampled tokens to chunks: text, stop strings, and which tokens a client may see yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from surefoot.backends.types import Chunk, Event, FinishReason, TokenLogprob


class IncrementalDetokenizer(Protocol):
    """Tokens in, text out, incomplete characters held back."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, "" if none yet."""

    def flush(self) -> str:
        """What is still held back, with replacement characters where bytes are missing."""


class _Group(Struct):
    """Tokens that only together make text, and where that text ends."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    start: int
    end: int


class ChoiceStream:
    """One choice's output.

    Text that could yet become a stop string is held back, and the tokens it came from with it, so that
    text, token ids and log-probabilities always end at the same place. Of a completed stop string neither
    the text nor a token that lies wholly in it is emitted.
    """

    def __init__(
        self, index: int, detokenizer: IncrementalDetokenizer, stop: Iterable[str], has_logprobs: bool
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._has_logprobs = has_logprobs
        self._held = ""
        """Text not emitted yet; it begins at position `_num_chars` of the whole text."""
        self._num_chars = 0
        self._groups: list[_Group] = []
        self._open: _Group | None = None
        self.num_emitted = 0

    def push(
        self, token_id: int, logprob: TokenLogprob | None, *, check_stop: bool = True
    ) -> tuple[Chunk | None, bool]:
        """Add a sampled token; returns what may be sent now, and whether a stop string is complete.

        After a completed stop string the stream is at its end: the chunk is the last one and has the reason.
        """
        self._add(token_id, logprob, self._detokenizer.push(token_id))
        if check_stop and (cut := self._find_stop()) is not None:
            count = sum(group.start < cut for group in self._groups)
            return self._emit(count, cut, FinishReason.STOP), True
        safe_end = self._safe_end()
        count = sum(group.end <= safe_end for group in self._groups)
        return (self._emit(count, self._groups[count - 1].end, None) if count else None), False

    def finish(self, reason: FinishReason) -> Chunk:
        """Everything that is left, with the reason."""
        rest = self._detokenizer.flush()
        self._held += rest
        if self._open is not None:
            self._close_group(len(rest))
        return self._emit(len(self._groups), self._num_chars + len(self._held), reason)

    def _add(self, token_id: int, logprob: TokenLogprob | None, piece: str) -> None:
        end = self._num_chars + len(self._held)
        group = self._open or _Group([], [], end, end)
        group.token_ids.append(token_id)
        if logprob is not None:
            group.logprobs.append(logprob)
        self._open = group
        self._held += piece
        if piece:
            self._close_group(len(piece))

    def _close_group(self, num_chars: int) -> None:
        assert self._open is not None
        self._open.end += num_chars
        self._groups.append(self._open)
        self._open = None

    def _find_stop(self) -> int | None:
        """Where the first complete stop string begins. Emitted text cannot be part of one."""
        starts = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return self._num_chars + min(starts) if starts else None

    def _safe_end(self) -> int:
        """The end of the text that no continuation can turn into a stop string."""
        held = self._held
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-length:]) for stop in self._stop):
                return self._num_chars + len(held) - length
        return self._num_chars + len(held)

    def _emit(self, num_groups: int, end: int, reason: FinishReason | None) -> Chunk:
        """Send the first `num_groups` groups, with the text up to `end`."""
        ready, self._groups = self._groups[:num_groups], self._groups[num_groups:]
        num_chars = end - self._num_chars
        text, self._held, self._num_chars = self._held[:num_chars], self._held[num_chars:], end
        token_ids = tuple(token_id for group in ready for token_id in group.token_ids)
        logprobs = tuple(logprob for group in ready for logprob in group.logprobs)
        self.num_emitted += len(token_ids)
        return Chunk(
            index=self._index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self._has_logprobs else None,
            finish_reason=reason,
        )


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with the chunks of one choice that follow one another made one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Chunk) and isinstance(last, Chunk) and last.index == event.index:
            result[-1] = Chunk(
                event.index,
                last.text + event.text,
                last.token_ids + event.token_ids,
                None if last.logprobs is None else last.logprobs + (event.logprobs or ()),
                event.finish_reason,
            )
        else:
            result.append(event)
    return result
