"""Commands `nanovllm generate` and `chat`: an answer, or a conversation, in the terminal."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from nanovllm import __version__
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import Config
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import has_chat_template
from nanovllm.utils.display import format_count
from nanovllm.utils.flags import flag_values, user_errors

HELP = """\
/clear         forget the conversation
/help          show this
/quit, /exit   end, as Ctrl-D does
Ctrl-C         stop an answer"""
_CHAT_TOY = """\
This is a {size} toy to try things out: it counts, adds, sorts, lists primes, and remembers your name.
A real model: nanovllm chat --model Qwen/Qwen3-0.6B"""
_GENERATE_TOY = """\
nanovllm generate: this is the bundled toy, which has learned to count, add, sort and list primes in chats.
A real model: nanovllm generate --model Qwen/Qwen3-0.6B"""
_MODEL_NAME = re.compile(r"[\w.~-]*(/[\w.-]+)+/?")
"""Matches a path or a Hub id, which is probably not meant as a prompt."""


def check_flags(options: argparse.Namespace, *, prints_answer: bool = False) -> tuple[Config, dict[str, Any]]:
    """Return the engine's settings and the sampling parameters set by flags; ValueError if one is out of range.

    With `prints_answer` there can be only one answer.
    """
    values = flag_values(options, SamplingParams)
    SamplingParams(**values)
    config = Config(**flag_values(options, Config))
    if prints_answer and values.get("n", 1) != 1:
        raise ValueError("one answer is printed: n must be 1")
    return config, values


def _sampling_params(llm: LLM, values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters from flags, with the model's recommendations as defaults."""
    params = SamplingParams(**{"max_tokens": None, **llm.recommended_values(), **values})
    return llm.limits.check_params(params)


def generate(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with user_errors(parser):
        config, values = check_flags(options, prints_answer=True)
        # The trailing line break is not part of the prompt.
        prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
        if not prompt:
            raise ValueError("the prompt is empty")
        if config.model == BUNDLED_MODEL and _MODEL_NAME.fullmatch(options.prompt):
            raise ValueError(f"{prompt!r} is a model, and the prompt is missing: nanovllm generate MODEL PROMPT")
        if config.model == BUNDLED_MODEL and sys.stderr.isatty():
            print(_GENERATE_TOY, file=sys.stderr)
        llm = LLM(**vars(config))
    with llm:
        with user_errors(parser):
            params = _sampling_params(llm, values)
            if options.raw or not has_chat_template(llm.tokenizer):
                stream = llm.stream([prompt], params)
            else:
                stream = llm.stream_chat([{"role": "user", "content": prompt}], params)
        with closing(stream):
            for output in stream:
                for new in output.outputs:
                    print(new.text, end="", flush=True)
        print(flush=True)
    return 0


class Conversation:
    """A conversation with a model: its `messages` so far, with the system message, if any."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages: list[dict[str, Any]] = [*self._system]

    def answer(self, text: str) -> None:
        """Print the answer to a message as it comes. Ctrl-C stops it; the conversation keeps the printed part.

        ValueError if the conversation is too long, or does not fit the chat template; the message is dropped.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        with closing(self._llm.stream_chat(messages, self._params)) as stream, suppress(KeyboardInterrupt):
            for output in stream:
                for new in output.outputs:
                    parts.append(new.text)
                    print(new.text, end="", flush=True)
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def _turn(conversation: Conversation) -> bool:
    """Read a line and execute it; return whether the conversation goes on."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
        if text in ("/quit", "/exit"):
            return False
        if text == "/clear":
            conversation.clear()
        elif text == "/help":
            print(HELP)
        elif re.fullmatch(r"/\w+", text):
            print(f"{text} is no command; /help lists them", file=sys.stderr)
        elif text:
            conversation.answer(text)
    except EOFError:
        return False
    except KeyboardInterrupt:
        # As in Python's own prompt.
        print()
    except ValueError as error:
        print(f"{error} (/clear forgets the conversation)", file=sys.stderr)
    return True


def _banner(llm: LLM) -> str:
    """Return the introduction: the model, its size, its device, and how to get help."""
    name, size = Path(llm.config.model).name, format_count(llm.num_parameters)
    device = torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "the CPU"
    lines = [f"nanovllm {__version__}: {name}, {size} parameters, {llm.dtype} on {device}".replace("torch.", "")]
    if llm.config.model == BUNDLED_MODEL:
        lines.append(_CHAT_TOY.format(size=size))
    return "\n".join([*lines, "/help lists the commands, /quit ends."])


def chat(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with suppress(ImportError):
        # Adds line editing to `input`; some systems lack it.
        import readline  # noqa: F401, PLC0415
    with user_errors(parser):
        config, values = check_flags(options, prints_answer=True)
        llm = LLM(**vars(config))
    with llm:
        with user_errors(parser):
            conversation = Conversation(llm, _sampling_params(llm, values), options.system)
        if sys.stdin.isatty():
            print(_banner(llm))
        while _turn(conversation):
            pass
    return 0
