"""Stop strings, held-back text, and the place where text, token ids and log-probabilities end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.engine.choice_stream import ChoiceStream
from surefoot.backends.types import Chunk, FinishReason, TokenLogprob


class Pieces:
    """A detokeniser over a list: token t is `pieces[t]`, None one whose character is incomplete."""

    def __init__(self, pieces: list[str | None]) -> None:
        self._pieces = pieces
        self._incomplete = False

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        self._incomplete = piece is None
        return piece or ""

    def flush(self) -> str:
        return "�" if self._incomplete else ""


def run(
    pieces: list[str | None], stop: tuple[str, ...] = (), reason: FinishReason = FinishReason.LENGTH
) -> list[Chunk]:
    """Push every piece as a token; end with `reason` unless a stop string ends it first."""
    stream = ChoiceStream(0, Pieces(pieces), stop, has_logprobs=True)
    chunks: list[Chunk] = []
    for token_id in range(len(pieces)):
        chunk, stopped = stream.push(token_id, TokenLogprob(token_id, "", b"", -1.0))
        if chunk is not None:
            chunks.append(chunk)
        if stopped:
            break
    else:
        chunks.append(stream.finish(reason))
    assert stream.num_emitted == sum(len(chunk.token_ids) for chunk in chunks)
    return chunks


def text_of(chunks: list[Chunk]) -> str:
    """All text."""
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: list[Chunk]) -> list[int]:
    """All tokens."""
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "num_tokens"),
    [
        (["Hello", " wor", "ld", "!"], ("world",), "Hello ", 2),
        (["Hello", " wor", "ld", "!"], (" world",), "Hello", 1),
        (["Hello", " wor", "ld", "!"], ("Hello",), "", 0),
        (["a", "b", "c", "d"], ("bcd", "c"), "ab", 2),
        (["abcabd", "x"], ("abd",), "abc", 1),
        (["ab", "ab", "ac"], ("abac",), "ab", 1),
        (["a\n", "\n", "\nb"], ("\n\n",), "a", 1),
        (["x", None, "é", "y"], ("éy",), "x", 1),
        (["x", None, "é", "y"], ("y",), "xé", 3),
    ],
)
def test_a_stop_string_ends_all_three_at_one_place(
    pieces: list[str | None], stop: tuple[str, ...], text: str, num_tokens: int
) -> None:
    """Text, token ids and log-probabilities end where the stop string begins, however it falls on tokens."""
    chunks = run(pieces, stop)
    assert text_of(chunks) == text
    assert tokens_of(chunks) == list(range(num_tokens))
    assert [p.token_id for c in chunks for p in c.logprobs or ()] == list(range(num_tokens))
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [FinishReason.STOP]


def test_text_is_held_back_only_while_it_may_become_a_stop() -> None:
    """A partial match waits; when it fails, all of it comes out."""
    stream = ChoiceStream(0, Pieces(["one", " STO", "RE", " end"]), ("STOP",), has_logprobs=False)
    assert stream.push(0, None)[0] == Chunk(0, "one", (0,))
    assert stream.push(1, None)[0] is None
    assert stream.push(2, None)[0] == Chunk(0, " STORE", (1, 2))
    assert stream.push(3, None)[0] == Chunk(0, " end", (3,))


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    """What is held back when the length limit ends a choice comes out, with its tokens."""
    chunks = run(["a", None])
    assert text_of(chunks) == "a�"
    assert tokens_of(chunks) == [0, 1]


def test_a_token_without_text_at_the_end_is_counted() -> None:
    """An end by the end token keeps every token before it."""
    chunks = run(["a", ""], reason=FinishReason.STOP)
    assert (text_of(chunks), tokens_of(chunks)) == ("a", [0, 1])


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2).map(tuple),
)
def test_any_split_gives_the_same_text(pieces: list[str], stop: tuple[str, ...]) -> None:
    """The text is the whole text up to the earliest complete stop string, whatever the tokens are."""
    whole = "".join(pieces)
    lengths = list(itertools.accumulate(len(piece) for piece in pieces))
    # A stop counts once it is complete: the first token after which any is found decides.
    cut = next(
        (
            min(i for s in stop if (i := whole[:n].find(s)) >= 0)
            for n in lengths
            if any(s in whole[:n] for s in stop)
        ),
        None,
    )
    assert text_of(run(list(pieces), stop)) == whole[:cut]
