"""Why a loss cannot be measured."""

from __future__ import annotations


class LossError(ValueError):
    """The request is of no use: a text, a length, a count. The message has the value and the limit."""
