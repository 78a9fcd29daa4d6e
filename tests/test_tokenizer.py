"""Tokenizers: GGUF pre-tokenizers, special tokens, chat templates, streaming decode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import SPECIAL_TOKENS, smollm2_path, write_tiny_llama, write_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mmtp_jax.tokenizer import (
    ChatTemplateError,
    IncrementalDecoder,
    Tokenizer,
    load_tokenizer,
)
from mmtp_jax.weights.errors import ModelError

USER = [{"role": "user", "content": "What is gravity?"}]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def byte_characters() -> list[str]:
    """GPT-2's printable character for each of the 256 byte values (Radford et al., 2019)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


BYTES = byte_characters()


def spelled(text: str) -> str:
    return "".join(BYTES[byte] for byte in text.encode())


def gguf_metadata(
    pre: str = "gpt-2", texts: Sequence[str] = (), kinds: Sequence[int] = (), **changes: Any
) -> dict[str, Any]:
    """A tokenizer of <bos>, <eos>, the 256 bytes, and every run of bytes within `texts`.

    All ways to join two tokens into a third are merges, so that what the pre-tokenizer does not
    split always ends up as one token. `kinds` appends a token [extra i] of each kind.
    """
    runs = {
        word[start:end]
        for word in map(spelled, texts)
        for start in range(len(word))
        for end in range(start + 2, len(word) + 1)
    }
    joined = sorted(runs, key=lambda run: (len(run), run))
    extra = [f"[extra {index}]" for index in range(len(kinds))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<bos>", "<eos>", *BYTES, *joined, *extra],
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (256 + len(joined)) + [*kinds],
        "tokenizer.ggml.merges": [
            f"{run[:middle]} {run[middle:]}" for run in joined for middle in range(1, len(run))
        ],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def loaded(source: Path | dict[str, Any]) -> Tokenizer:
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return loaded(smollm2_path())


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return loaded(gguf_metadata(texts=[" the", "é", "日本"], kinds=[USER_DEFINED]))


# --- the known model ---


def test_smollm2_prompt_ids(smollm2: Tokenizer) -> None:
    # fmt: off
    assert smollm2.chat_ids(USER) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
        19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520, 9531, 198,
    ]
    # fmt: on


def test_smollm2_properties(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.id_to_token(49152) is None
    assert smollm2.encode("Hi") == smollm2.encode("Hi", add_special_tokens=False)
    ids = smollm2.chat_ids(USER)
    assert smollm2.decode(ids[-4:]) == "assistant\n"
    assert smollm2.decode(ids[-4:], skip_special_tokens=False) == "<|im_start|>assistant\n"


def test_smollm2_isolates_every_digit(smollm2: Tokenizer) -> None:
    tokens = [smollm2.id_to_token(i) for i in smollm2.encode("x12 34 ½")]
    assert tokens == ["x", "1", "2", "Ġ", "3", "4", "Ġ", "Â½"]


@pytest.mark.parametrize(
    "text", ["", "Hello, world!\n\n  x = 3.14", "naïve café 日本語 🎈👩‍🔬", "\t ½"]
)
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


# --- tokenizers rebuilt from GGUF metadata ---


@given(text=st.text(max_size=60))
def test_bytes_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", " 1234½", " km", ",", " ", " ok", "\n", "\n", "'", "M"]),
        ("smollm", ["I", "'m", " ", *"1234½", " km", ",", " ", " ok", "\n", "\n", "'", "M"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4½", " km", ",", " ", " ok", "\n\n", "'M"]),
        ("qwen2", ["I", "'m", " ", *"1234½", " km", ",", " ", " ok", "\n\n", "'M"]),
    ],
)
def test_pre_tokenizers_split_as_written(pre: str, pieces: list[str]) -> None:
    text = "I'm 1234½ km,  ok\n\n'M"
    assert text == "".join(pieces)
    tokenizer = loaded(gguf_metadata(pre, texts=[text], add_bos_token=False))
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == pieces


def test_llama_words_out_of_reach_of_merges_are_found() -> None:
    source = gguf_metadata("llama-bpe", texts=["hey"], merges=[], add_bos_token=False)
    assert len(loaded(source).encode("hey")) == 1
    assert len(loaded(source | {"tokenizer.ggml.pre": "gpt-2"}).encode("hey")) == 3


def test_qwen2_composes_characters() -> None:
    tokenizer = loaded(gguf_metadata("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert loaded(gguf_metadata("gpt-2")).decode(tokenizer.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize(
    ("pre", "changes", "added"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_begin_token(pre: str, changes: dict[str, Any], added: bool) -> None:
    tokenizer = loaded(gguf_metadata(pre, **changes))
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == ([0, *plain] if added else plain)
    assert plain == [2 + ord("a")]


def test_control_tokens_are_split_out_and_skipped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<eos>[extra 0]b")
    user_defined = byte_level.vocab_size - 1
    assert ids == [2 + ord("a"), 1, user_defined, 2 + ord("b")]
    assert byte_level.decode(ids) == "a[extra 0]b"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<eos>[extra 0]b"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "tokenizer model 'llama'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"merges": ["absent word"]}, "damaged"),
        ({"token_type": [NORMAL]}, "damaged"),
    ],
)
def test_unsupported_gguf_tokenizers_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_tokenizer(gguf_metadata() | {f"tokenizer.ggml.{k}": v for k, v in changes.items()})


