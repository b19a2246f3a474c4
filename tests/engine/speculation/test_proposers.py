"""What proposers guess, from what, and what they forget."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.engine.speculation.base import Proposer, strength_of_match
from surefoot.backends.engine.speculation.ngram import NgramProposer
from surefoot.backends.engine.speculation.prediction import PredictionProposer
from surefoot.backends.engine.speculation.suffix import SuffixIndex, SuffixProposer
from surefoot.backends.engine.speculation.token_index import MAX_MATCH, TokenIndex

from .sequences import sequence

tokens = st.lists(st.integers(0, 3), max_size=60)


@given(text=tokens, context=tokens)
def test_a_match_is_a_repetition(text: list[int], context: list[int]) -> None:
    """Wherever an index points, the tokens before it are the context's last ones, to the stated length."""
    index = TokenIndex()
    index.extend(text)
    match = index.match(context)
    if match is not None:
        assert match.length >= 2
        assert text[match.position - match.length : match.position] == context[-match.length :]


@given(text=tokens, context=st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_a_repetition_is_found(text: list[int], context: list[int]) -> None:
    """A pair of tokens that occurred, with something after it, is found."""
    index = TokenIndex()
    index.extend(text)
    occurred = any(text[i : i + 2] == context for i in range(len(text) - 2))
    assert (index.match(context) is not None) == occurred


@given(pieces=st.lists(tokens, max_size=8))
def test_growing_is_reading_at_once(pieces: list[list[int]]) -> None:
    """An index that grew in pieces matches as one that was built at once."""
    grown, whole = TokenIndex(), TokenIndex()
    for piece in pieces:
        grown.extend(piece)
    whole.extend([token_id for piece in pieces for token_id in piece])
    assert grown.match([1, 2, 3]) == whole.match([1, 2, 3])


def test_the_longest_repetition_wins() -> None:
    """Of several places the one that agrees longest is followed, not the newest."""
    draft = NgramProposer().propose(sequence([1, 2, 3, 4, 5, 50, 9, 3, 4, 5, 60, 1, 2, 3, 4, 5]), 2)
    assert draft is not None
    assert draft.token_ids == (50, 9)
    assert draft.strengths == (strength_of_match(5), strength_of_match(6))


def test_a_short_loop_goes_on() -> None:
    """A repetition that reaches the end of the text is continued by itself."""
    draft = NgramProposer().propose(sequence([7, 8, 9, 7, 8, 9, 7, 8]), 7)
    assert draft is not None
    assert draft.token_ids == (9, 7, 8, 9, 7, 8, 9)


def test_nothing_new_is_not_guessed() -> None:
    """Without a repetition there is no draft."""
    assert NgramProposer().propose(sequence(list(range(30))), 4) is None


def test_output_is_looked_up_too() -> None:
    """Tokens that were generated are indexed as they come."""
    proposer, seq = NgramProposer(), sequence([1, 2, 3])
    assert proposer.propose(seq, 2) is None
    for token_id in (10, 11, 12, 13, 10, 11):
        seq.append(token_id)
    draft = proposer.propose(seq, 2)
    assert draft is not None
    assert draft.token_ids == (12, 13)


def test_a_lookup_does_not_grow_with_the_text() -> None:
    """However often a pair occurred, a bounded number of its places is compared."""
    index = TokenIndex()
    index.extend([1, 2] * 10_000)
    match = index.match([1, 2] * 100)
    assert match is not None
    assert match.length == MAX_MATCH


def test_a_prediction_is_followed_from_its_start() -> None:
    """The first draft is the prediction's beginning, the next ones continue behind what was said."""
    proposer, seq = PredictionProposer(), sequence([1], prediction=(5, 6, 7, 8))
    first = proposer.propose(seq, 3)
    assert first is not None
    assert first.token_ids == (5, 6, 7)
    seq.append(5)
    seq.append(6)
    second = proposer.propose(seq, 3)
    assert second is not None
    assert second.token_ids == (7, 8)


def test_a_prediction_is_found_again() -> None:
    """After an insertion, a deletion or a replacement the place in the prediction is found again."""
    predicted = tuple(range(100, 130))
    for output, expected in (
        ([100, 101, 7, 8, 102, 103], 104),  # inserted
        ([100, 101, 105, 106], 107),  # left out
        ([100, 101, 9, 103, 104], 105),  # replaced
    ):
        draft = PredictionProposer().propose(sequence([1], output, prediction=predicted), 1)
        assert draft is not None
        assert draft.token_ids == (expected,)


def test_a_lost_place_is_no_draft() -> None:
    """While the answer is elsewhere, and at the prediction's end, nothing is proposed."""
    proposer = PredictionProposer()
    assert proposer.propose(sequence([1], [100, 55], prediction=(100, 101, 102)), 4) is None
    assert proposer.propose(sequence([1], [100, 101], prediction=(100, 101)), 4) is None
    assert proposer.propose(sequence([1], [100]), 4) is None


def test_a_repeated_line_goes_forward() -> None:
    """Of two equal places in a prediction the one ahead is taken."""
    predicted = (1, 2, 3, 4, 20, 21, 1, 2, 3, 4, 30, 31)
    draft = PredictionProposer().propose(
        sequence([0], [1, 2, 3, 4, 20, 99, 2, 3, 4], prediction=predicted), 1
    )
    assert draft is not None
    assert draft.token_ids == (30,)


@given(tokens, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), tokens)
def test_a_pause_changes_no_draft(
    prompt: list[int], output: list[tuple[int, bool]], prediction: list[int]
) -> None:
    """Who was not asked for a while drafts what it would if it had been asked at every step (TensorRT-LLM
    PR 16888, vLLM 47930).
    """
    always: list[Proposer] = [NgramProposer(), PredictionProposer()]
    at_times: list[Proposer] = [NgramProposer(), PredictionProposer()]
    seq = sequence(prompt or [0], prediction=tuple(prediction))
    for token_id, is_asked in output:
        seq.append(token_id)
        drafts = [proposer.propose(seq, 5) for proposer in always]
        if is_asked:
            assert [proposer.propose(seq, 5) for proposer in at_times] == drafts


