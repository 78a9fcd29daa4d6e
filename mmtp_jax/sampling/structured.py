"""What a request's text must match: a JSON schema, a regular expression, choices, or a grammar.

Names follow vLLM's `StructuredOutputsParams`. The constraint becomes an llguidance grammar
(https://github.com/guidance-ai/llguidance), which the engine turns into masks of allowed tokens.
"""

from __future__ import annotations

import functools
import json as json_module
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import llguidance

from mmtp_jax.config import ConfigError, require


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one field says what the text must be.

    json: a JSON schema (a mapping, or its text). regex: a regular expression of the whole text.
    choice: one of these texts. grammar: a Lark grammar with the rule `start`. json_object: any
    JSON object.

    Raises `ConfigError` where the constraint cannot be compiled.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        require(
            self.json_object in (None, True),
            f"structured_outputs json_object must be true, got {self.json_object!r}",
        )
        given = [entry.name for entry in fields(self) if getattr(self, entry.name) is not None]
        names = ", ".join(entry.name for entry in fields(self))
        require(
            len(given) == 1,
            f"structured_outputs must have exactly one of {names},"
            f" got {' and '.join(given) or 'none'}",
        )
        name = given[0]
        if name == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif name in ("regex", "grammar"):
            value = getattr(self, name)
            require(
                isinstance(value, str) and bool(value),
                f"structured_outputs {name} must be a non-empty string, got {value!r}",
            )
        try:
            error = _error_in(self.compiled())
        except UnicodeEncodeError:
            error = "it is not valid Unicode"
        require(not error, f"structured_outputs {name} is not usable: {error}")

    def compiled(self) -> str:
        """The constraint in llguidance's own form."""
        matcher = llguidance.LLMatcher
        if self.json is not None:
            assert isinstance(self.json, str)
            return str(matcher.grammar_from_json_schema(self.json))
        if self.json_object is not None:
            return str(matcher.grammar_from_json_schema({"type": "object"}))
        if self.regex is not None:
            return str(matcher.grammar_from_regex(self.regex))
        if self.choice is not None:
            choices = " | ".join(
                json_module.dumps(text, ensure_ascii=False) for text in self.choice
            )
            return str(matcher.grammar_from_lark(f"start: {choices}"))
        assert self.grammar is not None
        return str(matcher.grammar_from_lark(self.grammar))


def _schema_text(schema: object) -> str:
    """The text of a schema, which is a mapping or its text."""
    try:
        value = json_module.loads(schema) if isinstance(schema, str) else schema
        require(
            isinstance(value, Mapping),
            f"structured_outputs json must be a JSON schema, got {reprlib.repr(schema)}",
        )
        return json_module.dumps(value)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"structured_outputs json is not JSON: {error}") from None


def _choices(choice: object) -> tuple[str, ...]:
    require(
        isinstance(choice, Sequence)
        and not isinstance(choice, str)
        and len(choice) > 0
        and all(isinstance(text, str) and text for text in choice),
        f"structured_outputs choice must be a list of non-empty strings, got {choice!r}",
    )
    assert isinstance(choice, Sequence)
    return tuple(choice)


@functools.lru_cache(maxsize=64)
def _error_in(grammar: str) -> str:
    """What llguidance finds wrong with a grammar, on one line; empty if nothing.

    Clients send the same grammar again and again.
    """
    return " ".join(llguidance.LLMatcher.validate_grammar(grammar).split())