def test_gguf_without_its_merges_is_refused() -> None:
    source = gguf_metadata()
    del source["tokenizer.ggml.merges"]
    with pytest.raises(ModelError, match=r"lacks the key tokenizer\.ggml\.merges"):
        load_tokenizer(source)


def test_gguf_without_a_tokenizer_gives_none() -> None:
    assert load_tokenizer({"general.architecture": "llama"}) is None


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\ud83d \ude00"])
def test_lone_surrogates_are_refused(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=r"character \d is the lone surrogate U\+D[8F]") as caught:
        byte_level.encode(text)
    assert "\n" not in str(caught.value)


# --- tokenizers of directories ---


def test_directory_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert load_tokenizer(write_tiny_llama(tmp_path)) is None


def test_directory(tmp_path: Path) -> None:
    tokenizer = loaded(write_tiny_llama(tmp_path, tokenizer=True))
    assert tokenizer.vocab_size == 64
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    ids = tokenizer.encode("Ab 1\n</s>")
    first = len(SPECIAL_TOKENS)
    assert ids == [first, first + 1, first + 36, first + 27, first + 37, 2]
    assert tokenizer.decode(ids) == "ab 1\n"
    assert tokenizer.decode(range(64)) == tokenizer.decode(range(first, 64))


def test_added_token_objects_and_the_special_tokens_map(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = loaded(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 4)


def test_saved_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(loaded(tmp_path).encode("hello")) == 5


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
def test_damaged_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bos_token": 5}, "the bos_token .* is not text: 5"),
        ({"eos_token": {}}, "the eos_token .* is not text"),
        ({"eos_token": ["</s>"]}, "the eos_token .* is not text"),
        ({"bos_token": {"content": 5}}, "the bos_token .* is not text"),
        ({"chat_template": 5}, "the chat_template .* is not text"),
        ({"chat_template": [1]}, "the chat_template .* is not text"),
        ({"chat_template": [{"name": "default", "template": 1}]}, "the chat_template .* not text"),
    ],
)
def test_settings_that_are_no_text_are_named(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path)


def test_a_template_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not readable text"):
        load_tokenizer(tmp_path)


# --- chat templates ---


def with_template(template: str | None) -> Tokenizer:
    source = gguf_metadata() | {"tokenizer.chat_template": template}
    return loaded(source)


def test_template_of_a_directory(tmp_path: Path) -> None:
    tokenizer = loaded(write_tiny_llama(tmp_path, tokenizer=True))
    text = tokenizer.apply_chat_template(USER)
    assert text == "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
    assert not tokenizer.apply_chat_template(USER, add_generation_prompt=False).endswith("ant\n")


