"""`nanovllm generate`: completes one prompt, and prints nothing but the text, as it comes."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.commands.start import check_flags, check_single_output, sampling_params
from nanovllm.llm import LLM
from nanovllm.utils.flags import user_errors

_TOY = """\
nanovllm generate: the bundled toy has learned chats alone (nanovllm chat), and makes no sense of other text.
A model that does: --model Qwen/Qwen3-0.6B"""


def generate(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return its exit code."""
    with user_errors(parser):
        config, values = check_flags(options)
        check_single_output(values)
        # The shell's last line break is no part of the prompt.
        prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
        if config.model == BUNDLED_MODEL and sys.stderr.isatty():
            print(_TOY, file=sys.stderr)
        llm = LLM(**vars(config))
    with llm:
        with user_errors(parser):
            stream = llm.stream([prompt], sampling_params(llm, values))
        with closing(stream):
            for output in stream:
                for new in output.outputs:
                    print(new.text, end="", flush=True)
        print(flush=True)
    return 0
