"""From messages to the token ids of a prompt, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmtp_jax.server.errors import bad_request
from mmtp_jax.server.generation import Prompt
from mmtp_jax.server.protocol import ChatBody, TokenizeBody
from mmtp_jax.server.service import Service
from mmtp_jax.server.tools import prepare

# What the server itself gives to the template.
_RESERVED = {"messages", "tools", "add_generation_prompt"}


def chat_prompt(body: ChatBody | TokenizeBody, service: Service) -> Prompt:
    """The prompt of a conversation. Raises `APIError` that names the field."""
    tokenizer = service.text_tokenizer()
    assert body.messages is not None
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    tools = (
        None if body.tools is None else [tool.model_dump(exclude_none=True) for tool in body.tools]
    )
    choice = body.tool_choice if isinstance(body, ChatBody) else None
    if choice == "none":
        tools = None
    knows_tools = "tools" in tokenizer.template_variables
    messages = prepare(messages, tools, template_knows_tools=knows_tools)
    continued = isinstance(body, ChatBody) and bool(body.continue_final_message)
    if (
        continued
        and "add_generation_prompt" in body.model_fields_set
        and body.add_generation_prompt
    ):
        raise bad_request(
            "add_generation_prompt and continue_final_message cannot both be true",
            "continue_final_message",
        )
    variables: dict[str, Any] = dict(_template_variables(body.chat_template_kwargs))
    variables["add_generation_prompt"] = body.add_generation_prompt is not False and not continued
    if knows_tools:
        variables["tools"] = tools
    try:
        text = tokenizer.apply_chat_template(messages, **variables)
        if continued:
            text = _cut_after(text, str(messages[-1]["content"]))
        return Prompt(text, tokenizer.encode(text, add_special_tokens=False))
    except ValueError as error:
        raise bad_request(f"messages: {error}", "messages") from None


def _template_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for name in given or {}:
        if name in _RESERVED:
            raise bad_request(
                f"chat_template_kwargs cannot set {name}: it is a field of its own",
                "chat_template_kwargs",
            )
    return given or {}


def _cut_after(text: str, content: str) -> str:
    """The rendered conversation up to the end of its last message's content."""
    content = content.strip()
    start = text.rfind(content)
    if not content or start < 0:
        raise ValueError("the chat template does not show the last message, so it cannot go on")
    return text[: start + len(content)]
