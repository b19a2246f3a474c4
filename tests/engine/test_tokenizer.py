from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.gguf_tokenizer import gguf_tokenizer
from surefoot.backends.engine.hf_folder import read_tokenizer
from surefoot.backends.engine.model_errors import BadModelFiles, UnsupportedModel
from surefoot.backends.engine.tokenizer import Tokenizer, TokenizerSpec, byte_level_alphabet
from surefoot.backends.errors import InvalidPrompt

TEXTS = [
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, 1234 digits\t\ttabs\n\n\nlines  42 ",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Съешь же ещё этих мягких французских булок",
    "いろはにほへと ちりぬるを 漢字もある",
    "한국어 문장도 하나",
    "نص عربي مع أرقام ١٢٣",
    "हिन्दी में एक वाक्य",
    "ภาษาไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤷🏽‍♀️ 🇪🇺 e\u0301 \u200d",
    "def f(x):\n    return {'a': [x ** 2]}  # código",
    "\x00\x07\ufeff\ufffd",
]


@pytest.fixture(scope="module")
def smollm2(parts: EngineParts) -> Tokenizer:
    """The real model's tokenizer, byte-level, built from its GGUF file."""
    return parts.loaded.tokenizer


def _spm_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as GGUF keeps it: pieces with scores, and a token for every byte."""
    letters = ["▁", "h", "e", "l", "o", "w", "r", "d", "é"]
    joined = ["▁h", "el", "lo", "▁he", "hel", "llo", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world"]
    words = letters + joined
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(len(words) - i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    """A small SentencePiece vocabulary with byte fallback."""
    return gguf_tokenizer(_spm_metadata())


@pytest.fixture(params=["smollm2", "spm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Both kinds of vocabulary."""
    kind: Tokenizer = request.getfixturevalue(request.param)
    return kind


def _streamed(tokenizer: Tokenizer, token_ids: list[int], *, continues: bool = False) -> str:
    detokenizer = tokenizer.detokenizer(continues=continues)
    return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Text in any script comes back unchanged, whole and streamed, as the tokenizers library decodes it."""
    token_ids = tokenizer.encode(text)
    assert _streamed(tokenizer, token_ids) == text
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.backend.decode(token_ids, skip_special_tokens=True) == text


def test_streamed_pieces_are_whole_characters(tokenizer: Tokenizer) -> None:
    """No piece holds part of a character: its bytes are held back until the last has come."""
    text = "".join(TEXTS[:-1])
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces
    assert detokenizer.flush() == ""


def test_any_tokens_stream_as_they_decode(smollm2: Tokenizer) -> None:
    """Random tokens, whose bytes are often no text, stream to what the tokenizers library makes of them."""
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.randrange(smollm2.vocab_size) for _ in range(rng.randrange(40))]
        assert _streamed(smollm2, token_ids) == smollm2.backend.decode(token_ids, skip_special_tokens=True)


def test_an_incomplete_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    """Bytes that never become a character are U+FFFD at the end, not lost and not early."""
    token_ids = tokenizer.encode("a🤷", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(token_id) for token_id in token_ids) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text(smollm2: Tokenizer) -> None:
    """Special tokens are skipped in text, but keep their name when a token is shown alone."""
    token_ids = smollm2.encode("<|im_start|>user<|im_end|>")
    assert smollm2.decode(token_ids) == _streamed(smollm2, token_ids) == "user"
    assert [smollm2.token_text(token_id) for token_id in token_ids] == ["<|im_start|>", "user", "<|im_end|>"]


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    """The bytes of a text's tokens, one after another, are the text's."""
    text = "hello 🤷 wörld"
    token_bytes = [
        tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)
    ]
    assert b"".join(token_bytes).removeprefix(b" ") == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_every_byte_of_a_byte_vocabulary_is_exact(smollm2: Tokenizer, spm: Tokenizer) -> None:
    """Each single byte's token stands for that byte, in both spellings."""
    for byte, char in enumerate(byte_level_alphabet()):
        if (token_id := smollm2.backend.token_to_id(char)) is not None:
            assert smollm2.token_bytes(token_id) == bytes([byte])
        assert spm.token_bytes(3 + byte) == bytes([byte])


def test_the_first_word_of_sentencepiece_loses_its_space(spm: Tokenizer) -> None:
    """A text of its own starts without the space of its first word; one that continues another keeps it."""
    token_ids = spm.encode("hello world", add_special_tokens=False)
    assert [spm.token_text(token_id) for token_id in token_ids] == [" hello", " world"]
    assert _streamed(spm, token_ids) == "hello world"
    assert _streamed(spm, token_ids, continues=True) == " hello world"
    assert _streamed(spm, spm.encode("  hello")) == "  hello"


