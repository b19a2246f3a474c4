"""Tenants of one server with opposite files: who drafts differs from who does not in times alone, and who has
fewer bits in the cache has a plan, limits and metrics of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from surefoot.gateway.tenants import new_key

from .server_process import ServerProcess

pytestmark = pytest.mark.xdist_group("server")

TEXT = " ".join(f"Item {number} costs {number * 3} francs." for number in range(1, 13))
ASKED: dict[str, Any] = {
    "model": "smollm2",
    "prompt": f"{TEXT} Again: {TEXT[:60]}",
    "max_tokens": 32,
    "extra_body": {"return_metrics": True},
}
FILES = {
    "drafter": 'policy = "fixed"\n[speculation]\nmax_draft = 6\nproposers = ["prediction", "ngram"]\n',
    "plain": 'policy = "baseline"\n[speculation]\nenabled = false\n',
}
COMPACT = 'policy = "fixed"\n[cache]\nformat = "k4v4"\n[limits]\nmax_tokens = 2000\n'


@pytest.fixture(scope="module")
def clients(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OpenAI]]:
    """A client of each tenant, on one server."""
    folder = tmp_path_factory.mktemp("drafts")
    keys = {}
    for name, text in {**FILES, "compact": COMPACT}.items():
        keys[name], key_hash = new_key()
        (folder / f"{name}.toml").write_text(f'id = "{name}"\nkey_hashes = ["{key_hash}"]\n{text}')
    flags = (f"--tenants={folder}", "--usage-db=none")
    with ServerProcess(cache_dir, *flags, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield {
            name: OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for name, key in keys.items()
        }


def test_opposite_files_side_by_side(clients: dict[str, OpenAI]) -> None:
    """Greedy and sampled, together in one batch, both get the same text; drafts are of the one alone, in its
    answers, its plan and the metrics, and the other one's answers say that there are none.
    """

    def ask(name: str, **sampling: Any) -> Any:
        return clients[name].completions.with_raw_response.create(**ASKED, **sampling)

    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 5}):
        with ThreadPoolExecutor() as pool:
            drafter, plain = pool.map(lambda name, how=sampling: ask(name, **how), FILES)
        drafted, undrafted = drafter.parse(), plain.parse()
        assert drafted.choices[0].text == undrafted.choices[0].text
        assert drafted.usage.completion_tokens == undrafted.usage.completion_tokens
        assert (drafter.headers["x-surefoot-plan"], plain.headers["x-surefoot-plan"]) == (
            "draft6",
            "baseline",
        )
        assert drafted.metrics["speculative_decoding"]["num_spec_steps"] > 0
        assert undrafted.metrics == {"speculative_decoding": None, "cache": None}
    url = str(clients["plain"].base_url).removesuffix("/v1/")
    lines = [
        line for line in httpx.get(f"{url}/metrics").text.splitlines() if "surefoot_drafts_total" in line
    ]
    labelled = [line for line in lines if not line.startswith("#")]
    assert labelled
    assert all('tenant="drafter"' in line and 'proposer="ngram"' in line for line in labelled)


def test_opposite_formats_side_by_side(clients: dict[str, OpenAI]) -> None:
    """One tenant's tokens are demoted and another's are not, in one batch: each gets the answer that it gets
    alone, and plan, fingerprint, limit, counts and metrics are each its own.
    """
    names = ("compact", "plain")

    def ask(name: str) -> Any:
        asked = ASKED | {"max_tokens": 64, "temperature": 0}
        return clients[name].completions.with_raw_response.create(**asked)

    alone = {name: ask(name).parse().choices[0].text for name in names}
    with ThreadPoolExecutor() as pool:
        compact, plain = pool.map(ask, names)
    for name, raw, plan in zip(names, (compact, plain), ("k4v4", "baseline"), strict=True):
        answer = raw.parse()
        assert raw.headers["x-surefoot-plan"] == plan
        assert answer.system_fingerprint.endswith(f":{plan}")
        assert answer.choices[0].text == alone[name]
    demoted = compact.parse().metrics["cache"]
    assert demoted["format"] == "k4v4"
    assert demoted["reproducible"]
    assert demoted["num_demoted_tokens"] == demoted["tokens"]["k4v4"] > 0
    assert demoted["tokens"]["k16v16"] >= 68
    assert plain.parse().metrics["cache"] is None
    with pytest.raises(BadRequestError, match="2000"):
        clients["compact"].completions.create(**ASKED | {"max_tokens": 2001})
    both = {("compact", "k4v4"), ("plain", "k16v16")}
    assert both <= formats_held(clients, both) <= both | {("compact", "k16v16")}


def formats_held(clients: dict[str, OpenAI], awaited: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The formats of each tenant's tokens, as metrics have them while both get long answers, until those that
    are awaited were seen.
    """
    url = str(clients["plain"].base_url).removesuffix("/v1/")
    seen: set[tuple[str, str]] = set()
    asked = ASKED | {"max_tokens": 2000, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    with (
        clients["plain"].completions.create(**asked) as plain,
        clients["compact"].completions.create(**asked) as compact,
    ):
        for _ in zip(plain, compact, strict=False):
            for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
                if family.name == "surefoot_format_tokens":
                    seen |= {
                        (each.labels["tenant"], each.labels["format"])
                        for each in family.samples
                        if each.value > 0
                    }
            if awaited <= seen:
                break
    return seen


def test_an_answer_that_was_predicted(clients: dict[str, OpenAI]) -> None:
    """What one tenant was answered, predicted by the other, is accepted; who does not draft
    may predict too, to no effect.
    """
    messages: Any = [{"role": "user", "content": "Count from one to ten, in words."}]

    def ask(name: str, **fields: Any) -> Any:
        return clients[name].chat.completions.create(
            model="smollm2", messages=messages, max_tokens=32, temperature=0, **fields
        )

    plain = ask("plain")
    prediction = {"type": "content", "content": plain.choices[0].message.content}
    drafted, ignored = (ask(name, prediction=prediction) for name in FILES)
    assert (
        plain.choices[0].message.content
        == drafted.choices[0].message.content
        == ignored.choices[0].message.content
    )
    assert drafted.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert ignored.usage.completion_tokens_details.accepted_prediction_tokens == 0
