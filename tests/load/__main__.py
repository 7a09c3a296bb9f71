"""The load on a server: `python -m tests.load --url http://127.0.0.1:8000 --rate 1,4,16,inf`.

Sends streaming requests to any OpenAI-compatible server as a Poisson process, one rate after the other, and prints a
row for each rate: completed requests and their output tokens per second, and percentiles of latencies in milliseconds.
Latencies begin when a request is sent. The time to first token (TTFT) ends with the first text, the end to end time
(E2E) with the answer; the time per output token is (last - first) / (tokens - 1). Tokens are counted by the server's
usage, or if it sends none, by the events that have text. The seconds of a rate's throughput go on until the last answer
has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nanovllm.utils.flags import CommandParser, user_errors
from tests.load.report import HEADER, RateResult, notes, plot, row, summarize

if TYPE_CHECKING:
    from aiohttp import ClientSession

_PROGRAM = "python -m tests.load"
# Requests at an infinite rate if neither a flag nor another rate says how many.
_BURST = 1000
# Options that the JSON repeats.
_SETTINGS = (
    "url", "endpoint", "concurrency", "timeout", "seed",
    "input_tokens", "output_tokens", "ignore_eos", "temperature", "prompt_ids",
)  # fmt: skip
_PATHS = {"completions": "completions", "chat": "chat/completions"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a server at each rate, print the table, and return the exit code: 1 if no request succeeded.

    Args:
        arguments: the command line; the process's if None.
    """
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    _allow_open_files(options.concurrency + 100)
    try:
        model, results = asyncio.run(measure(options))
        for line in notes(results):
            print(line)
        write_files(options, model, results)
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Such as a server that cannot be asked for its models, or a disk that is full.
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    if not any(result.completed for result in results):
        print(f"{_PROGRAM}: error: no request succeeded", file=sys.stderr)
        return 1
    return 0


async def measure(options: argparse.Namespace) -> tuple[str, list[RateResult]]:
    """Measure and print one rate after the other; return the model's name too.

    Raises:
        ConnectionError: no model was named, and the server lists none.
    """
    from tests.load.client import first_model, open_session  # noqa: PLC0415

    rng, results = Random(options.seed), []
    async with open_session(options.api_key, options.timeout) as session:
        model = options.model or await first_model(session, options.url)
        print(f"{title(options, model)}, seed {options.seed}\n{HEADER}", flush=True)
        for rate in options.rate:
            results.append(await measure_rate(session, options, model, rate, rng))
            print(row(results[-1]), flush=True)
    return model, results


async def measure_rate(
    session: ClientSession, options: argparse.Namespace, model: str, rate: float, rng: Random
) -> RateResult:
    """Send the requests of a rate, with prompts that no earlier one had, and wait for all answers."""
    from tests.load.client import arrival_times, random_ids, random_text, request_body, send_all  # noqa: PLC0415

    fields: dict[str, Any] = {"model": model, "max_tokens": options.output_tokens}
    fields |= {"ignore_eos": True} if options.ignore_eos else {}
    fields |= {} if options.temperature is None else {"temperature": options.temperature}
    bodies = []
    for _ in range(num_requests(options, rate)):
        count, size = options.input_tokens, options.vocab_size
        prompt = random_ids(count, size, rng) if options.prompt_ids else random_text(count, rng)
        bodies.append(request_body(prompt, fields, chat=options.endpoint == "chat"))
    times, url = arrival_times(len(bodies), rate, rng), f"{options.url}/{_PATHS[options.endpoint]}"
    started = time.perf_counter()
    outcomes = await send_all(session, url, bodies, times, options.concurrency)
    return summarize(rate, outcomes, time.perf_counter() - started)


def num_requests(options: argparse.Namespace, rate: float) -> int:
    """Return how many requests a rate gets: an infinite one as many as the highest other."""
    if options.num_requests is not None:
        return int(options.num_requests)
    highest = max((r for r in options.rate if math.isfinite(r)), default=_BURST / options.seconds)
    return max(1, round(options.seconds * min(rate, highest)))


def title(options: argparse.Namespace, model: str) -> str:
    """Return what is measured, in a line."""
    sizes = f"{options.input_tokens} tokens in, up to {options.output_tokens} out"
    return f"{model} at {options.url}/{_PATHS[options.endpoint]}, {sizes}"


def write_files(options: argparse.Namespace, model: str, results: Sequence[RateResult]) -> None:
    """Write the JSON and the plot that were asked for."""
    if options.json:
        settings = {"model": model} | {name: getattr(options, name) for name in _SETTINGS}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(settings | {"rates": [r.to_json() for r in results]}, file, indent=2, allow_nan=False)
            file.write("\n")
    if options.plot:
        plot(results, title(options, model), options.plot)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options, checked; a bad one ends the program with code 2 and one line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    for package in ["aiohttp", "matplotlib"] if options.plot else ["aiohttp"]:
        if find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install '.[test]'")
    if options.prompt_ids and (options.endpoint == "chat" or options.vocab_size is None):
        parser.error("--prompt-ids needs --vocab-size and --endpoint completions")
    if options.vocab_size is not None and not options.prompt_ids:
        parser.error("--vocab-size needs --prompt-ids")
    with user_errors(parser):
        for path in filter(None, (options.plot, options.json)):
            # Before a run that may take minutes.
            open(path, "ab").close()
    return options


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(_PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", type=_base_url, required=True, help="the server's, with or without /v1")
    add("--rate", type=_rates, required=True, metavar="X,...", help="requests per second; inf: all at once")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--num-requests", type=_count, metavar="N", help="at each rate")
    amount.add_argument("--seconds", type=_positive, default=30.0, metavar="X", help="of sending at each rate (30)")
    add("--concurrency", type=_count, default=1024, metavar="N", help="most requests at once (1024)")
    add("--timeout", type=_positive, default=600.0, metavar="X", help="seconds for a whole answer (600)")
    add("--seed", type=int, default=SystemRandom().randrange(2**32), metavar="N",
        help="of arrivals and prompts; default: a new one, so that no prompt is in the server's cache")  # fmt: skip
    add("--plot", metavar="FILE", help="draw the results as PNG: over the rates, or the distribution at a single one")
    add("--json", metavar="FILE", help="write the results as JSON")
    _add_request_flags(parser)
    return parser


def _add_request_flags(parser: CommandParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--endpoint", choices=_PATHS, default="completions")
    add("--model", help="default: the first that the server lists")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: the variable OPENAI_API_KEY")
    add("--input-tokens", type=_count, default=256, metavar="N", help="random words, each about one token (256)")
    add("--output-tokens", type=_count, default=128, metavar="N", help="most tokens of an answer (128)")
    add("--prompt-ids", action="store_true", help="send random token ids instead of words; not every server takes them")
    add("--vocab-size", type=_count, metavar="N", help="the token ids are below it")
    add("--ignore-eos", action="store_true", help="make all answers as long as asked for, an extension of vLLM's API")
    add("--temperature", type=float, metavar="X", help="default: the server's")


def _rates(text: str) -> list[float]:
    return [_positive(part, infinite=True) for part in text.split(",")]


def _positive(text: str, *, infinite: bool = False) -> float:
    value = float(text)
    if not value > 0 or not (infinite or math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"must be http://host:port or https://host:port, not {text}")
    return text.rstrip("/").removesuffix("/v1") + "/v1"


def _allow_open_files(number: int) -> None:
    """Raise the limit on open files as far as the system allows; each connection is one."""
    try:
        import resource  # noqa: PLC0415
    except ImportError:
        # Windows has no such limit.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
