"""Windows of long text, spread over all there is."""

from __future__ import annotations

from collections.abc import Sequence

from ..loss_errors import LossError
from ..tokenizer import Tokenizer


def cut_windows(tokenizer: Tokenizer, documents: Sequence[str], number: int, length: int) -> list[list[int]]:
    """`number` windows of `length` tokens, evenly spread; each begins like a document of the model's.

    Documents are whole, so that early tokens matter for late ones. `LossError` if windows would overlap.
    """
    start = tokenizer.encode("")
    token_ids = tokenizer.encode("\n\n".join(documents), add_special_tokens=False)
    share = length - len(start)
    if share < 1 or len(token_ids) < share * number:
        raise LossError(
            f"the text has {len(token_ids)} tokens, but {number} windows of {length} tokens take"
            f" {share * number}: give more text, or measure less of it"
        )
    begins = [at * (len(token_ids) - share) // max(number - 1, 1) for at in range(number)]
    return [[*start, *token_ids[begin : begin + share]] for begin in begins]
