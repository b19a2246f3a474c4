"""transformers' `generate` on a random model of the same shape, for the device benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.backends.engine.model_config import ModelConfig


def seconds_per_token(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    batches: Sequence[int],
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> Iterator[tuple[int, float]]:
    """By batch: seconds from one token of a sequence to its next, as `generate` does it out of the box."""
    model = _model(config, device, dtype)
    for batch in batches:
        prompt = torch.randint(config.vocab_size, (batch, num_prompt_tokens), device=device)
        _generate_s(model, prompt, 2)  # libraries are loaded and memory is found
        first = _generate_s(model, prompt, 1)
        yield batch, (_generate_s(model, prompt, num_output_tokens) - first) / (num_output_tokens - 1)


def _model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: LlamaForCausalLM = LlamaForCausalLM(shape).eval()
            return model
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def _generate_s(model: LlamaForCausalLM, prompt: Tensor, num_tokens: int) -> float:
    begin = time.perf_counter()
    answer = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
    )
    answer.cpu()  # waits
    assert answer.shape[1] == prompt.shape[1] + num_tokens
    return time.perf_counter() - begin
