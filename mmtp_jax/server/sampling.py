"""From the body of a request to `SamplingParams`; errors name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmtp_jax.config import ConfigError
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.structured import StructuredOutputs
from mmtp_jax.server.errors import APIError, bad_request
from mmtp_jax.server.protocol import UNSUPPORTED, Body, SamplingBody

# Fields that mean the same in a body and in `SamplingParams`.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "skip_special_tokens",
    "prompt_logprobs",
)
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def refuse_unsupported(body: Body) -> None:
    """Raise `APIError` for a field this server knows of and does not offer."""
    for name, value in (body.model_extra or {}).items():
        neutral = UNSUPPORTED.get(name)
        if neutral is not None and value is not None and value not in neutral:
            raise bad_request(f"{name} is not supported by this server", name, "unsupported")


def sampling_params(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    """The parameters a body asks for. Raises `APIError` that names the field at fault."""
    refuse_unsupported(body)
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    try:
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_logit_bias(body.logit_bias),
            structured_outputs=structured or structured_outputs(body),
        )
    except ConfigError as error:
        raise config_error(error, body) from None


def config_error(error: ValueError, body: Body) -> APIError:
    """The error as an answer; its message begins with, or contains, the name of the field."""
    words = re.findall(r"\w+", str(error))
    names = [word for word in words if word in type(body).model_fields]
    return bad_request(str(error), names[0] if names else None)


def structured_outputs(body: SamplingBody) -> StructuredOutputs | None:
    """What the text must match, from the one field of the body that says so."""
    wanted: list[tuple[str, Mapping[str, Any]]] = []
    response_format = body.response_format
    if response_format is not None and response_format.type == "json_object":
        wanted.append(("response_format", {"json_object": True}))
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise bad_request(
                "response_format of type json_schema needs the field json_schema", "response_format"
            )
        wanted.append(("response_format", {"json": response_format.json_schema.schema_}))
    for name, kind in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            wanted.append((name, {kind: value}))
    if body.structured_outputs is not None:
        wanted.append(("structured_outputs", body.structured_outputs))
    if not wanted:
        return None
    if len(wanted) > 1:
        names = " and ".join(name for name, _ in wanted)
        raise bad_request(f"only one of these can be given: {names}", wanted[1][0])
    ((param, fields),) = wanted
    try:
        return StructuredOutputs(**fields)
    except (ConfigError, TypeError) as error:
        raise bad_request(f"{param}: {error}", param) from None


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for token in given:
        if not re.fullmatch(r"\d{1,10}", token, re.ASCII):
            raise bad_request(
                f"logit_bias must map token ids to numbers, got {token!r}", "logit_bias"
            )
    return {int(token): value for token, value in given.items()}
