"""The CPU form of the ops: vector kernels compiled by numba (`docs/cpu-kernels.md` says how one is written)."""