def test_suffix_learns_from_its_own_flow() -> None:
    """An output is proposed again to the flow that it came from, and to no other."""
    proposer = SuffixProposer()
    proposer.finish(sequence([1], [10, 11, 12, 13, 14], flow="a", proposers=("suffix",)))
    again = proposer.propose(sequence([2], [10, 11], flow="a"), 3)
    assert again is not None
    assert again.token_ids == (12, 13, 14)
    assert proposer.propose(sequence([2], [10, 11], flow="b"), 3) is None


def test_suffix_learns_outputs_alone() -> None:
    """What one user of a tenant asked is not drafted for another, nor how an answer to it begins."""
    proposer = SuffixProposer()
    proposer.finish(sequence([1, 2, 3, 4], [10, 11], proposers=("suffix",)))
    assert proposer.propose(sequence([1, 2]), 3) is None
    assert proposer.propose(sequence([3, 4]), 3) is None


def test_suffix_keeps_the_flows_of_late() -> None:
    """Beyond so many flows the one that learnt longest ago is forgotten, and a purge is of one flow."""
    proposer = SuffixProposer(max_flows=2)
    for flow in ("a", "b", "a", "c"):
        proposer.finish(sequence([1], [10, 11, 12], flow=flow, proposers=("suffix",)))
    proposer.purge("c")
    proposer.finish(sequence([1], [10, 11, 12], flow="d", proposers=("suffix",)))
    proposer.purge("c")
    has_drafts = [proposer.propose(sequence([2], [10, 11], flow=flow), 1) is not None for flow in "abcd"]
    assert has_drafts == [True, False, False, True]


def test_suffix_is_opt_in_and_forgets() -> None:
    """What a plan does not give to the index is not learnt, and what is purged is gone."""
    proposer = SuffixProposer()
    proposer.finish(sequence([1], [10, 11, 12], proposers=("ngram",)))
    proposer.finish(sequence([1], [10, 11, 12], proposers=("suffix",), max_draft=0))
    assert proposer.propose(sequence([2], [10, 11]), 3) is None
    proposer.finish(sequence([1], [10, 11, 12], proposers=("suffix",)))
    assert proposer.propose(sequence([2], [10, 11]), 3) is not None
    proposer.purge("a")
    assert proposer.propose(sequence([2], [10, 11]), 3) is None


def test_suffix_prefers_what_is_frequent_and_recent() -> None:
    """The continuation that occurred more often is proposed; of equals the one seen later."""
    index = SuffixIndex(1000)
    for last in (5, 6, 6):
        index.add((1, 2, last))
    assert index.likeliest([1, 2]) == (6, index.likeliest([1, 2])[1])  # type: ignore[index]
    index.add((1, 2, 5))
    found = index.likeliest([1, 2])
    assert found is not None
    assert found[0] == 5


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=30), st.integers(0, 20))
def test_suffix_counts_what_it_holds(outputs: list[list[int]], bound: int) -> None:
    """After any additions the index is in bounds and knows the runs of what it still holds, and no others."""
    index = SuffixIndex(bound)
    for output in outputs:
        index.add(tuple(output))
    assert index.num_tokens <= bound
    runs = {run for held in index._outputs for run, _ in _runs(held.token_ids)}
    assert set(index._counts) == runs


def _runs(token_ids: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    from surefoot.backends.engine.speculation.suffix import ORDERS

    return [
        (token_ids[end - order : end], token_ids[end])
        for end in range(len(token_ids))
        for order in ORDERS
        if end >= order
    ]


def test_weights_start_again_before_they_overflow() -> None:
    """Ten thousand outputs later, counts are finite and the newest still weigh most."""
    index, rng = SuffixIndex(300), random.Random(1)
    for _ in range(10_000):
        index.add((1, 2, rng.randrange(3, 6)))
    index.add((1, 2, 9))
    counts = index._counts[(1, 2)]
    assert max(counts.values()) < 2.0**42
    assert counts[9] > 0
