"""`nanovllm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from nanovllm import __version__
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.commands.start import check_flags, check_single_output, sampling_params
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import render_chat
from nanovllm.utils.flags import user_errors
from nanovllm.utils.units import format_count

HELP = """\
/clear         forget the conversation
/help          show this
/quit, /exit   end, as Ctrl-D does
Ctrl-C         stop an answer"""
_TOY = """\
This is a {size} toy to try things out: it counts, adds, sorts, lists primes, and remembers your name.
A real model: nanovllm chat --model Qwen/Qwen3-0.6B"""


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
        elif text == "/help":
            print(HELP)
        elif text in ("/quit", "/exit"):
            return False
        elif re.fullmatch(r"/\w+", text):
            print(f"{text} is no command; /help lists them", file=sys.stderr)
        elif text:
            conversation.answer(text)
        return True
    except EOFError:
        return False
    except ValueError as error:
        print(f"{error} (/clear forgets the conversation)", file=sys.stderr)
        return True


def banner(llm: LLM) -> str:
    """Return what a conversation begins with: the model, its size, where it runs, and how to get on."""
    name, size = Path(llm.config.model).name, format_count(llm.num_parameters)
    device = torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "the CPU"
    lines = [f"nanovllm {__version__}: {name}, {size} parameters, {llm.dtype} on {device}".replace("torch.", "")]
    if llm.config.model == BUNDLED_MODEL:
        lines.append(_TOY.format(size=size))
    return "\n".join([*lines, "/help lists the commands, /quit ends."])


def chat(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with suppress(ImportError):
        # Gives `input` a line to edit; some systems lack it.
        import readline  # noqa: F401, PLC0415
    with user_errors(parser):
        config, values = check_flags(options)
        check_single_output(values)
        llm = LLM(**vars(config))
    with llm:
        with user_errors(parser):
            params = sampling_params(llm, values)
        if sys.stdin.isatty():
            print(banner(llm))
        talk(Conversation(llm, params, options.system))
    return 0
