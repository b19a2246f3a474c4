"""Counter-based Gumbel noise: a function of (seed, choice, position, token) alone, alike in every op set."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011, doi 10.1145/2063384.2063405): four 32-bit words, held in int64."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # A product of two 32-bit words wraps in int64, but its 64 bits are right: mask after the shift.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & _LOW, (k1 + KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[vocab_size]` (float32) for the token at `position` of a request's `choice`.

    Token t takes word `t % 4` of the Philox block whose counter is (t // 4, position, choice, 0) and whose
    key is the seed's 64 bits. 23 of a word's bits make u in (0, 1), so that u and 1 - u are exact.
    """
    index = torch.arange((vocab_size + 3) // 4, dtype=torch.int64)
    at, of, zero = (torch.full_like(index, n & _LOW) for n in (position, choice, 0))
    words = torch.stack(philox((seed & _LOW, (seed >> 32) & _LOW), (index, at, of, zero)), dim=1)
    uniform = ((words.flatten()[:vocab_size] >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
