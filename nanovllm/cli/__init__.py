"""The command line: `nanovllm generate`, `chat`, `run`, `merge`, `serve`, `bench`, `convert` and `eval`."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from nanovllm import __version__
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import Config, Dtype
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.flags import CommandParser, add_flags, flag_dest

IMPORT_STARTED = time.perf_counter()
"""Time before a command's modules are imported, which takes seconds."""
# Modules that import torch are imported by the command that needs them, so that help and errors appear at once.
_WITH_OWN_PARSER = {
    "bench": "nanovllm.cli.bench",
    "eval": "nanovllm.integrations.lm_eval",
    "merge": "nanovllm.cli.batch_files",
}
_COMMANDS = {
    "generate": "nanovllm.cli.chat",
    "chat": "nanovllm.cli.chat",
    "run": "nanovllm.cli.run",
    "convert": "nanovllm.utils.gguf",
    "serve": "nanovllm.serve.main",
}
_SAMPLING_DEFAULTS = (
    "Without a flag, the model's generation_config.json decides; where it says nothing, an output may be as long as "
    "the model allows, the temperature is 1, and all else is off."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in _WITH_OWN_PARSER:
        own, *rest = arguments
        return _run(own, lambda: _load(_WITH_OWN_PARSER[own]).main(rest))
    commands, parser = make_parsers()
    if "_ARGCOMPLETE" in os.environ:
        # Set by a shell with completion by `register-python-argcomplete`.
        import_module("argcomplete").autocomplete(parser)
    if not arguments:
        parser.print_help()
        return 0
    options = _parse(parser, commands, arguments)
    name: str = options.command
    return _run(name, lambda: getattr(_load(_COMMANDS[name]), name)(options, commands[name]))


def _run(name: str, command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; external failures are reported in one line."""
    try:
        return command() or 0
    except KeyboardInterrupt:
        print(f"nanovllm {name}: interrupted", file=sys.stderr)
        return 130
    except (OSError, ImportError) as error:
        # Such as a full disk, a closed pipe, or a missing extra.
        print(f"nanovllm {name}: error: {error}", file=sys.stderr)
        return 1


def _parse(parser: CommandParser, commands: dict[str, CommandParser], arguments: list[str]) -> Namespace:
    options, rest = parser.parse_known_args(arguments)
    model = flag_dest(Config, "model")
    words = [word for word in rest if word == "-" or not word.startswith("-")]
    if options.command == "generate" and getattr(options, model) == BUNDLED_MODEL and len(words) == len(rest) == 1:
        # argparse needs adjacent positionals: in `MODEL --flag 1 PROMPT` it would take MODEL as the prompt.
        setattr(options, model, options.prompt)
        options.prompt = rest.pop()
    if rest:
        commands[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _load(module: str) -> ModuleType:
    if not sys.stderr.isatty():
        return import_module(module)
    text = "Starting nanovllm ..."
    print(text, end="", file=sys.stderr, flush=True)
    try:
        return import_module(module)
    finally:
        print(f"\r{' ' * len(text)}\r", end="", file=sys.stderr, flush=True)


def make_parsers() -> tuple[dict[str, CommandParser], CommandParser]:
    """Return the parser of each command by name, and the parser of the whole command line."""
    parser = CommandParser("nanovllm", description="Inference of large language models, offline or as a server.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="answer a prompt",
        description="Answer a prompt and print the text as it comes. The prompt is a message in the model's chat "
        "template; a model that has none completes it as it is.",
    )
    generate.add_argument("--raw", action="store_true", help="complete the prompt as it is, without the chat template")
    chat = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. Ctrl-C stops an answer, /help lists what else there is, /quit or Ctrl-D ends.",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    run = _add_run(commands)
    serve = commands.add_parser(
        "serve",
        help="answer requests in OpenAI's form over HTTP",
        description="Answer HTTP requests in the form of OpenAI's API.",
    )
    add_flags(serve, ServeSettings, "server")
    engines = {"generate": generate, "chat": chat, "run": run, "serve": serve}
    for command in engines.values():
        add_flags(command, Config, "engine", positional="model", model=BUNDLED_MODEL)
        if command is not serve:
            # Both `Config` and `SamplingParams` have a seed.
            renamed = {"seed": "sampling_seed"}
            add_flags(command, SamplingParams, "sampling", renamed=renamed, description=_SAMPLING_DEFAULTS)
    # Last, so that it follows the model.
    generate.add_argument("prompt", metavar="PROMPT", help="the text; - is the standard input")
    # Their own parsers need torch; these entries are for the help.
    commands.add_parser("bench", help="measure throughput", add_help=False)
    commands.add_parser("merge", help="join the results of `run --shard`", add_help=False)
    commands.add_parser("eval", help="run lm-evaluation-harness, whose options it takes", add_help=False)
    return {**engines, "convert": _add_convert(commands)}, parser


def _add_run(commands: Any) -> CommandParser:
    run: CommandParser = commands.add_parser(
        "run",
        help="answer the lines of a file",
        description="Answer each line of a JSON Lines file. A run that was stopped goes on where it ended: lines that "
        "are answered in the output are skipped, and those that failed or have changed are answered again. The exit "
        "code is 1 if a line failed.",
    )
    run.add_argument(
        "-i", "--input", required=True, metavar="FILE",
        help='lines are {"prompt": ...}, {"messages": ...} or requests of OpenAI\'s batch API; compressed if the name '
        "ends in .gz, .bz2 or .xz; - is the standard input",
    )  # fmt: skip
    run.add_argument(
        "-o", "--output", required=True, metavar="FILE",
        help="gets a line for each request when it has finished, with the number of its line; - is the standard output",
    )  # fmt: skip
    run.add_argument(
        "--overwrite", action="store_true",
        help="overwrite the output instead of continuing it; needed for another model or other parameters",
    )  # fmt: skip
    run.add_argument(
        "--tool-call-parser", default="auto", metavar="NAME",
        help="how the model writes calls of tools, by vLLM's names; auto: as its chat template shows",
    )  # fmt: skip
    run.add_argument(
        "--reasoning-parser", metavar="NAME",
        help="how the model marks its thoughts, by vLLM's names; they are split off the answers of chats",
    )  # fmt: skip
    shards = run.add_argument_group(
        "shards and object stores", "FILE may be anything that fsspec opens, such as s3://bucket/name."
    )
    shards.add_argument(
        "--shard", metavar="I/N",
        help="answer one of N shards of the lines, counted from 0; `nanovllm merge` joins the outputs",
    )  # fmt: skip
    contiguous = "a shard is a stretch of the input, instead of every Nth line"
    shards.add_argument("--contiguous", action="store_true", help=contiguous)
    return run


def _add_convert(commands: Any) -> CommandParser:
    convert: CommandParser = commands.add_parser(
        "convert",
        help="write a GGUF file's model as a folder",
        description="Write the model of a GGUF file as a folder in the Hub's layout. The weights are dequantised, so "
        "that the folder is several times as large. Commands that take a model convert such a file themselves, into a "
        "cache.",
    )
    convert.add_argument("file", type=Path, help="the GGUF file; of several parts, any")
    convert.add_argument("folder", type=Path, help="gets config, weights and tokenizer; made if it is not there")
    dtypes = [name for name in get_args(Dtype) if name != "auto"]
    convert.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of the weights in the folder")
    return convert
