"""`nanovllm generate`: answers one prompt, and prints nothing but the text, as it comes."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.commands.start import check_flags, check_single_output, sampling_params
from nanovllm.llm import LLM
from nanovllm.text.tokenizer import has_chat_template
from nanovllm.utils.flags import user_errors

_TOY = """\
nanovllm generate: this is the bundled toy, which {ability}.
A real model: nanovllm generate --model Qwen/Qwen3-0.6B"""
_CHAT_ABILITY = "counts, adds, sorts and lists primes"
_RAW_ABILITY = "has learned chats alone, and makes no sense of other text"
_MODEL_NAME = re.compile(r"[\w.~-]*(/[\w.-]+)+/?")
"""A path or a Hub id, which as a prompt would make no sense."""


def generate(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with user_errors(parser):
        config, values = check_flags(options)
        check_single_output(values)
        # The shell's last line break is no part of the prompt.
        prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
        if not prompt:
            raise ValueError("the prompt is empty")
        if config.model == BUNDLED_MODEL and _MODEL_NAME.fullmatch(options.prompt):
            raise ValueError(f"{prompt!r} is a model, and the prompt is missing: nanovllm generate MODEL PROMPT")
        if config.model == BUNDLED_MODEL and sys.stderr.isatty():
            print(_TOY.format(ability=_RAW_ABILITY if options.raw else _CHAT_ABILITY), file=sys.stderr)
        llm = LLM(**vars(config))
    with llm:
        with user_errors(parser):
            params = sampling_params(llm, values)
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
