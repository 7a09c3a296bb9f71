"""The command line: `nanovllm run`, `nanovllm chat`, `nanovllm bench` and `nanovllm eval`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.flags import CommandParser, add_flags

# What imports torch is imported by the command that needs it, so that help and errors come at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    Args:
        arguments: the command line; the process's if None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:
        from nanovllm.bench.main import main as bench  # noqa: PLC0415

        bench(arguments[1:])
        return 0
    if arguments[:1] == ["eval"]:
        from nanovllm.integrations.lm_eval import main as evaluate  # noqa: PLC0415

        evaluate(list(arguments[1:]))
        return 0
    run_parser, chat_parser, parser = make_parsers()
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            from nanovllm.commands.run import run  # noqa: PLC0415

            return run(options, run_parser)
        from nanovllm.commands.chat import chat  # noqa: PLC0415

        return chat(options, chat_parser)
    except KeyboardInterrupt:
        print(f"nanovllm {options.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Such as a disk that is full, or a pipe that nobody reads any more.
        print(f"nanovllm {options.command}: error: {error}", file=sys.stderr)
        return 1


def make_parsers() -> tuple[CommandParser, CommandParser, CommandParser]:
    """Return the parsers of `run`, of `chat`, and of the whole command line."""
    parser = CommandParser("nanovllm", description="Offline inference of large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="answer the lines of a file",
        description="Answer each line of a JSON Lines file. A run that was stopped goes on where it ended: lines that "
        "are answered in the output are skipped.",
    )
    run.add_argument(
        "-i", "--input", required=True, metavar="FILE",
        help='lines are {"prompt": ...}, {"messages": ...} or requests of OpenAI\'s batch API; - is the standard input',
    )  # fmt: skip
    run.add_argument(
        "-o", "--output", required=True, metavar="FILE",
        help="gets a line for each request when it has finished, with the number of its line; - is the standard output",
    )  # fmt: skip
    chat = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D or /exit ends. "
        "Sampling parameters that no flag sets are those that the model recommends.",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    for command in (run, chat):
        add_flags(command, Config, "engine", model=BUNDLED_MODEL)
        # Both classes have a seed.
        add_flags(command, SamplingParams, "sampling", renamed={"seed": "sampling_seed"})
    # They have parsers of their own, which need torch; these entries are for the help.
    commands.add_parser("bench", help="measure throughput against what the machine can", add_help=False)
    commands.add_parser("eval", help="run lm-evaluation-harness, whose options it takes", add_help=False)
    return run, chat, parser
