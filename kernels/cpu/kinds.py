"""Kinds of weights in panels, as the kernels' argument."""

Q4_0, Q4_1, Q8_0, F32_, BF16, F16 = range(6)

Q4_0_EXCESS = 8
"""Q4_0's weights are `d * (code - 8)`."""
