"""Texts that come in pieces join to the text that comes whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client.engine_client import RequestState
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.tasks.beam_search import Beam, BeamSearch, beam_search_output
from nanovllm.text.output_processor import (
    Detokenizer,
    OutputDelta,
    OutputProcessor,
    OutputState,
    token_bytes_function,
)
from tests.mock_runner import make_request
from tests.small_tokenizers import MARK, sentencepiece_tokenizer

TEXTS = [
    "plain words, and more",
    "日本語 ümläute 🙂🙃 \U0001f9d1\u200d\U0001f680",
    " leading\n\n\ttabs  ",
    "\ufffd literal \ufffd\ufffd",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


class CountingTokenizer:
    """Decodes tokens, odd ones to no text; counts what it decodes. A space that begins a text is left out."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **_: bool) -> str:
        self.num_decoded += len(token_ids)
        return "".join(["", f" {token_id}"][token_id % 2 == 0] for token_id in token_ids).removeprefix(" ")


@pytest.mark.parametrize("first", [[], [2, 4]])
def test_tokens_without_text_are_not_decoded_again_and_again(first: list[int]) -> None:
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer)
    token_ids = first + [1] * 300 + [6, 1, 8]
    text = "".join(detokenizer.append([token_id]) for token_id in token_ids)
    assert tokenizer.num_decoded < 40 * len(token_ids)
    assert text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("most", [1, 3])
def test_pieces_join_to_the_whole(tokenizer: Any, text: str, most: int) -> None:
    rng = random.Random(most)
    token_ids = tokenizer.encode(text + tokenizer.eos_token + text)
    # Bytes that make no character at all, in the middle and at the end.
    token_ids = token_ids[:5] + tokenizer.encode("🙂")[:2] + token_ids[5:] + tokenizer.encode("🙂")[:1]
    detokenizer, pieces, start = Detokenizer(tokenizer), [], 0
    while start < len(token_ids):
        end = start + rng.randint(1, most)
        pieces.append(detokenizer.append(token_ids[start:end], final=end >= len(token_ids)))
        start = end
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    assert sum(map(bool, pieces)) > 3


class WatchedLock:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._lock = Lock()
        self._on_wait = on_wait

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._on_wait()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("stop", [None, "never"])
def test_what_is_taken_while_a_token_is_added_is_whole(tokenizer: Any, stop: str | None) -> None:
    state = OutputState(tokenizer, SamplingParams(stop=stop, logprobs=0), [])
    (token_id,) = tokenizer.encode("a")
    taken: list[OutputDelta] = []
    reached = Event()

    def take() -> None:
        taken.append(state.take(False))
        reached.set()

    class Held(list[int]):
        """New token ids; a reader takes the first as soon as it is there."""

        def append(self, item: int) -> None:
            super().append(item)
            reader.start()
            # The reader waits for the writer, or has gone past it.
            assert reached.wait(240)

    reader = Thread(target=take)
    state._lock = WatchedLock(reached.set)  # type: ignore[assignment]
    state._token_ids = Held()
    state.append(0, token_id, False, b"a record")
    reader.join(240)
    assert [(new.text, new.token_ids, new.logprobs) for new in taken] == [("a", [token_id], b"a record")]


@pytest.fixture(scope="module")
def words() -> Any:
    return sentencepiece_tokenizer(
        f"{MARK}Hello", f"{MARK}world", f"{MARK}big", f"{MARK}x", "s", special=("<tag>",), added=(MARK * 2,)
    )


