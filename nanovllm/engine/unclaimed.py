"""Results and failures of requests until their callers have them, so that no exception and no signal loses any."""

from __future__ import annotations

from collections.abc import Callable, Set

from nanovllm.engine.sequence import RequestGroup
from nanovllm.outputs import RequestOutput, StepError


class Unclaimed:
    """What steps have finished or failed, and nobody has seen yet.

    Args:
        make_output: makes a finished request's output.
    """

    def __init__(self, make_output: Callable[[RequestGroup], RequestOutput]) -> None:
        self._make_output = make_output
        self.finished: list[tuple[int, RequestOutput]] = []
        self.failures: list[StepError] = []

    def __bool__(self) -> bool:
        return bool(self.finished or self.failures)

    def add(self, request: RequestGroup) -> None:
        """Keep the output of a finished request; one whose text cannot be decoded fails alone."""
        request_id = request.request_id
        try:
            output = self._make_output(request)
        # A panic of the tokenizers library derives from BaseException.
        except BaseException as error:
            message = f"the text of request {request_id} cannot be decoded: {error}"
            self.failures.append(StepError(message, [request_id], error))
            return
        self.finished.append((request_id, output))

    def fail(self, error: StepError) -> None:
        """Keep a step's failure, unless one before it has taken all of its requests along."""
        if error.request_ids or not self.failures:
            self.failures.append(error)

    def take(self) -> list[tuple[int, RequestOutput]]:
        """Return, once, everything that has finished, or raise the oldest failure, once."""
        if self.failures:
            raise self.failures.pop(0)
        finished, self.finished = self.finished, []
        return finished

    def take_all(self) -> tuple[list[tuple[int, RequestOutput]], list[StepError]]:
        """Return, once, everything that has finished and every failure."""
        finished, self.finished = self.finished, []
        failures, self.failures = self.failures, []
        return finished, failures

    def claim(self, request_ids: Set[int]) -> dict[int, RequestOutput]:
        """Return, once, those of these requests that have finished.

        Raises:
            StepError: one has failed, or a step that had no requests yet; it stays until `drop`.
        """
        for failure in self.failures:
            if not (failure.request_ids and not any(i in request_ids for i in failure.request_ids)):
                raise failure
        done = {request_id: output for request_id, output in self.finished if request_id in request_ids}
        if done:
            self.finished = [item for item in self.finished if item[0] not in done]
        return done

    def drop(self, request_ids: set[int]) -> None:
        """Forget these requests; a failure that they share with others stays for the others."""
        self.finished = [item for item in self.finished if item[0] not in request_ids]
        failures = []
        for failure in self.failures:
            others = [request_id for request_id in failure.request_ids if request_id not in request_ids]
            if others:
                failures.append(StepError(str(failure), others, failure.__cause__))
        self.failures = failures
