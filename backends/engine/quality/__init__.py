"""What a cache format costs in quality: plans against full precision, with the engine's kernels and model."""
