"""How long answers get: an average of what finished, since `max_tokens` is only a limit."""

from __future__ import annotations

from .sequence import Sequence

UNKNOWN_OUTPUT = 128
"""Tokens of an answer when none of its kind has ended yet."""

MEMORY = 0.1
"""What the newest answer counts in the average."""


class OutputLengths:
    """Mean output tokens by priority and flow, by priority alone where a flow is new."""

    def __init__(self) -> None:
        self._means: dict[tuple[int, str | None], float] = {}

    def observe(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended."""
        message, length = sequence.request.message, sequence.num_output_tokens
        if length == 0:
            return
        for key in ((message.priority, message.flow), (message.priority, None)):
            mean = self._means.get(key, float(length))
            self._means[key] = mean + MEMORY * (length - mean)

    def mean(self, priority: int, flow: str | None = None) -> float:
        """Expected tokens of an answer."""
        return self._means.get((priority, flow), self._means.get((priority, None), UNKNOWN_OUTPUT))

    def remaining(self, sequence: Sequence) -> float:
        """Expected output tokens that a sequence still has to come, at least 1 and within `max_tokens`."""
        message, done = sequence.request.message, sequence.num_output_tokens
        # An answer that has outgrown the average has proven the average wrong: expect half as much again.
        expected = max(self.mean(message.priority, message.flow) - done, done / 2, 1.0)
        return min(expected, max(sequence.request.max_tokens - done, 0))
