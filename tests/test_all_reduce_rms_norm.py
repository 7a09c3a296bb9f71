"""Messages between ranks where no second GPU is needed, and who uses them. The rest: `tests/test_gpu_parallel.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from transformers import AutoConfig

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import all_reduce
from nanovllm.kernels.all_reduce import (
    SymmetricBuffer,
    all_reduce_argmax,
    fits,
    pack_candidates,
    unpack_tokens,
)
from nanovllm.kernels.linear.quantize_rows import Rounding, quantize_rows_ref
from nanovllm.kernels.rms_norm import Norm, rms_norm_ref
from nanovllm.parallel import symmetric_communicator as symmetric
from nanovllm.parallel.distributed_communicator import open_store
from nanovllm.parallel.symmetric_communicator import StepLimits, SymmetricCommunicator, connect
from nanovllm.runner import model_runner, step_outputs
from nanovllm.runner.worker import step_limits
from tests import symmetric_buffer_ranks
from tests.call_number_ranks import CALLS, NUM_RANKS, Move, broadcast_tensor, part_of, run_rank
from tests.conftest import MakeCheckpoint
from tests.draft_heads import eagle3_tensors, write_eagle3
from tests.forked_python import CONTEXT
from tests.server_process import PATIENCE_SECONDS
from tests.test_kernels import DEVICE, DTYPES, GPU, check_error

# Each test starts several processes, on however few cores.


def all_reduce_rms_norm_ref(
    parts: list[torch.Tensor], norm: Norm, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `all_reduce_rms_norm`; `parts` are the x of all ranks."""
    total = torch.stack(parts).float().sum(0)
    if residual is not None:
        total += residual.float()
    return rms_norm_ref(total.to(parts[0].dtype), norm.weight, norm.eps)


def check_rounded(out: torch.Tensor, normed: torch.Tensor, rounding: Rounding) -> None:
    """Check rows against torch's; a few values, near a tie, may be rounded the other way."""
    want = symmetric_buffer_ranks.meant(quantize_rows_ref(normed, rounding)[0])[: len(normed)]
    different = (out - want).abs() > 0.01 * want.abs()
    assert different.sum() <= 1 + 0.03 * out.numel()
    torch.testing.assert_close(out, want, rtol=0.13, atol=0.01)


def check_step(results: list[Any], step: symmetric_buffer_ranks.Step) -> None:
    """Check all ranks' results of one step: the same bits everywhere, and as near to float32 as torch gets."""
    for i, case in enumerate(step.calls):
        wide = None if case.residual is None else case.residual.float()
        exact = all_reduce_rms_norm_ref([part.float() for part in case.parts], Norm(case.weight.float(), 1e-6), wide)
        same = all_reduce_rms_norm_ref(case.parts, Norm(case.weight, 1e-6), case.residual)
        if case.rounding is not None:
            check_rounded(results[0][i][0], same[0], case.rounding)
        for result in results:
            for out, first in zip(result[i], results[0][i], strict=True):
                assert torch.equal(out, first)
            is_rounded = [case.rounding is not None, False]
            for out, torchs, right, rounded in zip(result[i], same, exact, is_rounded, strict=True):
                if not rounded:
                    check_error(out, torchs, right)
    keys = pack_candidates(step.scores, step.tokens)
    for result in results:
        assert torch.equal(result[-1][0], unpack_tokens(keys.amax(0)))


