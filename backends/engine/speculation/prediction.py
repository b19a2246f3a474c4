"""The request's own `prediction`: text that the client expects much of the answer to repeat."""

from __future__ import annotations

from msgspec import Struct

from ..sequence import Sequence
from .base import Draft, strength_of_match
from .token_index import TokenIndex


class _Reading(Struct):
    """How far into the prediction an answer is. `agreed` counts the tokens since the last difference."""

    index: TokenIndex
    position: int = 0
    agreed: int = 0
    num_read: int = 0
    """Output tokens that have been compared."""


class PredictionProposer:
    """Follows the prediction while the answer does; after a difference it looks for the place to go on."""

    name = "prediction"

    def __init__(self) -> None:
        self._readings: dict[Sequence, _Reading] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """The prediction's next tokens; None without one, at its end, or while the place is lost."""
        predicted = sequence.request.prediction_token_ids
        if not predicted:
            return None
        reading = self._readings.get(sequence)
        if reading is None:
            reading = self._readings[sequence] = _Reading(TokenIndex(), agreed=4)
            reading.index.extend(predicted)
        self._read_on(reading, sequence)
        token_ids = reading.index.token_ids[reading.position : reading.position + max_tokens]
        if not token_ids or reading.agreed == 0:
            return None
        strengths = tuple(strength_of_match(reading.agreed + j) for j in range(len(token_ids)))
        return Draft(self.name, tuple(token_ids), strengths)

    def finish(self, sequence: Sequence) -> None:
        """Drop the place in the prediction."""
        self._readings.pop(sequence, None)

    def _read_on(self, reading: _Reading, sequence: Sequence) -> None:
        """Compare the output that is new with the prediction, and find the place again where they differ."""
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        predicted = reading.index.token_ids
        for k in range(reading.num_read, len(output)):
            if reading.position < len(predicted) and predicted[reading.position] == output[k]:
                reading.position += 1
                reading.agreed += 1
            elif match := reading.index.match(output[: k + 1][-32:], after=reading.position):
                reading.position, reading.agreed = match.position, match.length
            else:
                reading.agreed = 0
        reading.num_read = len(output)
