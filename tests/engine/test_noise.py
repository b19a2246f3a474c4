"""The noise of the Gumbel rule."""

from __future__ import annotations

import math

import torch

from surefoot.kernels.noise import gumbel_noise, philox


def test_philox_matches_its_authors_known_answers() -> None:
    """The two known-answer vectors of Random123 for philox4x32-10."""
    for word, expected in (
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        counter = torch.full((1,), word, dtype=torch.int64)
        assert [int(w) for w in philox((word, word), (counter,) * 4)] == expected


def test_noise_is_standard_gumbel() -> None:
    """Mean is Euler's constant and variance pi^2 / 6, within five standard errors of 200,000 draws."""
    noise = gumbel_noise(seed=7, choice=0, position=3, vocab_size=200_000).double()
    assert abs(noise.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * 200_000)
    assert abs(noise.var() - math.pi**2 / 6) < 5 * 4.4 / math.sqrt(200_000)


def test_noise_depends_on_seed_choice_and_position_alone() -> None:
    """The same key gives the same noise; any other key gives other noise; a longer vocabulary extends it."""
    base = gumbel_noise(2**62 + 1, 1, 5, 1003)
    assert torch.equal(base, gumbel_noise(2**62 + 1, 1, 5, 1003))
    assert torch.equal(base, gumbel_noise(2**62 + 1, 1, 5, 4096)[:1003])
    for other in ((1, 1, 5), (2**62 + 1, 0, 5), (2**62 + 1, 1, 6), (-1, 1, 5)):
        assert (base == gumbel_noise(*other, 1003)).float().mean() < 0.01