@pytest.mark.skipif(GPU, reason="streams stand for the ranks where there is a GPU")
def test_ranks_that_share_memory(tmp_path: Path) -> None:
    # In float32 there are the calls of `test_words_of_old_calls_are_not_taken_for_new`.
    dtypes = list(DTYPES[1:])
    memory = torch.zeros(len(dtypes), symmetric_buffer_ranks.NUM_RANKS, 2**18, dtype=torch.uint8).share_memory_()
    abort = torch.zeros(1, dtype=torch.int32).share_memory_()
    processes = []
    for rank in range(symmetric_buffer_ranks.NUM_RANKS):
        args = rank, memory, abort, dtypes, str(tmp_path / f"{rank}")
        processes.append(CONTEXT.Process(target=symmetric_buffer_ranks.run_process, args=args, daemon=True))
        processes[-1].start()
    try:
        running = {process.sentinel: process for process in processes}
        while running:
            for sentinel in wait(running):
                process = running.pop(cast("int", sentinel))
                process.join()
                assert process.exitcode == 0
    finally:
        # The others of one that failed wait for it.
        abort.fill_(1)
    results = [torch.load(tmp_path / f"{rank}") for rank in range(symmetric_buffer_ranks.NUM_RANKS)]
    for i, step in enumerate([step for dtype in dtypes for step in symmetric_buffer_ranks.make_steps(dtype, "cpu")]):
        check_step([result[i] for result in results], step)


