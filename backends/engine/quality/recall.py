"""Tasks that an early token decides: facts, variables and lists at ten depths of a long text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from msgspec import Struct

from ..loss_errors import LossError
from ..tokenizer import Tokenizer
from .branch import Branch
from .forcing import Prompt, demote, forked
from .importance import PROMPT_QUERIES, Importance, watch
from .plans import QualityPlan
from .reader import MAX_ROWS, Piece, Reader

NUM_DEPTHS = 10
"""Parts of a text with facts in their middle."""

OPENINGS = (
    "The access code of the harbour gate is",
    "Maria's telephone number ends with",
    "The old bridge was built of stones that weigh",
    "The painting in the museum was sold for",
    "In the last storm the lighthouse recorded waves of",
    "The library of Brenmouth lends books for a fee of",
    "The train to the coast leaves from platform",
    "My grandmother's recipe asks for sugar, in grams:",
    "The winner of the chess match had a rating of",
    "The key to the red cabinet hangs on hook number",
)
COLOURS = ("red", "blue", "green", "white", "black", "golden", "silver", "brown", "purple", "orange")
PLACES = (
    "harbour",
    "castle",
    "garden",
    "library",
    "station",
    "bridge",
    "tower",
    "market",
    "island",
    "museum",
)
NAMES = ("Alice", "Robert", "Maria", "Daniel", "Peter", "Laura", "Thomas", "Emma", "Victor", "Helen")
WORDS = (
    *("apple", "river", "stone", "candle", "window", "paper", "silver", "winter", "music", "garden"),
    *("bottle", "mountain", "engine", "letter", "bridge", "copper", "forest", "basket", "marble", "ladder"),
    *("pencil", "island", "mirror", "button", "cotton", "hammer", "lantern", "saddle", "tunnel", "violin"),
)
LIST_LENGTH = 8


class Fact(Struct, frozen=True):
    """A sentence to be found in a text, how it is asked for, and the answer that follows the question."""

    told: str
    question: str
    answer: str


class Question(Struct, frozen=True):
    """A fact's question and answer as tokens; `depth` is the tenth of the text that tells it."""

    task: str
    depth: int
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class Haystack(Struct, frozen=True):
    """A text that tells facts, and its questions."""

    token_ids: list[int]
    questions: list[Question]


class Answered(Struct, frozen=True, kw_only=True):
    """An answer under teacher forcing: its log-probability, and the share of its tokens that were the
    likeliest in their places.
    """

    task: str
    depth: int
    logprob: float
    share_right: float

    @property
    def is_right(self) -> bool:
        """Whether all tokens were."""
        return self.share_right == 1.0


def retrieval(source: random.Random) -> list[Fact]:
    """Numbers in sentences that begin differently."""
    openings = source.sample(OPENINGS, NUM_DEPTHS)
    codes = (source.randint(10_000, 99_999) for _ in openings)
    return [Fact(f"{told} {code}.", told, f" {code}") for told, code in zip(openings, codes, strict=True)]


def look_alikes(source: random.Random) -> list[Fact]:
    """Numbers in sentences that differ in two words, which a small model mixes up."""
    names = zip(source.sample(COLOURS, NUM_DEPTHS), source.sample(PLACES, NUM_DEPTHS), strict=True)
    openings = [f"The secret number of the {colour} {place} is" for colour, place in names]
    codes = (source.randint(10_000, 99_999) for _ in openings)
    return [Fact(f"{told} {code}.", told, f" {code}") for told, code in zip(openings, codes, strict=True)]


def variable_tracking(source: random.Random) -> list[Fact]:
    """A number by way of a second name (after RULER, arXiv 2404.06654)."""
    names = source.sample([f"{a}_{b}" for a in WORDS for b in PLACES], 2 * NUM_DEPTHS)
    facts = []
    for first, second in zip(names[::2], names[1::2], strict=True):
        value = source.randint(10_000, 99_999)
        facts.append(Fact(f"{first} = {value}\n{second} = {first}", f"assert {second} ==", f" {value}"))
    return facts


