"""Text to token ids and back, chat templates, and decoding of a growing sequence.

Built from the tokenizer.json of a directory or from the metadata of a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.gguf_metadata import metadata, open_gguf
from mmtp_jax.weights.gguf_tokenizer import build_tokenizer
from mmtp_jax.weights.safetensors_reader import read_json

Message = Mapping[str, Any]

# What decoding puts in the place of bytes that are no UTF-8 (yet).
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ChatTemplateError(ValueError):
    """The model has no chat template, or the template refuses the messages."""


class Tokenizer:
    """A tokenizer with its chat template and the ids of its begin and end tokens."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._texts: dict[tuple[int, bool], str] = {}

    @property
    def vocab_size(self) -> int:
        """The number of tokens; the model's vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return self._tokenizer.to_str()

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary, None beyond `vocab_size`."""
        return self._tokenizer.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled in the text are recognised either way.

        `add_special_tokens` adds what the model expects around a text (for some, a begin token).
        Raises ValueError for text that is not valid Unicode (it has no bytes to tokenize).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                "text must be valid Unicode, but its character"
                f" {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id: int, skip_special_tokens: bool = True) -> str:
        """`decode` of a single token, which is remembered."""
        key = token_id, skip_special_tokens
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = self.decode((token_id,), skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """`messages` rendered as one prompt; `kwargs` are further variables of the template.

        Raises `ChatTemplateError` if there is no template or it fails on these messages.
        """
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template; send a plain prompt instead")
        variables = {
            "bos_token": self._token_or_empty(self.bos_token_id),
            "eos_token": self._token_or_empty(self.eos_token_id),
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(
                variables
                | kwargs
                | {"messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:
            # The template is a program of the model's: it may fail with any exception.
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template; `ChatTemplateError` if it is not one."""
        other = Tokenizer(
            self._tokenizer,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            chat_template=template,
        )
        try:
            _ = other._template
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid jinja: {error}") from error
        return other

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads."""
        if self._chat_template is None:
            return frozenset()
        try:
            parsed = self._template.environment.parse(self._chat_template)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error
        return frozenset(jinja2.meta.find_undeclared_variables(parsed))

    def chat_ids(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Token ids of a chat. The template spells out all special tokens, so none are added."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def _token_or_empty(self, token_id: int | None) -> str:
        return "" if token_id is None else self.id_to_token(token_id) or ""

    @cached_property
    def _template(self) -> jinja2.Template:
        # The environment that chat templates are written for (Hugging Face chat templating docs);
        # sandboxed because the template comes with the model.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._chat_template or "")


class IncrementalDecoder:
    """Decodes a sequence as it grows. The pieces concatenate to `decode` of the whole sequence.

    Characters whose bytes are spread over several tokens are held back until they are complete.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._restart([])

    def _restart(self, context: list[int]) -> None:
        # Decoders may treat the first token of a text in their own way, so something complete stays
        # in front of what follows: the last token if it is, else all of the latest piece.
        if len(context) > 1:
            last = self._tokenizer.text_of(context[-1], self._skip_special_tokens)
            if last and REPLACEMENT not in last:
                context = context[-1:]
        self._context = context
        self._pending: list[int] = []
        self._emitted = len(self._decode(context))

    def _decode(self, ids: list[int]) -> str:
        if len(ids) == 1:
            return self._tokenizer.text_of(ids[0], self._skip_special_tokens)
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty. Many at once cost less than one by one."""
        self._pending.extend(ids)
        text = self._decode(self._context + self._pending)
        complete = text.rstrip(REPLACEMENT)
        piece = complete[self._emitted :]
        self._emitted += len(piece)
        if piece and complete == text:
            self._restart(self._pending)
        return piece

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        piece = self._decode(self._context + self._pending)[self._emitted :]
        self._restart([])
        return piece


def load_tokenizer(
    source: Path | Mapping[str, Any], chat_template: str | None = None
) -> Tokenizer | None:
    """The tokenizer of a model directory, of a GGUF file, or of GGUF metadata read already.

    `chat_template` replaces the model's own; `ChatTemplateError` if it is not one. None when the
    model carries no tokenizer. Raises `ModelError` when it is damaged or of a kind that is not
    supported.
    """
    if isinstance(source, Path) and source.is_dir():
        tokenizer = _from_directory(source)
    else:
        tokenizer = _from_metadata(
            metadata(open_gguf(source)) if isinstance(source, Path) else source
        )
    if chat_template is None:
        return tokenizer
    if tokenizer is None:
        raise ChatTemplateError("a chat template needs a tokenizer, and this model has none")
    return tokenizer.with_chat_template(chat_template)


def _from_metadata(source: Mapping[str, Any]) -> Tokenizer | None:
    tokenizer = build_tokenizer(source)
    if tokenizer is None:
        return None
    return Tokenizer(
        tokenizer,
        bos_token_id=source.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=source.get("tokenizer.ggml.eos_token_id"),
        chat_template=source.get("tokenizer.chat_template"),
    )


def _from_directory(directory: Path) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception for all that can be wrong with the file.
        raise ModelError(f"{path} is not a usable tokenizer: {error}") from error
    # A saved tokenizer may carry the padding and truncation of its training.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = _optional_json(directory / "tokenizer_config.json")
    special = _optional_json(directory / "special_tokens_map.json") | settings
    return Tokenizer(
        tokenizer,
        bos_token_id=_special_id(tokenizer, directory, "bos_token", special.get("bos_token")),
        eos_token_id=_special_id(tokenizer, directory, "eos_token", special.get("eos_token")),
        chat_template=_chat_template(directory, settings),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_id(
    tokenizer: tokenizers.Tokenizer, directory: Path, name: str, token: object
) -> int | None:
    """The id of a special token, given by its text or as an added token with `content`."""
    if token is None:
        return None
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise ModelError(f"the {name} of the tokenizer in {directory} is not text: {token!r}")
    return tokenizer.token_to_id(text)


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template in its own file, else in tokenizer_config.json (maybe one of several there)."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not readable text: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, Mapping) for entry in template):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            return None
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ModelError(f"the chat_template of the tokenizer in {directory} is not text")
    return template


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML, which chat templates do not want.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
