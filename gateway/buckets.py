"""Upper ends of histograms' buckets, in seconds where the name says nothing else."""

from __future__ import annotations

# Finer than vLLM's at the short end: small models answer in milliseconds.
TOKEN_BUCKETS = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    40,
)
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 1, 1.5, 2.5, 5, 10, 15, 30, 60, 120, 240, 480, 960, 1920)
LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5)
# vLLM's: 1, 2, 5, 10, ..., to the longest contexts that models have.
NUM_TOKENS_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