def copying(source: random.Random) -> list[Fact]:
    """Lists of words."""
    facts = []
    for name in source.sample(NAMES, NUM_DEPTHS):
        words = " ".join(source.choices(WORDS, k=LIST_LENGTH))
        facts.append(Fact(f"{name} will bring: {words}.", f"{name} will bring:", f" {words}"))
    return facts


TASKS: dict[str, Callable[[random.Random], list[Fact]]] = {
    "retrieval": retrieval,
    "look-alikes": look_alikes,
    "variable-tracking": variable_tracking,
    "copying": copying,
}


def make_haystack(tokenizer: Tokenizer, filler: Sequence[int], tasks: Sequence[str], seed: int) -> Haystack:
    """A fact of each task in the middle of each tenth of the filler, whose end is cut off: the text is as
    long as it was. `LossError` if it is too short.
    """

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    source = random.Random(seed)
    facts = {task: TASKS[task](source) for task in tasks}
    told = [
        [token for own in facts.values() for token in encode(f"\n\n{own[depth].told}\n\n")]
        for depth in range(NUM_DEPTHS)
    ]
    num_told = sum(map(len, told))
    if len(filler) < 2 * num_told:
        raise LossError(
            f"context = {len(filler)} tokens are too few to hide facts of {num_told} in: it takes"
            f" {2 * num_told}, or fewer tasks"
        )
    rest, step = iter(filler), (len(filler) - num_told) // NUM_DEPTHS
    token_ids: list[int] = []
    for sentences in told:
        token_ids += [*islice(rest, step // 2), *sentences, *islice(rest, step - step // 2)]
    token_ids += islice(rest, len(filler) - len(token_ids))
    questions = [
        Question(task, depth, encode(f"\n\n{fact.question}"), encode(fact.answer))
        for task, own in facts.items()
        for depth, fact in enumerate(own)
    ]
    return Haystack(token_ids, questions)


def asked_later(
    reader: Reader, prompt: Prompt, plan: QualityPlan, questions: Sequence[Question]
) -> list[Answered]:
    """The text is demoted before anyone asks: nothing but its cache can tell, and nothing knew what would
    matter.
    """
    per_step = MAX_ROWS // max(len(q.question_ids) + len(q.answer_ids) for q in questions)
    answered: list[Answered] = []
    with forked(prompt) as own:
        demote(own, plan)
        for begin in range(0, len(questions), per_step):
            group = questions[begin : begin + per_step]
            pieces = [Piece(own.branch, (*q.question_ids, *q.answer_ids[:-1])) for q in group]
            hidden = reader.run(pieces, commit=False)
            sizes = [len(piece.token_ids) for piece in pieces]
            for question, rows in zip(group, hidden.split(sizes), strict=True):
                answered.append(_judge(reader, question, question.answer_ids, rows))
    return answered


def asked_in_prompt(
    reader: Reader, branch: Branch, plans: Sequence[QualityPlan], question: Question
) -> list[Answered]:
    """The question ends the prompt, and is read in full precision: so is the answer's first token, and the
    log-probability is that of the others. The question's own queries say what is important.
    """
    first, *rest = question.answer_ids
    found = []
    with branch.fork() as asked:
        importance = Importance()
        rows = range(max(len(question.question_ids) - PROMPT_QUERIES, 0), len(question.question_ids))
        watch(reader, Piece(asked, question.question_ids), importance, rows)
        for plan in plans:
            with forked(Prompt(asked, importance)) as own:
                demote(own, plan)
                hidden = reader.run([Piece(own.branch, (first, *rest[:-1]))], commit=False)
                found.append(_judge(reader, question, rest, hidden))
    return found


def _judge(reader: Reader, question: Question, wanted: Sequence[int], hidden: torch.Tensor) -> Answered:
    logprobs = reader.logits(hidden[-len(wanted) :]).log_softmax(-1)
    target = torch.tensor(wanted)
    return Answered(
        task=question.task,
        depth=question.depth,
        logprob=float(logprobs.gather(1, target[:, None]).sum()),
        share_right=float((logprobs.argmax(-1) == target).float().mean()),
    )