@pytest.mark.parametrize("where", ["file", "list"])
def test_where_templates_are_found(tmp_path: Path, where: str) -> None:
    write_tiny_tokenizer(tmp_path)
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text("chosen")
    else:
        choices = [
            {"name": "tool_use", "template": "other"},
            {"name": "default", "template": "chosen"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": choices}))
    assert loaded(tmp_path).apply_chat_template(USER) == "chosen"


def test_the_begin_token_of_a_template_is_not_doubled() -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    source = gguf_metadata("llama-bpe") | {"tokenizer.chat_template": template}
    assert loaded(source).encode("a") == [0, 2 + ord("a")]
    assert loaded(source).chat_ids([{"role": "user", "content": "a"}]) == [0, 2 + ord("a")]


def test_template_environment() -> None:
    template = """
    {%- for message in messages %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
    {{ message | tojson }}
    {% endfor %}
    {{ strftime_now('%%') }}{{ flavour }}{{ eos_token }}"""
    text = with_template(template).apply_chat_template(
        [{"content": "<é>"}, {"content": "second"}], flavour="mint"
    )
    # A block eats the line break after it and the indentation before it.
    assert text == '    {"content": "<é>"}\n    %mint<eos>'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "failed"),
        ("{{ messages[0]['absent'] + 'x' }}", "absent"),
        ("{{ 1 + 'x' }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
    ],
)
def test_templates_fail_clearly(template: str | None, words: str) -> None:
    tokenizer = with_template(template)
    with pytest.raises(ChatTemplateError, match=words):
        tokenizer.apply_chat_template(list(USER))


# --- decoding a growing sequence ---


@given(
    text=st.text(max_size=30),
    noise=st.lists(st.integers(0, 300), max_size=12),
    at=st.integers(0, 40),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    skip=st.booleans(),
)
@settings(max_examples=300)
def test_pieces_concatenate_to_the_whole(
    byte_level: Tokenizer, text: str, noise: list[int], at: int, sizes: list[int], skip: bool
) -> None:
    ids = byte_level.encode(text)
    ids[at:at] = noise  # arbitrary bytes, special tokens and ids out of the vocabulary
    decoder = IncrementalDecoder(byte_level, skip)
    parts, position = [], 0
    for size in sizes:
        parts.append(decoder.push(ids[position : position + size]))
        position += size
    parts.append(decoder.push(ids[position:]))
    assert not any(part.endswith("\ufffd") for part in parts)
    assert "".join(parts) + decoder.finish() == byte_level.decode(ids, skip)


def test_characters_come_out_whole_and_at_once(byte_level: Tokenizer) -> None:
    decoder = IncrementalDecoder(byte_level)
    pushed = [decoder.push([2 + byte]) for byte in "a🎈b".encode()]
    assert pushed == ["a", "", "", "", "🎈", "b"]
    assert decoder.finish() == ""


def test_a_cut_character_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    decoder = IncrementalDecoder(byte_level)
    assert decoder.push([2 + byte for byte in b"a\xf0\x9f"]) == "a"
    assert decoder.finish() == "\ufffd"
    assert decoder.push([2 + ord("b")]) == "b"


def test_leading_spaces_that_a_decoder_strips_survive_inside_a_text() -> None:
    words = ["<unk>", "▁Hello", "▁world", "<end>"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in [1, 3, 2, 2]]
    assert pieces == ["Hello", "", " world", " world"]
    assert tokenizer.decode([1, 3, 2, 2]) == "Hello world world"


def test_long_sequences_are_decoded_in_short_windows(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    decode = byte_level.decode

    def watched(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(byte_level, "decode", watched)
    decoder = IncrementalDecoder(byte_level)
    text = "the cat 日本 " * 50
    assert "".join(decoder.push([token]) for token in byte_level.encode(text)) == text
    assert max(lengths) <= 8
