"""The in-process engine: scheduler, paged cache, model runner, sampler."""
