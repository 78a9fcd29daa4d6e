"""What every endpoint needs: the engine's client, the tokenizer, the names, the metrics."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from mmtp_jax.engine.request import Request as EngineRequest
from mmtp_jax.outputs import Sample
from mmtp_jax.sampling.params import SamplingParams, default_seed, sample_seed
from mmtp_jax.server.engine_client import EngineClient
from mmtp_jax.server.errors import APIError, EngineStarting, bad_request
from mmtp_jax.server.generation import Choice, Generation, Prompt
from mmtp_jax.server.messages import Loaded
from mmtp_jax.server.metrics import Metrics
from mmtp_jax.server.protocol import Body, SamplingBody
from mmtp_jax.server.sampling import config_error
from mmtp_jax.tokenizer import Tokenizer

# The most samples one request may ask for: prompts times n.
MAX_CHOICES = 1024


@dataclass
class Service:
    """Shared by all requests. `tokenizer` (a model may have none) is known once the service is
    `prepared`."""

    client: EngineClient
    metrics: Metrics
    model_names: tuple[str, ...]
    seed: int
    log_requests: bool = False
    profile_directory: str | None = None
    tokenizer: Tokenizer | None = None
    prepared: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._request_ids = itertools.count()
        self._seeds = itertools.count()

    def model(self) -> Loaded:
        """What there is to know of the model; `APIError` unless the engine takes requests."""
        if self.client.refusal is not None:
            raise self.client.refusal
        if self.client.loaded is None or not self.prepared:
            raise EngineStarting("loading the tokenizer")
        return self.client.loaded

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; `APIError` if the model came without one."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer: only token ids are possible")
        return self.tokenizer

    def model_name(self, body: Body) -> str:
        """The name to answer with; `APIError` if the request names another model."""
        if body.model is None:
            return self.model_names[0]
        if body.model not in self.model_names:
            names = ", ".join(self.model_names)
            raise APIError(
                404,
                f"the model {body.model!r} does not exist; this server has {names}",
                param="model",
                code="model_not_found",
            )
        return body.model

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `APIError` if it has none or is not valid Unicode."""
        try:
            return self.text_tokenizer().encode(text, add_special_tokens)
        except ValueError as error:
            raise bad_request(f"{param}: {error}", param) from None

    def default_max_tokens(self, prompt: Prompt) -> int:
        """The tokens that are left for an answer, at least 1."""
        return max(self.model().max_model_len - len(prompt.token_ids), 1)

    def generation(
        self, body: SamplingBody, prompts: Sequence[Prompt], params: SamplingParams, param: str
    ) -> Generation:
        """All samples of `prompts`, ready to start. Raises `APIError` if one of them cannot run."""
        model = self.model()
        if len(prompts) * params.n > MAX_CHOICES:
            raise bad_request(
                f"{len(prompts)} prompts with n={params.n} are more than {MAX_CHOICES} samples",
                param,
            )
        try:
            params.validate_for(model.vocab_size, model.eos_token_ids)
        except ValueError as error:
            raise config_error(error, body) from None
        for prompt in prompts:
            self._check_prompt(model, prompt, params, param)
        if params.stop or params.structured_outputs:
            self.text_tokenizer()
        seeds = [self._seed(params) for _ in prompts]
        choices = [
            Choice(
                index,
                prompt,
                Sample(index, params, self.tokenizer, model.eos_token_ids, model.num_drafts),
                request_id=f"{next(self._request_ids)}",
                seed=sample_seed(seeds[index // params.n], index % params.n),
            )
            for index, prompt in enumerate(one for one in prompts for _ in range(params.n))
        ]
        return Generation(
            self.client,
            self.metrics,
            choices,
            params,
            whole=not body.stream,
            log_text=self.log_requests,
        )

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return default_seed(self.seed, next(self._seeds))

    def _check_prompt(
        self, model: Loaded, prompt: Prompt, params: SamplingParams, param: str
    ) -> None:
        try:
            EngineRequest.create("", prompt.token_ids, params.max_tokens, model.max_model_len)
        except ValueError as error:
            code = "context_length_exceeded" if prompt.token_ids else None
            raise bad_request(f"{param}: {error}", param, code) from None
        length, asked = len(prompt.token_ids), params.max_tokens or 0
        if length + asked > model.max_model_len:
            raise bad_request(
                f"max_tokens={asked} and a prompt of {length} tokens exceed the context of"
                f" {model.max_model_len} tokens by {length + asked - model.max_model_len}",
                "max_tokens",
                "context_length_exceeded",
            )
        highest = max(prompt.token_ids)
        if highest >= model.vocab_size:
            raise bad_request(
                f"{param}: token ids must be below {model.vocab_size}, got {highest}", param
            )


def service_of(request: Request) -> Service:
    """The service of the application that got the request."""
    service: Service = request.app.state.service
    return service


async def _given(request: Request) -> Service:
    # FastAPI calls what is not async on another thread: a seventh of what a request cost.
    return service_of(request)


# For endpoints that are seldom asked: FastAPI takes 25 us to resolve it.
WithService = Annotated[Service, Depends(_given)]


def new_id(prefix: str) -> str:
    """A fresh id such as `cmpl-0123...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
