"""The CPU form of the ops: vector kernels compiled by numba (how one is written: `docs/cpu-kernels.md`)."""
