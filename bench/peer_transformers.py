"""transformers' `generate` on the weights of a GGUF file, one sequence, greedy; prints one JSON object.

    python -m surefoot.bench.peer_transformers --model model.gguf --dtype bfloat16 --threads 2

A process of its own, so that it shares neither threads nor memory with the server it is compared to. The
prompt is random tokens: a tokenizer costs seconds to convert and changes no speed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Literal

import cyclopts
import gguf
import msgspec
import numpy
import torch
from msgspec import Struct
from transformers import LlamaConfig, LlamaForCausalLM

WARMUP_TOKENS = 8

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class PeerResult(Struct, frozen=True, kw_only=True):
    """Seconds of each repeat, prompt included, and the tokens that each made."""

    dtype: str
    num_output_tokens: int
    seconds: list[float]


def main(
    *,
    model: Path,
    dtype: Literal["float32", "bfloat16"] = "float32",
    threads: int = 2,
    prompt_tokens: int = 64,
    output_tokens: int = 128,
    repeats: int = 2,
) -> None:
    """Measure and print."""
    torch.set_num_threads(threads)
    llama = load_llama(model).to(getattr(torch, dtype)).eval()
    prompt = random_prompt(llama, prompt_tokens, 0)
    generate(llama, prompt, WARMUP_TOKENS)
    seconds = [generate(llama, prompt, output_tokens) for _ in range(repeats)]
    result = PeerResult(dtype=dtype, num_output_tokens=output_tokens, seconds=seconds)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


def random_prompt(llama: Any, num_tokens: int, seed: int) -> torch.Tensor:
    """Token ids of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, llama.config.vocab_size, (1, num_tokens), generator=generator)


def generate(llama: Any, prompt: torch.Tensor, num_tokens: int, streamer: Any = None) -> float:
    """Make exactly so many tokens; returns the seconds that it took."""
    start = time.perf_counter()
    output = llama.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
        eos_token_id=None,
        streamer=streamer,
    )
    seconds = time.perf_counter() - start
    assert output.shape[1] == prompt.shape[1] + num_tokens
    return seconds


def load_llama(file: Path) -> Any:
    """A float32 model with the file's weights, dequantised."""
    reader = gguf.GGUFReader(file)
    config = read_config(reader)
    state = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise SystemExit(f"{file}: scaled rotary embeddings are not compared here")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        name = OTHER_NAMES.get(tensor.name) or _layer_name(tensor.name)
        if "q_proj" in name:
            weight = unpermute(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = unpermute(weight, config.num_key_value_heads)
        state[name] = torch.from_numpy(numpy.array(weight, dtype=numpy.float32))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(state, strict=True)
    return llama


def read_config(reader: Any) -> Any:
    """The model's shape, from the file's fields."""

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    if (kind := value("general.architecture")) != "llama":
        raise SystemExit(f"the file holds a {kind} model: expected llama")
    return LlamaConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=None,
        eos_token_id=None,
    )


def unpermute(weight: Any, num_heads: int) -> Any:
    """Rows of q or k from GGUF's order (pairs side by side) to transformers' (halves of a head)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _layer_name(name: str) -> str:
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


if __name__ == "__main__":
    cyclopts.run(main)
