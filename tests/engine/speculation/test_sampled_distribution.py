"""What drafts do to the distribution of sampled tokens: nothing."""

from __future__ import annotations

from itertools import islice

import torch

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.sampler import Sampled, SampledRow, Sampler
from surefoot.backends.engine.scheduler import ScheduledChunk
from surefoot.backends.engine.sequence import Request, Sequence
from surefoot.backends.engine.simulator import without_text
from surefoot.backends.engine.speculation.base import Draft
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.speculation.speculator import Speculator
from surefoot.backends.types import GenerateRequest, SamplingParams, TokenPrompt

LOGITS = torch.tensor(
    [[1.0, 0.2, -0.4, 2.1, 0.7, -1.5, 0.0, 1.4], [0.3, 1.8, 0.9, -0.6, 0.1, 1.1, -2.0, 0.5]]
)
"""What the model says after the prompt, and after one token more, whichever that is."""

NUM_DRAWS = 20_000
CRITICAL = 24.32
"""Of chi-square with 7 degrees of freedom: exceeded once in 1,000 times by chance. The seeds are fixed."""

DRAFT = Draft("ngram", (3,), (0,))


def sequence_of(seed: int) -> Sequence:
    """A sequence whose next token is at position 1."""
    message = GenerateRequest(
        request_id="r", model="m", prompt=TokenPrompt((0,)), params=SamplingParams(temperature=1.0)
    )
    request = Request(message, (0,), key=seed, max_tokens=9, seed=seed, arrived_s=0.0)
    return request.branch(without_text(1))[0]


def draw(parts: EngineParts, draft: Draft | None, seeds: range) -> list[list[int]]:
    """The tokens that each sequence gets in a step, by the engine's sampler and verification."""
    sampler, speculator = Sampler(parts.ops, parts.loaded.tokenizer), Speculator(SpeculationSettings())
    chunks = [ScheduledChunk(sequence_of(seed), 1, draft) for seed in seeds]
    rows = [
        SampledRow(chunk.sequence, chunk.draft_token_ids[:j])
        for chunk in chunks
        for j in range(chunk.num_sampled)
    ]
    logits = LOGITS[[len(row.drafted) for row in rows]]
    sampled = iter(sampler.sample(logits, rows))
    results = []
    for chunk in chunks:
        kept = speculator.verify(chunk, list(islice(sampled, chunk.num_sampled)))
        assert all(isinstance(result, Sampled) for result in kept)
        results.append([result.token_id for result in kept if isinstance(result, Sampled)])
    return results


def chi_square(token_ids: list[int], logits: torch.Tensor) -> float:
    """How far the counts are from softmax's."""
    expected = logits.double().softmax(-1) * len(token_ids)
    counts = torch.bincount(torch.tensor(token_ids), minlength=len(logits)).double()
    return float(((counts - expected) ** 2 / expected).sum())


def test_sampled_tokens_have_softmax_distribution(parts: EngineParts) -> None:
    """Of 20,000 draws, first tokens are distributed as softmax says and are the same with drafts and without;
    tokens after an accepted draft are distributed as softmax says.
    """
    plain = draw(parts, None, range(NUM_DRAWS))
    drafted = draw(parts, DRAFT, range(NUM_DRAWS))
    assert [tokens[0] for tokens in drafted] == [tokens[0] for tokens in plain]
    assert chi_square([tokens[0] for tokens in drafted], LOGITS[0]) < CRITICAL
    after = [tokens[1] for tokens in drafted if len(tokens) == 2]
    assert len(after) == sum(tokens[0] == DRAFT.token_ids[0] for tokens in plain) > NUM_DRAWS / 4
    assert chi_square(after, LOGITS[1]) < CRITICAL


def test_a_wrong_rule_would_be_noticed(parts: EngineParts) -> None:
    """The test above can fail: tokens that follow a rejected draft's place are not distributed so."""
    drafted = draw(parts, DRAFT, range(NUM_DRAWS // 4))
    rejected = [tokens[0] for tokens in drafted if len(tokens) == 1]
    assert chi_square(rejected, LOGITS[0]) > CRITICAL
