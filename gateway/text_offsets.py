"""Where each token's text lies in the text that a client gets."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

REACH = 16
"""How many characters after the expected place a token is looked for. A normalised prompt needs a few."""


def token_offsets(tokens: Sequence[bytes], text: str, *, begins: bool) -> list[int]:
    """The offset of each token's own text in `text`, which is all that these tokens became.

    A token that is part of a character has that character's offset. One whose bytes are not in the text (a
    special token that was left out) has the offset where it stands. `begins` says that nothing is before
    `text`, where SentencePiece's first space is dropped.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, end = [], 0
    for number, token in enumerate(tokens, 1):
        state = decoder.getstate()
        piece = decoder.decode(token)
        if begins and end == 0 and not text.startswith(piece) and text.startswith(piece.removeprefix(" ")):
            piece = piece.removeprefix(" ")
        start = text.find(piece, end, end + len(piece) + REACH)
        if start < 0 and number == len(tokens) and end < len(text) and piece.startswith(text[end:]):
            # A stop string ends the text within its last token.
            start, piece = end, text[end:]
        offsets.append(end if start < 0 else start)
        if start < 0:
            decoder.setstate(state)
        else:
            end = start + len(piece)
    return offsets
