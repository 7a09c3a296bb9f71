"""What is new of a request whose outputs are taken as they come."""

from __future__ import annotations

import numpy as np

from nanovllm.engine.request_output import DecodeToken, token_logprobs
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.text.input_processor import Request
from nanovllm.text.output_processor import NewTokens, OutputState


class StreamedRequest:
    """A request whose outputs are taken as they come; each of them has an `OutputState` as its sink.

    Args:
        request: from `InputProcessor.process` with `streams`.
        decode_token: returns the text of a token.
    """

    def __init__(self, request: Request, decode_token: DecodeToken) -> None:
        self.request = request
        self._decode_token = decode_token if request.params.detokenize else _no_text
        self._prompt_token_ids = request.features[0].prompt_token_ids or request.token_ids.tolist()
        self._cumulative = [0.0] * len(request.features)

    def take(self, request_id: int | str, final: RequestOutput | None = None) -> RequestOutput | None:
        """Return what is new of the outputs; None if nothing is.

        Args:
            request_id: of what is returned.
            final: the engine's output, once the request has finished.
        """
        outputs = []
        for i, features in enumerate(self.request.features):
            assert isinstance(features.sink, OutputState)
            new = features.sink.take(final is not None)
            if final is not None or new.text or new.token_ids:
                outputs.append(self._completion(i, new))
        prompt = self.request.features[0].prompt
        if final is None:
            return RequestOutput(request_id, prompt, self._prompt_token_ids, outputs, False) if outputs else None
        for output, whole in zip(outputs, final.outputs, strict=True):
            output.finish_reason, output.stop_reason = whole.finish_reason, whole.stop_reason
        final.outputs, final.request_id = outputs, request_id
        return final

    def _completion(self, index: int, new: NewTokens) -> CompletionOutput:
        output = CompletionOutput(index, new.text, new.token_ids)
        if self.request.params.logprobs is not None:
            logprobs = token_logprobs(new.logprobs, self.request.params.logprobs, self._decode_token)
            output.logprobs = logprobs
            self._cumulative[index] += float(logprobs.token_logprobs.sum(dtype=np.float64))
            output.cumulative_logprob = self._cumulative[index]
        return output


def _no_text(token_id: int) -> None:
    return None
