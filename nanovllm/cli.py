"""The command line: `nanovllm run`, `nanovllm chat`, `nanovllm serve`, `nanovllm bench` and `nanovllm eval`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.flags import CommandParser, add_flags

# What imports torch is imported by the command that needs it, so that help and errors come at once.
_WITH_OWN_PARSER = {
    ("bench", "serve"): "nanovllm.bench.serve",
    ("bench",): "nanovllm.bench.main",
    ("eval",): "nanovllm.integrations.lm_eval",
}
_COMMANDS = {"run": "nanovllm.commands.run", "chat": "nanovllm.commands.chat", "serve": "nanovllm.serve.main"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    Args:
        arguments: the command line; the process's if None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for words, module in _WITH_OWN_PARSER.items():
        if tuple(arguments[: len(words)]) == words:
            return import_module(module).main(arguments[len(words) :]) or 0
    commands, parser = make_parsers()
    options = parser.parse_args(arguments)
    name: str = options.command
    try:
        code: int = getattr(import_module(_COMMANDS[name]), name)(options, commands[name])
        return code
    except KeyboardInterrupt:
        print(f"nanovllm {name}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Such as a disk that is full, or a pipe that nobody reads any more.
        print(f"nanovllm {name}: error: {error}", file=sys.stderr)
        return 1


def make_parsers() -> tuple[dict[str, CommandParser], CommandParser]:
    """Return the parsers of `run`, `chat` and `serve` by name, and that of the whole command line."""
    parser = CommandParser("nanovllm", description="Offline inference of large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="answer the lines of a file",
        description="Answer each line of a JSON Lines file. A run that was stopped goes on where it ended: lines that "
        "are answered in the output are skipped, and those that failed or have changed are answered again. The exit "
        "code is 1 if a line failed.",
    )
    run.add_argument(
        "-i", "--input", required=True, metavar="FILE",
        help='lines are {"prompt": ...}, {"messages": ...} or requests of OpenAI\'s batch API; may be compressed '
        "(gzip, bz2, xz), UTF-16, or a JSON array; - is the standard input",
    )  # fmt: skip
    run.add_argument(
        "-o", "--output", required=True, metavar="FILE",
        help="gets a line for each request when it has finished, with the number of its line; - is the standard output",
    )  # fmt: skip
    run.add_argument(
        "--overwrite", action="store_true",
        help="remove what the output holds, instead of going on with it; needed for another model or other parameters",
    )  # fmt: skip
    chat = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D or /exit ends. "
        "Sampling parameters that no flag sets are those that the model recommends.",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    serve = commands.add_parser(
        "serve",
        help="answer requests in OpenAI's form over HTTP",
        description="Answer HTTP requests in the form of OpenAI's API.",
    )
    serve.add_argument("model", nargs="?", metavar="MODEL", help="instead of --model")
    add_flags(serve, ServeSettings, "server")
    add_flags(serve, Config, "engine", model=BUNDLED_MODEL)
    for command in (run, chat):
        add_flags(command, Config, "engine", model=BUNDLED_MODEL)
        # Both classes have a seed.
        add_flags(command, SamplingParams, "sampling", renamed={"seed": "sampling_seed"})
    # They have parsers of their own, which need torch; these entries are for the help.
    commands.add_parser("bench", help="measure throughput; bench serve: that of a server under load", add_help=False)
    commands.add_parser("eval", help="run lm-evaluation-harness, whose options it takes", add_help=False)
    return {"run": run, "chat": chat, "serve": serve}, parser
