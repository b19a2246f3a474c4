from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from surefoot.backends.catalog import locate_model
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.gguf_file import GgufFile
from surefoot.backends.engine.hf_config import config_from_hf
from surefoot.backends.engine.model import Model
from surefoot.backends.engine.model_errors import SUPPORTED, BadModelFiles, UnsupportedModel
from surefoot.backends.engine.safetensors_folder import SafetensorsFolder
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.engine.weights import check_weights
from surefoot.kernels.reference import ReferenceOps

from .tiny_models import (
    SHAPE,
    VARIANTS,
    error_ratio,
    hf_logits,
    load_folder,
    our_logits,
    random_tokens,
    tiny_hf_model,
    write_gguf,
)

FLOAT32_RATIO = 1e-4
BFLOAT16_CACHE_RATIO = 2e-2


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    """Every family and variant computes what transformers computes, in one piece or several."""
    reference = tiny_hf_model(name)
    reference.save_pretrained(tmp_path)
    token_ids = random_tokens(211)
    want, model = hf_logits(reference, token_ids), load_folder(tmp_path)
    ratio = error_ratio(our_logits(model, token_ids), want)
    assert ratio <= FLOAT32_RATIO, f"{name}: error ratio of the logits {ratio:.2e}"
    rounded = error_ratio(our_logits(model, token_ids, torch.bfloat16), want)
    assert rounded <= BFLOAT16_CACHE_RATIO, f"{name}: error ratio with a bfloat16 cache {rounded:.2e}"


def test_tied_and_untied_variants_differ_where_they_should(tmp_path: Path) -> None:
    """A tied model has no output matrix of its own, an untied one does."""
    for name in ("llama", "llama-tied"):
        tiny_hf_model(name).save_pretrained(tmp_path / name)
        with SafetensorsFolder(tmp_path / name) as source:
            assert ("lm_head.weight" in source.shapes) == (name == "llama")


def test_shards_are_one_model(tmp_path: Path) -> None:
    """A folder of several shards with an index loads like a single file."""
    reference = tiny_hf_model("llama")
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    token_ids = random_tokens(9)
    ratio = error_ratio(our_logits(load_folder(tmp_path), token_ids), hf_logits(reference, token_ids))
    assert ratio <= FLOAT32_RATIO, f"error ratio {ratio:.2e}"


def test_sixteen_bit_folders_load_as_float32(tmp_path: Path) -> None:
    """Weights stored in bfloat16 are widened exactly."""
    tiny_hf_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    token_ids = random_tokens(63)
    ratio = error_ratio(our_logits(load_folder(tmp_path), token_ids), hf_logits(reference, token_ids))
    assert ratio <= FLOAT32_RATIO, f"error ratio {ratio:.2e}"


