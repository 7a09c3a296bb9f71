"""Results and failures of requests until their callers have them, so that no exception and no signal loses any."""

from __future__ import annotations

from nanovllm.outputs import StepError, TokenOutput


class Unclaimed:
    """What steps have finished or failed, and nobody has seen yet."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, TokenOutput]] = []
        self.failures: list[StepError] = []

    def __bool__(self) -> bool:
        return bool(self.finished or self.failures)

    def take(self) -> list[tuple[int, TokenOutput]]:
        """Return, once, everything that has finished, or raise the oldest failure, once."""
        if self.failures:
            raise self.failures.pop(0)
        finished, self.finished = self.finished, []
        return finished

    def claim(self, request_ids: set[int]) -> dict[int, TokenOutput]:
        """Return, once, those of these requests that have finished.

        Raises:
            StepError: one has failed, or a step that had no requests yet; it stays until `drop`.
        """
        for failure in self.failures:
            if not (failure.request_ids and request_ids.isdisjoint(failure.request_ids)):
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
