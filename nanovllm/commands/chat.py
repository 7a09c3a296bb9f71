"""`nanovllm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from nanovllm.commands.start import check_flags
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat import render_chat
from nanovllm.utils.flags import user_errors


class Conversation:
    """A conversation, and the model that takes part in it.

    Args:
        llm: answers.
        params: how answers are sampled.
        system: the system message; None for none.

    Attributes:
        messages: so far.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages: list[dict[str, Any]] = [*self._system]

    def answer(self, text: str) -> None:
        """Print the answer to a message as it comes. Ctrl-C stops it; what is printed then counts as said.

        Raises:
            ValueError: the conversation is too long, or does not fit the chat template; the message is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = render_chat(self._llm.tokenizer, messages, add_generation_prompt=True)
        parts: list[str] = []
        with closing(self._llm.stream([prompt], self._params)) as stream, suppress(KeyboardInterrupt):
            for output in stream:
                for new in output.outputs:
                    parts.append(new.text)
                    print(new.text, end="", flush=True)
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def talk(conversation: Conversation) -> None:
    """Answer lines of the standard input until it ends."""
    while True:
        try:
            if not _turn(conversation):
                return
        except KeyboardInterrupt:
            # As in Python's own prompt.
            print()


def _turn(conversation: Conversation) -> bool:
    """Read a line and do what it says; returns whether the conversation goes on."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
        if text == "/clear":
            conversation.clear()
        elif text and text != "/exit":
            conversation.answer(text)
        return text != "/exit"
    except EOFError:
        return False
    except ValueError as error:
        print(f"{error} (/clear forgets the conversation)", file=sys.stderr)
        return True


def chat(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with suppress(ImportError):
        # Gives `input` a line to edit; some systems lack it.
        import readline  # noqa: F401, PLC0415
    with user_errors(parser):
        config, values = check_flags(options)
        if values.get("n", 1) != 1:
            raise ValueError("a chat has one answer: n must be 1")
        llm = LLM(**vars(config))
    with llm:
        with user_errors(parser):
            # An answer ends where the model ends it.
            params = replace(llm.get_default_sampling_params(), **{"max_tokens": None, **values})
            params = llm.llm_engine.limits.check_params(params)
        talk(Conversation(llm, params, options.system))
    return 0