@pytest.mark.parametrize("op", ["one-shot", "two-shot", "argmax"])
def test_calls_that_follow_one_another_write_to_different_places(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.kernels.all_reduce.ABORT_CHECK_SPINS", 1)
    memory = torch.zeros(symmetric_buffer_ranks.NUM_RANKS, 2**18, dtype=torch.uint8, device=DEVICE)
    # Alone, and told not to wait.
    abort = torch.ones(1, dtype=torch.int32, pin_memory=GPU)
    buffer = symmetric_buffer_ranks.make_buffer(0, memory, abort)
    rows, weight = (
        torch.ones(4, symmetric_buffer_ranks.SIZE, device=DEVICE),
        torch.ones(symmetric_buffer_ranks.SIZE, device=DEVICE),
    )
    scores, tokens = torch.ones(5, device=DEVICE), torch.ones(5, dtype=torch.int64, device=DEVICE)
    places = []
    for _ in range(3):
        buffer.step.add_(1)
        for call in range(1 if op == "argmax" else 3):
            memory.zero_()
            if op == "argmax":
                all_reduce_argmax(scores, tokens, buffer, 0)
            else:
                case = symmetric_buffer_ranks.Case(op == "one-shot", [rows], None, weight)
                symmetric_buffer_ranks.reduce(case, rows, buffer, call)
            places.append(set(memory[1].nonzero().flatten().tolist()))
    assert all(places)
    for now, following in pairwise(places):
        assert not now & following
    for now, later in zip(places, places[2:], strict=False):
        assert now & later, "two halves take turns"


def make_buffer(**sizes: int) -> SymmetricBuffer:
    none = torch.zeros(1)
    return SymmetricBuffer(0, 2, addresses=none, step=none, calls_per_step=1, abort=none, max_candidates=1, **sizes)


def test_what_fits_into_the_buffer() -> None:
    buffer = make_buffer(word_bytes=256, row_bytes=1024, max_rows=20)
    assert fits(torch.zeros(8, 16, dtype=torch.bfloat16), buffer, True) and fits(torch.zeros(4, 16), buffer, True)
    assert not fits(torch.zeros(9, 16, dtype=torch.bfloat16), buffer, True)
    assert not fits(torch.zeros(1, 15, dtype=torch.bfloat16), buffer, True)
    assert fits(torch.zeros(14, 16), buffer, False) and not fits(torch.zeros(15, 16), buffer, False)
    assert fits(torch.zeros(20, 15, dtype=torch.bfloat16), buffer, False)
    assert not fits(torch.zeros(21, 4), buffer, False)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_go_in_an_odd_number_of_calls_that_fit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = SymmetricCommunicator.__new__(SymmetricCommunicator)
    communicator.size, communicator._end_call = size, 99
    buffer = make_buffer(word_bytes=2**19, row_bytes=2**25, max_rows=4096)
    communicator._buffer = buffer
    forms = set()

    def all_reduce_rms_norm(x: torch.Tensor, norm: Norm, residual: Any, *args: Any) -> None:
        _, call, one_shot, (normed, total) = args
        assert call == communicator._call and fits(x, buffer, one_shot)
        assert one_shot or len(x) >= size
        forms.add(one_shot)
        total.copy_(x + residual)
        normed.copy_(2 * x)

    monkeypatch.setattr(symmetric, "all_reduce_rms_norm", all_reduce_rms_norm)
    for rows in (1, 2, 7, 8, 16, 64, 256, 4000, 4096, 4097, 16384):
        communicator._call = 0
        x = torch.arange(rows, dtype=torch.bfloat16).unsqueeze(1).expand(-1, 4096).contiguous()
        normed, total = communicator.all_reduce_rms_norm(x, Norm(x[0], 1e-6), x)
        assert isinstance(normed, torch.Tensor) and torch.equal(normed, 2 * x) and torch.equal(total, 2 * x)
        assert communicator._call % 2 == 1 and (communicator._call == 1) == (rows <= 4000)
    assert forms == {True, False}


@pytest.mark.parametrize("shape", [(1, 7), (3, 5000), (256, 76032)])
def test_logits_are_gathered_in_an_even_number_of_calls(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator = SymmetricCommunicator.__new__(SymmetricCommunicator)
    communicator.rank, communicator.size, communicator._forward_calls = 1, 2, 3
    communicator._buffer = replace(make_buffer(word_bytes=2**19, row_bytes=2**25, max_rows=4096), calls_per_step=99)
    calls = []

    def all_reduce_rms_norm(x: torch.Tensor, *args: Any) -> None:
        *_, call, _one_shot, (_, total) = args
        calls.append(call)
        total.copy_(x)

    monkeypatch.setattr(symmetric, "all_reduce_rms_norm", all_reduce_rms_norm)
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape).bfloat16()
    communicator.begin_sampling()
    gathered = communicator.all_gather_columns(x)
    assert torch.equal(gathered, torch.cat((torch.zeros_like(x), x), 1))
    # The forward pass ends with an even index, as its number of calls is odd; so must the step.
    assert calls[0] % 2 == 1 and calls[-1] % 2 == 0
    assert calls == list(range(calls[0], calls[-1] + 1))


@pytest.mark.parametrize(
    ("device", "reachable", "want"), [("cuda:1", True, "symmetric"), ("cuda:1", False, "plain"), ("cpu", True, "plain")]
)
def test_all_ranks_take_what_rank_0_chooses(
    device: str, reachable: bool, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def can_reach(a: int, b: int) -> bool:
        asked.append((a, b))
        return reachable

    monkeypatch.setattr(symmetric, "SymmetricCommunicator", lambda *args: ("symmetric", args))
    monkeypatch.setattr(symmetric, "DistributedCommunicator", lambda *args: ("plain", args))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_reach)
    monkeypatch.setattr(symmetric, "uses_triton", lambda device: device.type == "cuda")
    store: Any = HashStore()
    limits: Any = "of a step"
    first: Any = connect(0, 2, torch.device(device), store, limits)
    # Another rank's process might choose otherwise.
    reachable = not reachable
    second: Any = connect(1, 2, torch.device(device), store, limits)
    assert first[0] == second[0] == want
    assert second[1][:2] == (1, 2)
    assert set(asked) == (set() if device == "cpu" else {(1, 2), (2, 1)} if want == "symmetric" else {(1, 2)})
    unlimited: Any = connect(0, 2, torch.device(device), store, None)
    assert unlimited[0] == "plain"


def test_what_goes_to_another_gpu_needs_no_atomics() -> None:
    """GPUs behind PCIe map each other's memory, but many know no atomics there."""
    assert "tl.atomic" not in Path(all_reduce.__file__).read_text()


MANY = Move((8,) * CALLS)
# After the last number comes the first again.
MOVES = [MANY, MANY, Move((1,) * CALLS, is_last=True), Move((1, 16, 1, 8, 1)), MANY]


@pytest.mark.skipif(GPU, reason="kernels are compiled where there is a GPU, and run there alone")
def test_words_of_old_calls_are_not_taken_for_new(tmp_path: Path) -> None:
    store: TCPStore = open_store(NUM_RANKS)
    memory = torch.zeros(NUM_RANKS, 2**21, dtype=torch.uint8).share_memory_()
    processes: list[BaseProcess] = []
    files = [str(tmp_path / f"{rank}") for rank in range(NUM_RANKS)]
    for rank, file in enumerate(files):
        args = rank, store.port, memory, MOVES, file
        processes.append(CONTEXT.Process(target=run_rank, args=args, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    found = [iter(torch.load(file)) for file in files]
    for step, move in enumerate(MOVES):
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


def test_call_numbers_are_positive_and_consecutive() -> None:
    for num_reductions in (3, 4, 73):
        limits = StepLimits(num_reductions, max_candidates=1)
        calls, forward = limits.calls_per_step, limits.forward_calls
        assert calls % 2 == forward % 2 == num_reductions % 2 and forward < calls
        max_steps = replace(make_buffer(word_bytes=8, row_bytes=8, max_rows=1), calls_per_step=calls).max_steps
        last_number = max_steps * calls + calls - 1
        assert last_number < 2**31 <= last_number + calls
        assert max_steps > 16_000, "the buffers are cleared once in half a minute at most"


class Counting(SymmetricCommunicator):
    """One of two ranks that runs alone: checks indices, but sends nothing."""

    def __init__(self, limits: StepLimits) -> None:
        self.rank, self.size = 0, 2
        self._limits = limits
        self._call = self._end_call = self._choice = 0
        self.all_have_read = True
        self._forward_calls = limits.forward_calls
        self.prepared = self.steps = 0

    @property
    def _buffer(self) -> Any:  # type: ignore[override]
        return self

    @property
    def calls_per_step(self) -> int:
        return self._limits.calls_per_step

    @property
    def step(self) -> Any:
        return self

    def add_(self, value: int) -> None:
        self.steps += value

    def prepare_step(self) -> None:
        self.prepared += 1

    def begin_step(self) -> None:
        # Or a rank would overwrite the half that another one reads.
        assert self.all_have_read or self._call % 2 == self.calls_per_step % 2
        super().begin_step()

    def begin_sampling(self) -> None:
        # What follows takes the half of the buffer that the pass has not used last.
        assert self._call % 2 == self._forward_calls % 2
        super().begin_sampling()

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        self.all_have_read = True
        return token_ids

    def all_reduce_min(self, value: int) -> int:
        return value


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("model", [{}, {"architecture": "Olmo2", "pad_token_id": 0, "num_hidden_layers": 3}])
def test_calls_that_follow_one_another_take_turns_in_every_step(
    model: dict[str, Any], has_head: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With scored prompts, edited rows and log-probabilities, whose logits go in many parts; and with drafts."""
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
        *_, (normed, total) = args
        made[0].all_have_read = False
        total.copy_(x if residual is None else x + residual)
        normed.copy_(total)

    monkeypatch.setattr(symmetric, "all_reduce_rms_norm", all_reduce_rms_norm)
    monkeypatch.setattr("nanovllm.runner.model_runner.ModelRunner", Runner)
    folder, speculative_config = make_checkpoint(**model), None
    if has_head:
        shape = AutoConfig.from_pretrained(folder)
        shape.head_dim = getattr(shape, "head_dim", shape.hidden_size // shape.num_attention_heads)
        head = write_eagle3(tmp_path, shape, eagle3_tensors(shape, 100), eagle_aux_hidden_state_layer_ids=[0, 1, 1])
        speculative_config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 15}
    settings: dict[str, Any] = {"max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 80}
    with LLM(
        folder, device="cpu", max_num_seqs=16, max_num_batched_tokens=120, speculative_config=speculative_config,
        **settings,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=3, logprobs=2, top_k=5, presence_penalty=0.1, prompt_logprobs=1)
        llm.generate([[i + 1] * 40 for i in range(16)], params, use_tqdm=False)
        llm.generate([[i + 1] * 40 for i in range(3)], SamplingParams(0, max_tokens=9), use_tqdm=False)
        assert not has_head or llm.stats()["num_draft_tokens"] > 0
    (communicator,) = made
    assert communicator.steps == communicator.prepared > 3
