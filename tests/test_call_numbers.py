"""Call numbers of the symmetric buffers: none occurs twice, however long an engine runs."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import get_context

from nanovllm import LLM, SamplingParams
from nanovllm.parallel import symmetric_communicator as symmetric
from nanovllm.parallel.distributed_communicator import open_store
from nanovllm.parallel.symmetric_communicator import StepLimits, SymmetricCommunicator
from nanovllm.runner import model_runner, step_outputs
from nanovllm.runner.worker import step_limits
from tests.call_number_ranks import CALLS, LIMITS, NUM_RANKS, Move, broadcast_tensor, part_of, run_rank
from tests.conftest import MakeCheckpoint
from tests.server_process import PATIENCE_SECONDS
from tests.test_all_reduce_rms_norm import make_buffer
from tests.test_kernels import GPU

MANY, FEW = Move((8,) * CALLS), Move((1,) * CALLS)
# If numbers were of 32 bits and 65,535 to a step, call 1 of step 65,537 would have 0, and call 3 of step 65,540 that of
# call 2 of step 3, which was the last to send the rows that it receives.
AFTER_MANY = [
    *[MANY, MANY, Move((8, 8, 8, 1, 1)), Move(FEW.rows, number=65_530), *[FEW] * 6],
    *[Move((1, 16, 1, 1, 1)), FEW, FEW, Move((1, 1, 1, 8, 1))],
]
# After the last number comes the first again.
AT_THE_LAST = [*[MANY] * 2, Move(FEW.rows, number=-1), *[MANY] * 2]


@pytest.mark.skipif(GPU, reason="kernels are compiled where there is a GPU, and run there alone")
def test_words_of_old_calls_do_not_pass_for_new_ones(tmp_path: Path) -> None:
    runs = [AFTER_MANY, AT_THE_LAST]
    stores: list[TCPStore] = [open_store(NUM_RANKS) for _ in runs]
    memory = torch.zeros(len(runs), NUM_RANKS, 2**21, dtype=torch.uint8).share_memory_()
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    files = [str(tmp_path / f"{rank}") for rank in range(NUM_RANKS)]
    for rank, file in enumerate(files):
        args = rank, [store.port for store in stores], memory, runs, file
        processes.append(context.Process(target=run_rank, args=args, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    for moves, results in zip(runs, zip(*map(torch.load, files), strict=True), strict=True):
        found = [iter(result) for result in results]
        for step, move in enumerate(moves):
            for call, num_rows in enumerate(move.rows):
                exact = part_of(0, step, call, num_rows) + part_of(1, step, call, num_rows)
                for rank, result in enumerate(found):
                    assert torch.equal(next(result), exact), f"step {step}, call {call}, rank {rank}"
            for result in found:
                assert next(result).tolist() == [step + 10, step]
        narrow = part_of(0, 0, 0, 8)[:, :2] + part_of(1, 0, 0, 8)[:, :2]
        for result in found:
            assert torch.equal(next(result), narrow) and torch.equal(next(result), narrow)
            assert torch.equal(next(result), broadcast_tensor())


def test_the_numbers_of_a_step_are_positive_and_follow_those_of_the_step_before() -> None:
    for limits in (
        LIMITS,
        StepLimits(73, 33_280, 4096, 1024, 40, 18_432, 151_936),
        StepLimits(3, 1, 8, 1, 2, 1, 9),
        StepLimits(4, 1, 8, 1, 2, 1, 9),
    ):
        for num_ranks in (2, 3, 8):
            calls, forward = limits.calls_per_step(num_ranks), limits.forward_calls(num_ranks)
            assert calls % 2 == forward % 2 == limits.num_reductions % 2 and limits.num_reductions <= forward < calls
            max_steps = replace(make_buffer(word_bytes=8, row_bytes=8, max_rows=1), calls_per_step=calls).max_steps
            last_number = max_steps * calls + calls - 1
            assert last_number < 2**31 <= last_number + calls
            assert max_steps > 400_000, "the buffers are cleared once in half an hour at most"


class Counting(SymmetricCommunicator):
    """One of two ranks that runs alone: checks indices, but sends nothing."""

    def __init__(self, limits: StepLimits) -> None:
        self.rank, self.size = 0, 2
        self._limits = limits
        self._call = self._end_call = 0
        self._forward_calls = limits.forward_calls(2)
        self.prepared = self.steps = self.most_calls = 0

    @property
    def _buffer(self) -> Any:  # type: ignore[override]
        return self

    @property
    def calls_per_step(self) -> int:
        return self._limits.calls_per_step(2)

    @property
    def step(self) -> Any:
        return self

    def add_(self, value: int) -> None:
        self.steps += value

    def prepare_step(self) -> None:
        self.prepared += 1

    def begin_sampling(self) -> None:
        # What follows takes the half of the buffer that the pass has not used last.
        assert self._call % 2 == self._forward_calls % 2
        super().begin_sampling()

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        self.most_calls = max(self.most_calls, self._call)
        return token_ids

    def all_reduce_min(self, value: int) -> int:
        return value


@pytest.mark.parametrize("model", [{}, {"architecture": "Olmo2", "pad_token_id": 0, "num_hidden_layers": 3}])
def test_no_step_makes_more_calls_than_it_has_numbers(
    model: dict[str, Any], make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scored prompts, edited rows and log-probabilities, whose logits go in many parts."""
    monkeypatch.setattr(step_outputs, "LOGITS_BYTES", 4 * 320 * 5)
    monkeypatch.setattr(symmetric, "_ROW_BYTES", 2**16)
    made: list[Counting] = []

    class Runner(model_runner.ModelRunner):
        def __init__(self, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
            limits = step_limits(config, model_config)
            assert limits is not None
            made.append(Counting(limits))
            super().__init__(config, model_config, *args, **kwargs | {"communicator": made[0]})

    def all_reduce_rms_norm(x: torch.Tensor, norm: Any, residual: Any, *args: Any) -> None:
        _, call, _, (normed, total) = args
        made[0].most_calls = max(made[0].most_calls, call + 1)
        total.copy_(x if residual is None else x + residual)
        normed.copy_(total)

    monkeypatch.setattr(symmetric, "all_reduce_rms_norm", all_reduce_rms_norm)
    monkeypatch.setattr("nanovllm.runner.model_runner.ModelRunner", Runner)
    with LLM(make_checkpoint(**model), device="cpu", max_model_len=128, kvcache_block_size=16, num_kvcache_blocks=80,
             max_num_batched_tokens=120, max_num_seqs=16) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=3, logprobs=2, top_k=5, presence_penalty=0.1, prompt_logprobs=1)
        llm.generate([[i + 1] * 40 for i in range(16)], params, use_tqdm=False)
    (communicator,) = made
    limits = communicator._limits
    assert communicator.steps == communicator.prepared > 3
    assert limits.forward_calls(2) < communicator.most_calls < limits.calls_per_step(2)
