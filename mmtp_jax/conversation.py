"""A conversation on the terminal: prompts from stdin, answers to stdout, all else to stderr."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from mmtp_jax.config import ConfigError, require
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import ChatTemplateError, Message

if TYPE_CHECKING:
    from mmtp_jax.llm import LLM
    from mmtp_jax.outputs import RequestOutput

COMMANDS = "/reset forgets the conversation, /stats shows counters, /quit leaves"

_stderr = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def note(text: str) -> None:
    """One dim line on stderr."""
    _stderr.print(text, style="dim")


def messages(system: str | None, turns: list[Message], text: str) -> list[Message]:
    """The messages of a chat template for the user's next turn."""
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *turns, {"role": "user", "content": text}]


@dataclass
class Conversation:
    """The turns so far (user, assistant, user, ...); without `chat` every prompt stands alone."""

    llm: LLM
    params: SamplingParams
    chat: bool
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Answer every line of stdin and obey `COMMANDS`, until stdin ends or Ctrl-C."""
        if sys.stdin.isatty():
            note(COMMANDS)
        for line in _lines():
            command = line.strip()
            if command == "/quit":
                return
            if command == "/reset":
                self.turns.clear()
                note("the conversation starts anew")
            elif command == "/stats":
                for name, value in self.llm.stats().items():
                    note(f"{name}: {value}")
            elif command.startswith("/") and len(command.split()) == 1:
                note(f"there is no command {command}: {COMMANDS}")
            elif command:
                try:
                    self.answer(line)
                except (ConfigError, ChatTemplateError) as error:
                    note(f"error: {error}")

    def answer(self, text: str) -> bool:
        """Stream the answer to stdout, then its statistics to stderr; False if Ctrl-C ended it.

        Raises `ConfigError` if the prompt fills the context, `ChatTemplateError` if the template
        refuses it; the conversation stays as it was then.
        """
        prompt_ids = self._prompt_ids(text)
        start = time.perf_counter()
        output = asyncio.run(_stream(self.llm, prompt_ids, self.params))
        if output is None:
            return False
        note(_statistics(output, time.perf_counter() - start))
        if self.chat:
            self.turns.append({"role": "user", "content": text})
            self.turns.append({"role": "assistant", "content": output.text})
        return output.finished

    def _prompt_ids(self, text: str) -> list[int]:
        """Token ids of the prompt, after dropping the oldest turns that leave too little room."""
        context = self.llm.max_model_len
        # An answer may be longer than half the context, but no turn is dropped for that.
        room = min(self.params.max_tokens or context, context // 2)
        tokenizer = self.llm.tokenizer
        turns = list(self.turns)
        if self.chat:
            prompt_ids = tokenizer.chat_ids(messages(self.system, turns, text))
            while turns and len(prompt_ids) + room > context:
                del turns[:2]
                prompt_ids = tokenizer.chat_ids(messages(self.system, turns, text))
        else:
            prompt_ids = tokenizer.encode(text)
        require(len(prompt_ids) > 0, "the prompt must have at least 1 token, got 0")
        require(
            len(prompt_ids) < context,
            f"the prompt has {len(prompt_ids)} tokens, but the context of {context} leaves room for"
            f" at most {context - 1}",
        )
        if len(turns) < len(self.turns):
            dropped = (len(self.turns) - len(turns)) // 2
            note(f"dropped the oldest {dropped} turn(s): the context holds {context} tokens")
            self.turns = turns
        return prompt_ids


async def _stream(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> RequestOutput | None:
    """Print the answer as it comes; the last output, or None if Ctrl-C came before any."""
    output = None
    # asyncio turns Ctrl-C into a cancellation; it reaches `stream`, which ends the request.
    with contextlib.suppress(asyncio.CancelledError):
        async for output in llm.stream(prompt_ids, params):
            print(output.outputs[0].new_text, end="", flush=True)
    print(flush=True)
    return output


def _statistics(output: RequestOutput, seconds: float) -> str:
    sample = output.outputs[0]
    count = len(sample.token_ids)
    parts = [f"{count} tokens", f"{count / seconds:.1f} tokens/s"]
    acceptance = sample.acceptance
    if acceptance.num_drafts:
        counts = zip(acceptance.accepted, acceptance.drafted, strict=True)
        rates = " ".join(
            f"{accepted / drafted:.2f}" if drafted else "-" for accepted, drafted in counts
        )
        parts.append(f"{sample.tokens_per_step:.2f} tokens per step")
        parts.append(f"acceptance by position {rates}")
    if sample.finish_reason is None:
        parts.append("interrupted")
    elif sample.finish_reason == "length":
        parts.append("token limit reached")
    return ", ".join(parts)


def _lines() -> Iterator[str]:
    """The lines of stdin, with a prompt on a terminal, until its end or Ctrl-C."""
    terminal = sys.stdin.isatty()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing in `input`)
    while True:
        prompt = "> " if terminal else ""
        if terminal and not sys.stdout.isatty():
            # `input` would write it between the answers.
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print(file=sys.stderr)
            return
        yield line
