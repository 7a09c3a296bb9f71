"""Beam search for the most likely outputs, with transformers' stopping rule.

In each step every beam becomes a request for one token, whose log-probabilities give the most likely continuations;
the prefix cache serves the blocks that beams share.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.text.output_processor import Detokenizer


@dataclass
class Beam:
    """A hypothesis: the tokens after the prompt, and the sum of their log-probabilities."""

    token_ids: list[int]
    logprob: float


@dataclass
class BeamSearch:
    """The search for one prompt.

    Attributes:
        max_tokens: maximum tokens of a beam, at most `params.max_tokens`.
        running: beams to extend, most likely first.
        finished: ended beams with their scores, best first; at most `beam_width`.
        done: whether no step can improve `finished`.
    """

    prompt_token_ids: list[int]
    params: BeamSearchParams
    eos_token_ids: frozenset[int]
    max_tokens: int
    running: list[Beam] = field(default_factory=lambda: [Beam([], 0.0)])
    finished: list[tuple[float, Beam]] = field(default_factory=list)
    done: bool = False

    @property
    def num_candidates(self) -> int:
        """Continuations needed of each beam, so that enough beams are running if all others end."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    def requests(self) -> list[Request]:
        """Return the requests of a step, one for each running beam."""
        # May exceed the number of log-probabilities that users may request.
        params = SamplingParams(
            self.params.temperature, 1, detokenize=False, ignore_eos=True, logprobs=self.num_candidates
        )
        return [Request(array("i", self.prompt_token_ids + beam.token_ids), params) for beam in self.running]

    def extend(self, outputs: Iterator[RequestOutput]) -> None:
        """Do one step with the outputs of its `requests`, the next ones of an iterator."""
        width = self.params.beam_width
        candidates = [
            Beam([*beam.token_ids, token_id], beam.logprob + logprob)
            for beam in self.running
            for token_id, logprob in _continuations(next(outputs), self.num_candidates)
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        candidates = candidates[: self.num_candidates]
        self.running = [beam for beam in candidates if not self._ends(beam)][:width]
        # Candidates beyond the width may continue, but not become answers.
        self.finished += [(self.score(beam), beam) for beam in candidates[:width] if self._ends(beam)]
        self.finished = sorted(self.finished, key=lambda item: -item[0])[:width]
        # The best running beam is scored by its current length.
        is_full = len(self.finished) == width
        self.done = not self.running or (is_full and self.score(self.running[0]) <= self.finished[-1][0])

    def score(self, beam: Beam) -> float:
        """Return the log-probability of a beam with length penalty (Wu et al. 2016, arXiv:1609.08144, simplified)."""
        return float(beam.logprob / len(beam.token_ids) ** self.params.length_penalty)

    def ends_with_eos(self, beam: Beam) -> bool:
        """Whether a beam's last token ends it."""
        return not self.params.ignore_eos and beam.token_ids[-1] in self.eos_token_ids

    def _ends(self, beam: Beam) -> bool:
        return self.ends_with_eos(beam) or len(beam.token_ids) >= self.max_tokens


def _continuations(output: RequestOutput, count: int) -> list[tuple[int, float]]:
    """Return the most likely next tokens of a beam, and their log-probabilities."""
    (logprobs,) = output.outputs[0].logprobs or [{}]
    # The sampled token may not be among the most likely ones.
    return [(token_id, item.logprob) for token_id, item in logprobs.items() if (item.rank or 0) <= count]


@dataclass
class BeamSearchSequence:
    """One beam: its tokens without the prompt's, its text, and its score with length penalty."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(search: BeamSearch, tokenizer: Any) -> BeamSearchOutput:
    """Return the best beams of a finished search."""
    sequences = []
    for score, beam in search.finished:
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, search.prompt_token_ids)
        text = "" if detokenizer is None else detokenizer.append(beam.token_ids, final=True)
        reason = "stop" if search.ends_with_eos(beam) else "length"
        sequences.append(BeamSearchSequence(beam.token_ids, text, beam.logprob, score, reason))
    return BeamSearchOutput(sequences)
