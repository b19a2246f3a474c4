"""Where tokens come from. `types`, `errors` and `base` are the vocabulary; `engine/` is our own engine."""