def test_sentencepiece_merges_follow_the_scores(spm: Tokenizer) -> None:
    """The best-scored piece is joined first, not the longest; unknown characters fall back to bytes."""
    tokens = [spm.backend.id_to_token(token_id) for token_id in spm.encode("hello worldé☃")]
    assert tokens == ["<s>", "▁hello", "▁world", "é", "<0xE2>", "<0x98>", "<0x83>"]
    without = gguf_tokenizer(
        _spm_metadata(**{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False})
    )
    shown = [without.token_text(token_id) for token_id in without.encode("hello world")]
    assert shown == ["h", "e", "llo", " world"]


def test_smollm2_splits_digits_and_the_space_before_them(smollm2: Tokenizer) -> None:
    """Digits are tokens of their own, and spaces before them stay together, as the model learned them."""
    shown = [smollm2.token_text(token_id) for token_id in smollm2.encode("a  123\n\n4")]
    assert shown == ["a", "  ", "1", "2", "3", "\n\n", "4"]


def test_chats_render_by_the_models_template(smollm2: Tokenizer) -> None:
    """The model's own template puts a conversation into its form; its markers become single tokens."""
    text = smollm2.render_chat([{"role": "user", "content": "Hi", "name": None}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(2) == 2


def test_ends_of_an_answer_are_known(smollm2: Tokenizer, spm: Tokenizer) -> None:
    """Both the end of a turn and the end of a text end an answer."""
    assert {smollm2.token_text(token_id) for token_id in smollm2.eos_token_ids} == {
        "<|im_end|>",
        "<|endoftext|>",
    }
    assert spm.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].tool.name }}", "has no attribute 'tool'"),
        ("{% for %}", "Expected"),
        ("{{ messages.append(1) }}", "unsafe"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_refuses_is_an_invalid_prompt(template: str | None, message: str) -> None:
    """What a template raises reaches the client as its own words about `messages`."""
    tokenizer = Tokenizer(gguf_tokenizer(_spm_metadata()).backend, TokenizerSpec(chat_template=template))
    with pytest.raises(InvalidPrompt, match=message) as refusal:
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert refusal.value.param == "messages"


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    """A string that is no Unicode text is an invalid prompt, not a fault."""
    with pytest.raises(InvalidPrompt, match="surrogate"):
        smollm2.encode("a\ud83e")


def test_threads_share_a_tokenizer(smollm2: Tokenizer) -> None:
    """Concurrent use gives every thread its own right answers."""
    want = [smollm2.encode(text) for text in TEXTS]
    faults: list[str] = []

    def work() -> None:
        for _ in range(20):
            for text, token_ids in zip(TEXTS, want, strict=True):
                if smollm2.encode(text) != token_ids or _streamed(smollm2, token_ids) != text:
                    faults.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer.ggml.model": "bert"}, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "falcon"}],
)
def test_other_gguf_tokenizers_are_refused(changes: dict[str, Any]) -> None:
    """A vocabulary that we would split wrongly is refused at start, by its name."""
    with pytest.raises(UnsupportedModel, match=str(list(changes.values())[-1])):
        gguf_tokenizer(_spm_metadata(**changes))
    with pytest.raises(BadModelFiles, match="no tokenizer"):
        gguf_tokenizer({})


def test_word_pieces_are_refused() -> None:
    """A tokenizer that is neither byte-level nor SentencePiece is refused: its bytes would be wrong."""
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend, TokenizerSpec())


def _write_folder(folder: Path, **files: Any) -> Path:
    gguf_tokenizer(_spm_metadata()).backend.save(str(folder / "tokenizer.json"))
    for name, content in {"config": {"eos_token_id": 5}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_ends_in_a_folder_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    """`generation_config.json` goes before `config.json`, and the tokenizer's own end token is always one."""
    assert read_tokenizer(_write_folder(tmp_path)).eos_token_ids == {5}
    folder = _write_folder(
        tmp_path,
        generation_config={"eos_token_id": [6, 7]},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    assert read_tokenizer(folder).eos_token_ids == {2, 6, 7}


def test_templates_in_a_folder_are_found_in_each_form(tmp_path: Path) -> None:
    """A template is a setting, one of a list, or a file of its own, which wins; it sees special tokens."""
    template = "{{ bos_token }}{{ messages[0].content }}"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    messages = [{"role": "user", "content": "Hi"}]
    for setting in (template, named):
        folder = _write_folder(tmp_path, tokenizer_config={"chat_template": setting, "bos_token": "<s>"})
        assert read_tokenizer(folder).render_chat(messages) == "<s>Hi"
    (tmp_path / "chat_template.jinja").write_text("own: " + template, encoding="utf-8")
    assert read_tokenizer(tmp_path).render_chat(messages) == "own: <s>Hi"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The file that is missing or damaged is named."""
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path)
    _write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(BadModelFiles, match=r"tokenizer_config\.json"):
        read_tokenizer(tmp_path)
