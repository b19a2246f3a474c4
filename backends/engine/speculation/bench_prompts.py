"""Sixty prompts in six kinds of traffic, and a few long edits with a prediction."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

from surefoot.backends.types import SamplingParams, SpeculationPlan

from .bench_texts import CODE, PASSAGES, QUESTIONS, RECORDS, RENAMES

MAX_DRAFT = 16
LONG_EDIT = "long edit, predicted"

SMALL_CODE = "def area(width, height):\n    return width * height\n"
"""Of the example turn."""

LONG_TEXTS = {
    0: ("harbour", "port"),
    1: ("honey", "food"),
    2: ("council", "board"),
    4: ("manuscript", "codex"),
    6: ("probe", "vessel"),
}
"""The first of three passages that are one text, and what is edited in it."""

STORIES = (
    "a lighthouse keeper who finds a letter in a bottle",
    "two sisters who open a bakery in an old railway station",
    "a robot that learns to paint and does not want to stop",
    "the last day of a village school",
    "a river that changes its course overnight",
    "a clockmaker who can hear what time it will be",
    "a dog that travels across the country to find its owner",
    "an astronaut who grows tomatoes on the moon",
    "a violinist who loses her hearing",
    "a map on which a new island appears every year",
)

TALKS = (
    (
        "I slept badly all week.",
        "I am sorry. Do you drink coffee late?",
        "Yes, at six. What else helps?",
    ),
    ("I want to learn to cook.", "Great. What do you like to eat?", "Soups. Which one should I try first?"),
    (
        "My bike squeaks.",
        "Does it squeak when you brake or when you pedal?",
        "When I pedal. What should I do?",
    ),
    ("We go to Portugal in May.", "How nice. How long will you stay?", "Ten days. What should we see?"),
    ("I have a job interview.", "Good luck. What is the job?", "Nurse at a school. How do I prepare?"),
    ("My plants are dying.", "Which plants are they?", "A fern and a basil. How much water do they need?"),
    ("I want to save money.", "Do you know what you spend it on?", "Not really. How do I find out?"),
    ("My son is afraid of the dark.", "How old is he?", "Four. How can I help him at bedtime?"),
    ("I would like to run 10 km.", "How far can you run now?", "Two kilometres. Can you make me a plan?"),
    ("Our office is too loud.", "How many people share it?", "Eight. What could we change?"),
)


class BenchPrompt(Struct, frozen=True):
    """What is asked. Sampled where people sample, greedy where they want one right answer."""

    messages: tuple[dict[str, Any], ...]
    temperature: float = 0.0
    begun: str = ""
    """How the answer begins: the model goes on from there."""
    prediction: str = ""

    def params(self, max_tokens: int, seed: int) -> SamplingParams:
        """For a request; the answer may end before `max_tokens`."""
        return SamplingParams(temperature=self.temperature, seed=seed, max_tokens=max_tokens)


def plan_of(kind: str) -> SpeculationPlan:
    """Who drafts in a kind of traffic, as a tenant's file would say."""
    proposers = ("prediction", "ngram") if kind == LONG_EDIT else ("ngram",)
    return SpeculationPlan(max_draft=MAX_DRAFT, proposers=proposers)


def prompts() -> dict[str, list[BenchPrompt]]:
    """Ten prompts of each kind."""
    passages = list(zip(PASSAGES, QUESTIONS, strict=True))
    edits = zip(CODE, RENAMES, strict=True)
    return {
        "free writing": [_ask(f"Write a short story about {story}.", temperature=0.8) for story in STORIES],
        "chat": [_talk(*talk) for talk in TALKS],
        "questions": [
            _ask(f"{text}\n\nAnswer from the text above: {question}") for text, question in passages
        ],
        "summary": [_ask(f"Sum up this text in three sentences.\n\n{text}") for text in PASSAGES],
        "code editing": [_edit(code, *names) for code, names in edits],
        "JSON extraction": [_extract(*record) for record in RECORDS],
    }


def long_edits() -> list[BenchPrompt]:
    """Long texts with a small edit, each predicted as it was before.

    A model this small neither renames reliably nor begins to repeat by itself. So it is given the edited
    text to repeat and the first sentence of the answer, and the prediction is the text before: the answer
    differs from it at every edit, whatever the model does.
    """
    made = []
    for first, (old, new) in LONG_TEXTS.items():
        before = "\n\n".join(" ".join(text.split()) for text in PASSAGES[first : first + 3])
        after = before.replace(old, new)
        begun, rest = after[: after.index(". ") + 1], before[before.index(". ") + 1 :]
        asked = _user(f"Give back this text word for word.\n\n{after}")
        made.append(BenchPrompt(asked, begun=begun, prediction=rest))
    return made


def _edit(code: str, old: str, new: str) -> BenchPrompt:
    task = "Rename `{}` to `{}` in this code and give back the whole code.\n\n"
    return _shown(
        task.format("area", "size") + _block(SMALL_CODE),
        _block(SMALL_CODE.replace("area", "size")),
        task.format(old, new) + _block(code),
    )


def _extract(shown_json: str, shown: str, text: str) -> BenchPrompt:
    keys = ", ".join(json.loads(shown_json))
    task = f"Give the data below as JSON, an object with the keys {keys} for each line.\n\n"
    return _shown(task + shown, shown_json, task + text)


def _shown(question: str, answer: str, asked: str) -> BenchPrompt:
    """With an example, as one asks a small model."""
    return BenchPrompt((*_user(question), {"role": "assistant", "content": answer}, *_user(asked)))


def _ask(text: str, *, temperature: float = 0.0) -> BenchPrompt:
    return BenchPrompt(_user(text), temperature)


def _talk(first: str, reply: str, second: str) -> BenchPrompt:
    return BenchPrompt((*_user(first), {"role": "assistant", "content": reply}, *_user(second)), 0.8)


def _user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _block(code: str) -> str:
    return f"```\n{code}```"
