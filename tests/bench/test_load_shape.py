"""Arrivals, lengths and prompts: what is sent and when, without a server."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from surefoot.bench.arrivals import arrivals, parse_rate
from surefoot.bench.errors import BadArgument, BenchError
from surefoot.bench.lengths import parse_length
from surefoot.bench.prompts import Calibration, Prompt, SyntheticPrompts, calibrate, read_prompts


def test_the_same_seed_gives_the_same_arrivals() -> None:
    """Arrivals depend on the arguments alone, and another seed gives others."""
    rate = parse_rate("3")
    first = list(arrivals(rate, 1, 50, None))
    assert first == list(arrivals(rate, 1, 50, None))
    assert first != list(arrivals(rate, 2, 50, None))
    assert first == sorted(first)


def test_arrivals_are_poisson() -> None:
    """At a constant rate the gaps have mean and deviation 1 / rate."""
    gaps = [later - earlier for earlier, later in pairwise(arrivals(parse_rate("4"), 0, 20_000, None))]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert pstdev(gaps) == pytest.approx(0.25, rel=0.03)


def test_a_ramp_over_a_duration() -> None:
    """From 0 to 20 a second over 1,000 s there are 10,000 arrivals, a quarter of them in the first half."""
    times = list(arrivals(parse_rate("0:20"), 0, None, 1000.0))
    assert len(times) == pytest.approx(10_000, rel=0.03)
    assert sum(time < 500 for time in times) / len(times) == pytest.approx(0.25, abs=0.02)
    assert all(time < 1000 for time in times)


def test_a_falling_ramp() -> None:
    """From 20 to 0, three quarters arrive in the first half, and the run ends when the rate does."""
    times = list(arrivals(parse_rate("20:0"), 0, 10_000, 1000.0))
    assert sum(time < 500 for time in times) / len(times) == pytest.approx(0.75, abs=0.02)
    assert len(times) <= 10_000


def test_a_ramp_over_a_number_of_requests() -> None:
    """A ramp of 1 to 9 over 5,000 requests takes 1,000 s, and has 780 from 800 s to 900 s."""
    times = list(arrivals(parse_rate("1:9"), 3, 5000, None))
    assert len(times) == 5000
    assert times[-1] == pytest.approx(1000, rel=0.03)
    assert sum(800 < time < 900 for time in times) == pytest.approx(780, rel=0.1)


@pytest.mark.parametrize("text", ["", "x", "0", "0:0", "-1", "1:2:3", "inf", "nan:1"])
def test_rates_that_are_none(text: str) -> None:
    """A rate that cannot be meant is refused with its text."""
    with pytest.raises(BadArgument, match="rate"):
        parse_rate(text)


def test_lengths() -> None:
    """Fixed lengths are fixed, uniform ones fill their range, normal ones keep their mean within bounds."""
    random = Random(0)
    assert {parse_length("7").draw(random) for _ in range(20)} == {7}
    assert {parse_length("2:5").draw(random) for _ in range(200)} == {2, 3, 4, 5}
    normal = [parse_length("100~60").draw(random) for _ in range(20_000)]
    assert fmean(normal) == pytest.approx(100, rel=0.02)
    assert min(normal) >= 1
    assert max(normal) < 200


@pytest.mark.parametrize("text", ["", "0", "x", "5:2", "1:2:3", "0:4", "10~-1", "inf~1", "~", "1.5"])
def test_lengths_that_are_none(text: str) -> None:
    """A length that cannot be meant is refused with its text."""
    with pytest.raises(BadArgument, match="length"):
        parse_length(text)


def test_calibration_solves_for_words() -> None:
    """Two counts give the template's tokens and those of a word, and so the words of any length."""
    calibration = calibrate((8, 30), (40, 78))
    assert calibration == Calibration(overhead=18.0, tokens_per_word=1.5)
    assert calibration.num_words(168) == 100
    assert calibration.num_words(1) == 1


def test_a_server_whose_counts_make_no_sense() -> None:
    """Counts that do not grow with the words are an error with the numbers."""
    with pytest.raises(BenchError, match="5 prompt tokens for 8 words"):
        calibrate((8, 5), (40, 5))


def test_synthetic_prompts_are_made_by_index() -> None:
    """A prompt depends on seed and index alone, and two hardly begin alike."""
    calibration = Calibration(overhead=10.0, tokens_per_word=1.0)
    prompts = SyntheticPrompts(parse_length("50"), 1, calibration)
    again = SyntheticPrompts(parse_length("50"), 1, calibration)
    texts = [prompts.prompt(index).text or "" for index in range(50)]
    assert [again.prompt(index).text for index in reversed(range(50))] == texts[::-1]
    assert {len(text.split()) for text in texts} == {40}
    assert len({" ".join(text.split()[:2]) for text in texts}) > 45


def test_prompt_files(tmp_path: Path) -> None:
    """Text files have a prompt per line; JSONL has texts, prompts and conversations; both go round."""
    text = tmp_path / "prompts.txt"
    text.write_text("One.\n\nTwo.\n")
    assert [read_prompts(text).prompt(index).text for index in range(3)] == ["One.", "Two.", "One."]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(
        '"plain"\n'
        '{"prompt": "p", "max_tokens": 5, "id": 9}\n'
        '{"messages": [{"role": "user", "content": "m"}]}\n'
    )
    prompts = [read_prompts(lines).prompt(index) for index in range(3)]
    messages = [{"role": "user", "content": "m"}]
    assert prompts == [Prompt(text="plain"), Prompt(text="p", max_tokens=5), Prompt(messages=messages)]
    assert prompts[2].body(chat=True) == {"messages": messages}
    with pytest.raises(BadArgument, match="line 3: a conversation, which only the chat endpoint takes"):
        read_prompts(lines, chat=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no prompts"),
        (b"{}\n", "line 1"),
        (b'"a"\n{"prompt": 3}\n', "line 2"),
        (b"[", "line 1"),
        (b'"\xff"', "not UTF-8: byte 1"),
    ],
)
def test_prompt_files_of_no_use(tmp_path: Path, content: bytes, says: str) -> None:
    """A bad prompt file is refused with the line."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(BadArgument, match=says):
        read_prompts(file)


def test_a_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing prompt file is an error for people, not a traceback."""
    with pytest.raises(BadArgument, match=r"none\.txt cannot be read: No such file or directory"):
        read_prompts(tmp_path / "none.txt")
