"""How configuration classes refuse what cannot work: a condition, or the declared types of all
fields.
"""

from __future__ import annotations

import math
import types
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the field and the limit."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


def check_types(config: Any) -> None:
    """Raise `ConfigError` for a field of the dataclass `config` whose value is not of its type.

    Numbers of other libraries become Python's own. Fields of choices alone are left to the class:
    it knows how to name them.
    """
    hints = get_type_hints(type(config))
    for name in (entry.name for entry in fields(config)):
        value, options = getattr(config, name), _options(hints[name])
        if all(option is types.NoneType or get_origin(option) is Literal for option in options):
            continue
        kinds = [kind for option in options for kind in _kinds(option)]
        require(
            any(_is_of(value, option) for option in options),
            f"{name} must be {' or '.join(kinds)}, got {value!r}".replace("NoneType", "None"),
        )
        if int in options and isinstance(value, Integral):
            object.__setattr__(config, name, int(value))
        if float in options and isinstance(value, Real):
            object.__setattr__(config, name, float(value))


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kinds(option: Any) -> list[str]:
    if get_origin(option) is Literal:
        return [repr(choice) for choice in get_args(option)]
    return [_NAMES.get(option, getattr(option, "__name__", ""))]


def _is_of(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(one, get_args(hint)[0]) for one in value)
    if hint in (int, float):
        if isinstance(value, bool):
            return False
        if hint is int:
            return isinstance(value, Integral)
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, origin or hint)