def test_bfloat16_weights_stay_close(tmp_path: Path) -> None:
    """A model loaded in bfloat16 computes in it, and differs by its rounding only."""
    reference = tiny_hf_model("llama")
    reference.save_pretrained(tmp_path)
    token_ids = random_tokens(63)
    got = our_logits(load_folder(tmp_path, torch.bfloat16), token_ids)
    assert got.dtype == torch.float32
    assert 1e-4 < error_ratio(got, hf_logits(reference, token_ids)) < 5e-2


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-llama3", "llama-yarn", "mistral"])
def test_old_rope_settings_mean_the_same(name: str, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` of transformers 4 give the config that `rope_parameters` of 5 gives."""
    tiny_hf_model(name).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_bytes())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = new["rope_parameters"].pop("rope_theta")
    if (kind := new["rope_parameters"].pop("rope_type")) != "default":
        old["rope_scaling"] = {"type": kind, **new["rope_parameters"]}
    assert config_from_hf(old) == config_from_hf(json.loads((tmp_path / "config.json").read_bytes()))


def _hf_config(**changes: Any) -> dict[str, Any]:
    return {**SHAPE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "None"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"num_key_value_heads": 3}, "4 heads"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(changes: dict[str, Any], reason: str) -> None:
    """A model outside the supported ones is refused by name, with the list of those that are."""
    with pytest.raises(UnsupportedModel) as refusal:
        config_from_hf(_hf_config(**changes))
    assert reason in str(refusal.value)
    assert SUPPORTED in str(refusal.value)


@pytest.mark.parametrize("changes", [{"hidden_size": "big"}, {"num_hidden_layers": 0}, {"vocab_size": None}])
def test_nonsense_configs_name_the_field(changes: dict[str, Any]) -> None:
    """A value of the wrong type or range is refused with its name."""
    field = next(iter(changes)).replace("num_hidden_layers", "num_layers")
    with pytest.raises(BadModelFiles, match=field):
        config_from_hf(_hf_config(**changes))


def test_a_window_bounds_the_length() -> None:
    """A sliding window caps what is served: there attention over everything is exact."""
    windowed = config_from_hf(_hf_config(model_type="mistral", sliding_window=256))
    assert windowed.max_model_len == 256
    assert config_from_hf(_hf_config(model_type="mistral", sliding_window=None)).max_model_len == 512
    assert config_from_hf(_hf_config(model_type="qwen2", sliding_window=64)).max_model_len == 512
    used = _hf_config(model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert config_from_hf(used).max_model_len == 64


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    """Missing, unexpected and misshapen tensors are refused, each by name."""
    tiny_hf_model("llama").save_pretrained(tmp_path)
    config = config_from_hf(json.loads((tmp_path / "config.json").read_bytes()))
    with SafetensorsFolder(tmp_path) as source:
        shapes = dict(source.shapes)
    del shapes["model.layers.2.mlp.up_proj.weight"]
    shapes["model.layers.1.self_attn.extra.weight"] = (1,)
    shapes["model.norm.weight"] = (65,)
    with pytest.raises(BadModelFiles) as refusal:
        check_weights(config, shapes)
    message = str(refusal.value)
    assert "1 missing: model.layers.2.mlp.up_proj.weight" in message
    assert "1 not expected: model.layers.1.self_attn.extra.weight" in message
    assert "1 of the wrong shape: model.norm.weight [65] instead of [64]" in message


@pytest.mark.parametrize("cut", [4, 500, -7])
def test_cut_weight_files_are_refused(cut: int, tmp_path: Path) -> None:
    """A safetensors file that ends early is refused at start, wherever it ends."""
    tiny_hf_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BadModelFiles, match=r"model\.safetensors is not a complete"):
        load_folder(tmp_path)


def test_folders_without_safetensors_are_refused(tmp_path: Path) -> None:
    """A folder with pickled weights, or a shard that is gone, is refused."""
    tiny_hf_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(BadModelFiles, match="names files that are not there"):
        load_folder(tmp_path)
    for file in tmp_path.glob("*safetensors*"):
        file.unlink()
    with pytest.raises(BadModelFiles, match=r"neither model\.safetensors nor"):
        load_folder(tmp_path)


def _load_gguf(path: Path) -> Model:
    file = GgufFile(path)
    check_weights(file.config, file.shapes)
    return Model(file.config, file, ReferenceOps(), mode=WeightMode.FLOAT32)


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-linear", "llama-yarn", "llama-biases", "qwen2", "qwen3", "smollm3"]
)
def test_gguf_files_match_transformers(name: str, tmp_path: Path) -> None:
    """A GGUF file of each family computes what its Hugging Face model computes, q and k in order again."""
    reference = tiny_hf_model(name)
    write_gguf(tmp_path / "m.gguf", reference)
    token_ids = random_tokens(111)
    ratio = error_ratio(
        our_logits(_load_gguf(tmp_path / "m.gguf"), token_ids), hf_logits(reference, token_ids)
    )
    assert ratio <= FLOAT32_RATIO, f"{name}: error ratio of the logits {ratio:.2e}"


def test_gguf_frequency_factors_are_llama3_scaling(tmp_path: Path) -> None:
    """`rope_freqs.weight` of a GGUF file does what rope type llama3 does."""
    reference = tiny_hf_model("llama-llama3")
    plain = 10_000.0 ** -(np.arange(0, 16, 2) / 16)
    write_gguf(
        tmp_path / "m.gguf", reference, freq_factors=plain / reference.model.rotary_emb.inv_freq.numpy()
    )
    token_ids = random_tokens(111)
    ratio = error_ratio(
        our_logits(_load_gguf(tmp_path / "m.gguf"), token_ids), hf_logits(reference, token_ids)
    )
    assert ratio <= FLOAT32_RATIO, f"error ratio {ratio:.2e}"


def test_quantised_gguf_groups_keep_to_their_rows(tmp_path: Path) -> None:
    """Quantised tensors, q and k too, dequantise to the model's rows; raw groups come in that order too."""
    kinds = {
        "q_proj.weight": GGMLQuantizationType.Q4_1,
        "k_proj.weight": GGMLQuantizationType.Q8_0,
        "down_proj.weight": GGMLQuantizationType.Q4_0,
        "embed_tokens.weight": GGMLQuantizationType.Q8_0,
    }
    reference = tiny_hf_model("llama")
    write_gguf(tmp_path / "m.gguf", reference, kinds)
    token_ids = random_tokens(63)
    ratio = error_ratio(
        our_logits(_load_gguf(tmp_path / "m.gguf"), token_ids), hf_logits(reference, token_ids)
    )
    assert ratio <= FLOAT32_RATIO, f"error ratio {ratio:.2e}"
    name = "model.layers.1.self_attn.q_proj.weight"
    raw = GgufFile(tmp_path / "m.gguf").raw(name)
    assert (raw.kind, raw.shape, raw.data.shape, raw.data.dtype) == ("Q4_1", (64, 64), (64, 40), np.uint8)
    rows = gguf.quants.dequantize(raw.data, GGMLQuantizationType.Q4_1)
    assert np.array_equal(rows, reference.state_dict()[name].numpy())


def test_unfit_gguf_files_are_refused(tmp_path: Path) -> None:
    """Another architecture and a file that ends early are refused."""
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="gpt2"):
        GgufFile(tmp_path / "other.gguf")
    write_gguf(tmp_path / "m.gguf", tiny_hf_model("llama"))
    whole = (tmp_path / "m.gguf").read_bytes()
    for cut in (100, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(BadModelFiles, match=r"cut\.gguf is not a complete GGUF file"):
            GgufFile(tmp_path / "cut.gguf")


def test_the_real_gguf_matches_transformers(parts: EngineParts) -> None:
    """SmolLM2-135M from its 4-bit file computes what transformers computes on the dequantised weights."""
    reader = gguf.GGUFReader(locate_model("smollm2"))
    their_names = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    with torch.device("meta"):
        reference = LlamaForCausalLM(config)
    state = {}
    for name in reference.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = their_names[names.get_name(name, try_suffixes=(".weight",))]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name or ".k_proj." in name:
            weight = weight.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(weight.shape)
        state[name] = torch.from_numpy(np.array(weight))
    reference = LlamaForCausalLM(config)
    assert reference.load_state_dict(state, strict=False, assign=True).unexpected_keys == []
    reference.tie_weights()
    tokenizer = parts.loaded.tokenizer
    text = tokenizer.render_chat([{"role": "user", "content": "Name three rivers, and a fact about each."}])
    token_ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    want = hf_logits(reference.eval(), token_ids)
    file = GgufFile(locate_model("smollm2"))
    ours = Model(file.config, file, ReferenceOps(), mode=WeightMode.FLOAT32)
    ratio = error_ratio(our_logits(ours, token_ids), want)
    assert ratio <= FLOAT32_RATIO, f"error ratio of the logits {ratio:.2e}"