def ids(tokenizer: Any, *names: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


def test_a_token_whose_text_depends_on_those_before_it(words: Any) -> None:
    tokens = ids(words, "<tag>", f"{MARK}Hello", "<tag>", "<tag>", f"{MARK}world", f"{MARK}big")
    detokenizer = Detokenizer(words)
    # Behind a special token, too, a word is not the first.
    assert [detokenizer.append([token]) for token in tokens] == ["", "Hello", "", "", " world", " big"]


@pytest.mark.parametrize("between", [[], ["<tag>"] * 9])
def test_an_output_goes_on_where_its_prompt_ends(words: Any, between: list[str]) -> None:
    prompt = ids(words, "<s>", f"{MARK}Hello", *between)
    output = ids(words, f"{MARK}world", "<tag>", f"{MARK}big", MARK * 2, "s")
    detokenizer = Detokenizer(words, prompt)
    pieces = [detokenizer.append([token_id]) for token_id in output]
    assert pieces == [" world", "", " big", "  ", "s"]
    processor, params = OutputProcessor(words), SamplingParams(stop=" big").checked()
    assert processor.decode(prompt, output, params, ends=False) == "".join(pieces)
    whole = words.decode(prompt + output, skip_special_tokens=True)
    assert words.decode(prompt, skip_special_tokens=True) + "".join(pieces) == whole
    # Stop strings may begin with a space.
    state = OutputState(words, params, prompt)
    assert [state.append(i, output[i], False, b"") for i in range(3)] == [False, False, True]
    # The engine goes on for a few tokens, or runs the request again.
    assert [state.append(i, output[0], False, b"") for i in (3, 4, 0, 1, 2)] == [*[False] * 4, True]
    assert state.take(True).text == " world"
    assert Detokenizer(words).append(output[:1]) == "world"


def test_a_character_that_a_prompt_begins_belongs_to_the_output(words: Any) -> None:
    half, rest = ids(words, "<0xC3>", "<0xA9>")
    detokenizer = Detokenizer(words, [*ids(words, f"{MARK}Hello"), half])
    assert [detokenizer.append([rest]), detokenizer.append(ids(words, "s"))] == ["é", "s"]
    # Decoders see bytes that follow each other as one text, which must not begin within a character.
    detokenizer = Detokenizer(words, [half])
    assert [detokenizer.append([token_id]) for token_id in (rest, half, rest)] == ["é", "", "é"]
    # One that a text has by itself says nothing of a character to come.
    byte_level = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert Detokenizer(byte_level, byte_level.encode("\ufffd")).append(byte_level.encode("\ufffda")) == "\ufffda"


def test_the_bytes_of_a_token_are_its_bytes_in_a_text(words: Any) -> None:
    get_bytes = token_bytes_function(words)
    names = (f"{MARK}world", "s", MARK * 2, "<0xC3>", "<0xA9>", "</s>")
    assert [get_bytes(token_id) for token_id in ids(words, *names)] == [
        b" world", b"s", b"  ", b"\xc3", b"\xa9", b"</s>",
    ]  # fmt: skip
    assert OutputProcessor(words).decode_token(*ids(words, f"{MARK}world")) == " world"
    byte_level = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    get_bytes = token_bytes_function(byte_level)
    text = " sea 字😀 \ufffd"
    assert b"".join(get_bytes(i) or b"" for i in byte_level.encode(text)).decode() == text


def test_beams_go_on_where_their_prompt_ends(words: Any) -> None:
    prompt, output = ids(words, f"{MARK}Hello"), ids(words, f"{MARK}world")
    search = BeamSearch(prompt, BeamSearchParams(1, 4), frozenset(), 4)
    search.finished = [(0.0, Beam(output, 0.0))]
    assert beam_search_output(search, words).sequences[0].text == " world"


class ByteTokenizer:
    """Each token is some bytes."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        pieces = {1: b"x", 2: b"stop\xc3"}
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")


def test_a_stop_string_that_an_unfinished_character_held_back_ends_the_output() -> None:
    params = SamplingParams(stop="stop", max_tokens=2)
    state = RequestState(make_request([1], params.checked()), OutputProcessor(ByteTokenizer()))
    for position, token_id in enumerate((1, 2)):
        assert not state.outputs[0].append(position, token_id, False, b"")
    output = CompletionOutput(0, "", [1, 2], finish_reason="length")
    state.output = RequestOutput(0, None, [1], [output], True)
    assert state.result() is state.output
    assert (output.text, output.finish_reason, output.stop_reason) == ("x", "stop", "stop")
