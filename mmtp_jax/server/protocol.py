"""The bodies of requests: names, types and defaults of OpenAI's API, with vLLM's further fields.

Ranges are checked by `SamplingParams`. Fields that are not named here are accepted and ignored, as
other servers do; those of `UNSUPPORTED` are refused unless they ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Fields that would change the answer, with the values that do not.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_adapter": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

TokenId = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """A JSON object. Numbers are not read from strings."""

    model_config = ConfigDict(extra="allow", strict=True)


class Body(Part):
    """The body of a request."""

    model: str | None = None


class StreamOptions(Part):
    """`include_usage` adds a last chunk with the usage, `continuous_usage_stats` puts the usage so
    far in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JSONSchema(Part):
    """A schema with the name and the options OpenAI's clients send along."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Part):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class SamplingBody(Body):
    """What completions and chat completions have in common; null means the default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool | None = True


class FunctionCall(Part):
    """A call the model made: `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Part):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Part):
    """A part of a message's content; other kinds than text are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Part):
    """One message. Templates see further fields too."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Part):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Part):
    """A tool the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Part):
    """The name of a function."""

    name: str


class ToolChoice(Part):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages for the chat template."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[TokenId]
