"""Compares throughput with the machine's physical limit: `nanovllm bench [--workload all] [--shape 8B]`.

On a GPU it uses random weights of a published shape of Qwen3, Qwen3.5 or gpt-oss; without one, the bundled checkpoint
and less work. Each workload runs a warm-up round and two rounds with new prompts, and the better one counts; `square`,
which takes minutes and is not part of `all`, runs once. The floor is the minimum time at the read bandwidth and matmul
rate measured in the same run: for each decode step the longer of reading the weights and computing the products, plus
reading the live keys and values, and reading and writing the states; then the arithmetic of the prefill. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.attention.kv_cache_spec import StateLayout
from nanovllm.cli import IMPORT_STARTED
from nanovllm.config import Config
from nanovllm.configs.model import ModelConfig
from nanovllm.llm import LLM
from nanovllm.models import make_model
from nanovllm.parallel.communicator import Communicator
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.flags import CommandParser, add_flags, flag_values, user_errors

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED
ROUNDS = 2
ON_GPU = torch.cuda.is_available()


def sizes(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int,
    *, ties: bool = False, experts: tuple[int, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what the shapes of Qwen3 and Qwen3.5 have in common.

    `ties`: embedding and head; `experts`: their number and each token's; `intermediate_size` is one expert's then.
    """
    config = {
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "tie_word_embeddings": ties,
        "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if experts is not None:
        config["num_experts"], config["num_experts_per_tok"] = experts
        config["moe_intermediate_size"] = intermediate_size
    return config


def qwen3_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a shape of Qwen3."""
    is_mixture = "num_experts" in config
    return config | {
        "architectures": ["Qwen3MoeForCausalLM" if is_mixture else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if is_mixture else "qwen3", "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "norm_topk_prob": True,
    }  # fmt: skip


def qwen35_config(config: dict[str, Any], value_heads: int) -> dict[str, Any]:
    """Return the config.json of a shape of Qwen3.5's text models, with the number of its delta nets' value heads."""
    is_mixture = "num_experts" in config
    return config | {
        "architectures": ["Qwen3_5MoeForCausalLM" if is_mixture else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if is_mixture else "qwen3_5_text", "head_dim": 256, "vocab_size": 248320,
        "max_position_embeddings": 262144, "shared_expert_intermediate_size": config["intermediate_size"],
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (config["num_hidden_layers"] // 4),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip


def gpt_oss_config(layers: int, num_experts: int) -> dict[str, Any]:
    """Return the config.json of a shape of gpt-oss, whose experts are in MXFP4."""
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_local_experts": num_experts, "num_experts_per_tok": 4, "tie_word_embeddings": False, "vocab_size": 201088,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000.0, "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


SHAPES = {
    "0.6B": qwen3_config(sizes(1024, 3072, 28, 16, 8, ties=True)),
    "1.7B": qwen3_config(sizes(2048, 6144, 28, 16, 8, ties=True)),
    "4B": qwen3_config(sizes(2560, 9728, 36, 32, 8, ties=True)),
    "8B": qwen3_config(sizes(4096, 12288, 36, 32, 8)),
    "14B": qwen3_config(sizes(5120, 17408, 40, 40, 8)),
    "32B": qwen3_config(sizes(5120, 25600, 64, 64, 8)),
    "30B-A3B": qwen3_config(sizes(2048, 768, 48, 32, 4, experts=(128, 8))),
    "3.5-4B": qwen35_config(sizes(2560, 9216, 32, 16, 4, ties=True), 32),
    "3.5-27B": qwen35_config(sizes(5120, 17408, 64, 24, 4), 48),
    "3.5-35B-A3B": qwen35_config(sizes(2048, 512, 40, 16, 2, experts=(256, 8)), 32),
    "gpt-oss-20b": gpt_oss_config(24, 32),
    "gpt-oss-120b": gpt_oss_config(36, 128),
}
"""The config.json of published shapes."""
WORKLOADS = ("bench", "single", "eight", "prefill", "shared", "many")
LONG_WORKLOAD, LONG_NUM_SEQS = "square", 1024
"""A workload that takes minutes, and the `max_num_seqs` for it."""


@dataclass
class Workload:
    """Prompts with their output lengths; all prompts share the first `shared_prefix` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    shared_prefix: int = 0


def make_workload(name: str, seed: str, llm: LLM) -> Workload:
    """Draw a workload; without a GPU it has fewer and shorter requests."""
    rng, vocab_size, scale = Random(f"{name} {seed}"), llm.model_config.vocab_size, 1 if ON_GPU else 1 / 16

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def size(count: int) -> int:
        return max(1, round(count * scale))

    if name == "bench":
        lens = bench_lens(size(256), size(100), size(1024))
    elif name in ("single", "eight"):
        lens = [(size(128), size(512))] * (1 if name == "single" else 8)
    elif name == "prefill":
        lens = [(size(2048), 8)] * size(256)
    elif name == LONG_WORKLOAD:
        lens = [(size(1000), size(1000))] * size(3000)
    elif name == "shared":
        lens = [(size(64), size(64))] * size(512)
    else:
        lens = [(rng.randint(size(64), size(256)), rng.randint(size(64), size(256))) for _ in range(size(2048))]
    prefix = tokens(size(1024)) if name == "shared" else []
    return Workload(name, [prefix + tokens(n) for n, _ in lens], [n for _, n in lens], len(prefix))


def bench_lens(count: int, low: int, high: int) -> list[tuple[int, int]]:
    """Return the lengths of nano-vLLM's benchmark (its seed and order of draws), the same in every round."""
    rng, prompt_lens = Random(0), []
    for _ in range(count):
        prompt_lens.append(rng.randint(low, high))
        for _ in range(prompt_lens[-1]):
            rng.randint(0, 10000)
    return [(n, rng.randint(low, high)) for n in prompt_lens]


def shape_folder(shape: str) -> str:
    """Write the config.json of a published shape to a temporary folder, which is not removed."""
    folder = Path(tempfile.mkdtemp(prefix=f"qwen3-{shape}-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return str(folder)


@dataclass
class Ceilings:
    """Measured limits of the machine: read bandwidth in bytes/s, FLOP/s of a large product in the model's dtype."""

    read_bandwidth: float
    matmul_rate: float


@dataclass
class WeightCounts:
    """Weight counts of a model, and their bytes as stored on a GPU, scales included."""

    dense: int
    """Weights of all layers, without experts."""
    head: int
    expert: int
    """Weights of one expert per layer, summed over layers with experts."""
    num_experts: int
    top_k: int
    dense_bytes: float
    expert_bytes: float

    @classmethod
    def of(cls, config: ModelConfig) -> WeightCounts:
        """Count the weights of a model."""
        experts, head = config.experts, config.vocab_size * config.hidden_size
        with torch.device("meta"):
            model = make_model(config, Communicator())
        counts, sizes = {True: 0, False: 0}, {True: 0, False: 0}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.startswith(("model.embed_tokens", "lm_head")):
                is_expert, is_byte = ".experts." in name, tensor.itemsize == 1
                sizes[is_expert] += tensor.numel() * (1 if is_byte else 2)
                if isinstance(tensor, torch.nn.Parameter):
                    # A byte has two weights in four bits.
                    counts[is_expert] += tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1)
        num_experts, top_k = (1, 1) if experts is None else (experts.num_experts, experts.top_k)
        each = counts[True] // num_experts, sizes[True] / num_experts
        return cls(counts[False], head, each[0], num_experts, top_k, sizes[False], each[1])

    @property
    def of_row(self) -> int:
        """Return the layer weights that one row is multiplied by."""
        return self.dense + self.top_k * self.expert

    def bytes_read_by(self, num_rows: int) -> float:
        """Return the expected bytes of layers and a 16-bit head read for `num_rows`, with random experts."""
        num_chosen = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_rows)
        return self.dense_bytes + 2 * self.head + num_chosen * self.expert_bytes


def floor_seconds(work: Workload, llm: LLM, ceilings: Ceilings) -> float:
    """Return the minimum time of the work at the ceilings; see the module."""
    # Weights in float32 take twice the bytes.
    model, itemsize, widening = llm.model_config, 2 if ON_GPU else 4, 1 if ON_GPU else 2
    weights = WeightCounts.of(model)
    with torch.device("meta"):
        specs = [layer.state_spec(torch.bfloat16) for layer in make_model(model, Communicator()).state_layers]
    state_bytes = StateLayout.of(specs).num_bytes
    windows = [layer.window for layer in model.layers if layer.attends]
    heads_size = model.num_heads * model.head_dim
    kv_itemsize = 1 if llm.config.kv_cache_dtype == "fp8" else itemsize
    kv_bytes = 2 * model.num_kv_heads * model.head_dim * kv_itemsize

    def seen(context: int) -> int:
        """Return the tokens that the layers see, added up."""
        return sum(context if window is None else min(context, window) for window in windows)

    lens = [(len(prompt), work.shared_prefix if i else 0) for i, prompt in enumerate(work.prompts)]
    computed = sum(end - start for end, start in lens)

    def attended(count: int) -> float:
        """Return the tokens that each of the first `count` sees, up to itself, added up over these and the layers."""
        sizes = (count if window is None else min(count, window) for window in windows)
        return sum(size * (2 * count - size + 1) / 2 for size in sizes)

    num_attended = sum(attended(end) - attended(start) for end, start in lens)
    products = 2 * weights.of_row * computed + 2 * weights.head * len(lens)
    seconds = (products + 4 * heads_size * num_attended) / ceilings.matmul_rate

    # The prefill computes a request's first token; each decode step adds one to all live requests.
    waiting = [(len(p), n - 1) for p, n in zip(work.prompts, work.output_lens, strict=True) if n > 1][::-1]
    live: list[tuple[int, int]] = []
    while waiting or live:
        while waiting and len(live) < llm.config.max_num_running:
            live.append(waiting.pop())
        kv_tokens = sum(seen(context) - seen(work.shared_prefix) for context, _ in live) + seen(work.shared_prefix)
        weight_seconds = widening * weights.bytes_read_by(len(live)) / ceilings.read_bandwidth
        seconds += max(weight_seconds, 2 * (weights.of_row + weights.head) * len(live) / ceilings.matmul_rate)
        seconds += (kv_tokens * kv_bytes + 2 * len(live) * state_bytes) / ceilings.read_bandwidth
        live = [(context + 1, left - 1) for context, left in live if left > 1]
    # CPU ranks share one machine.
    return seconds / (llm.config.tensor_parallel_size if ON_GPU else 1)


def measure_ceilings() -> Ceilings:
    """Measure read bandwidth (of a sum) and matmul rate, the best of several tries, in the memory an engine leaves."""
    device, synchronize = ("cuda", torch.cuda.synchronize) if ON_GPU else ("cpu", lambda: None)
    num_bytes = min(2**32, torch.cuda.mem_get_info()[0] // 2) if ON_GPU else 2**30
    data = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    side, dtype = (8192, torch.bfloat16) if ON_GPU else (1024, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best(function: Callable[[], object]) -> float:
        def five_times() -> None:
            for _ in range(5):
                function()
            synchronize()

        return min(timeit.repeat(five_times, number=1, repeat=10)) / 5

    return Ceilings(data.numel() * 4 / best(data.sum), 2 * side**3 / best(lambda: a @ b))


@dataclass
class Result:
    """The better round of one workload."""

    workload: str
    gpus: int
    input_tokens: int
    output_tokens: int
    seconds: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    floor_seconds: float
    floor_share: float


def run(llm: LLM, work: Workload) -> float:
    """Return the seconds that a workload takes; exit the program on a wrong token count."""
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    started = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if [len(output["token_ids"]) for output in outputs] != work.output_lens:
        sys.exit(f"{work.name}: wrong token counts")
    return seconds


def measure(llm: LLM, name: str, ceilings: Ceilings) -> Result:
    """Print and return the better of a workload's rounds, after a warm-up; a workload of minutes has one round."""
    num_rounds = 1 if name == LONG_WORKLOAD else ROUNDS
    results, gpus = list[Result](), llm.config.tensor_parallel_size
    if num_rounds > 1:
        run(llm, make_workload(name, "warm-up", llm))
    for number in range(num_rounds):
        work = make_workload(name, str(number), llm)
        seconds, floor = run(llm, work), floor_seconds(work, llm, ceilings)
        inputs, outputs = sum(map(len, work.prompts)), sum(work.output_lens)
        rates = inputs / seconds, outputs / seconds
        results.append(Result(name, gpus, inputs, outputs, seconds, rates[0], rates[1], floor, floor / seconds))
    r = max(results, key=lambda result: result.floor_share)
    counts = f"{r.workload:9} {r.gpus:4d} {r.input_tokens:8d} {r.output_tokens:8d} {r.seconds:8.3f}"
    shown = f"{r.input_tokens_per_second:9.0f} {r.output_tokens_per_second:9.0f}"
    print(f"{counts} {shown} {r.floor_seconds:8.3f} {r.floor_share:5.1%}", flush=True)
    return r


def make_llm(shape: str, workload: str, settings: Mapping[str, Any]) -> LLM:
    """Construct the engine, generate a first token, and print how long that took.

    `settings` of `LLM`; without a `model` it has random weights of the shape.
    """
    started = time.perf_counter()
    defaults: dict[str, Any] = {}
    if "model" not in settings:
        defaults = {"model": shape_folder(shape), "load_format": "dummy"}
    if workload == LONG_WORKLOAD:
        defaults["max_num_seqs"] = LONG_NUM_SEQS
    llm = LLM(**{**defaults, **settings})
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    print(f"imports {IMPORT_SECONDS:.2f} s, from LLM(...) to the first token {time.perf_counter() - started:.2f} s")
    return llm


def profile(llm: LLM, work: Workload, file: str) -> None:
    """Write a trace of one round for Perfetto or chrome://tracing."""
    with torch.profiler.profile() as trace:
        run(llm, work)
    trace.export_chrome_trace(file)
    print(trace.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=60))


def plot(results: list[Result], title: str, file: str) -> None:
    """Draw each workload's throughput as a share of its maximum by the floor."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 0.6 * len(results) + 1.6), layout="constrained")
    names = [r.workload for r in results]
    axes.barh(names, [100.0] * len(results), color="#e4e4e4", label="floor")
    bars = axes.barh(names, [100 * r.floor_share for r in results], color="#3b6fb6", label="measured")
    labels = [f"{r.output_tokens_per_second:,.0f} out, {r.input_tokens_per_second:,.0f} in" for r in results]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="share of the floor's throughput, % (tokens/s beside the bars)", title=title, xlim=(0, 130))
    figure.savefig(file, dpi=150)


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser("nanovllm bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="bench", choices=[*WORKLOADS, LONG_WORKLOAD, "all"])
    parser.add_argument(
        "--shape", default="0.6B", choices=SHAPES,
        help="a published shape with random weights, unless there is a model",
    )  # fmt: skip
    parser.add_argument("--profile", metavar="FILE.json", help="also write a trace of one more round")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")
    add_flags(parser, Config, "engine", seed=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the machine, run the workloads of a command line, print the table and the JSON."""
    parser = make_parser()
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    settings = ({} if ON_GPU else {"model": BUNDLED_MODEL}) | flag_values(options, Config)
    names = WORKLOADS if options.workload == "all" else (options.workload,)
    shape = options.shape if options.shape.startswith("gpt-oss") else f"Qwen3-{options.shape}"
    model_name = settings.get("model", f"{shape} (random weights)")
    # Before CUDA is initialised, since an engine's start depends on that.
    with user_errors(parser):
        llm = make_llm(options.shape, options.workload, settings)
    with llm:
        ceilings = measure_ceilings()
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
        print(f"{model_name} on {name}, torch {torch.__version__}")
        print(f"read {ceilings.read_bandwidth / 1e12:.3f} TB/s, matmul {ceilings.matmul_rate / 1e12:.2f} TFLOP/s")
        print("workload  GPUs    input   output  seconds  in tok/s out tok/s  floor s")
        results = [measure(llm, workload, ceilings) for workload in names]
        if options.profile:
            profile(llm, make_workload(names[0], "profile", llm), options.profile)
    if options.plot:
        plot(results, f"{model_name}, {name}", options.plot)
    summary = {"model": model_name, "device": name, "torch": torch.__version__, **asdict(ceilings)}
    print(json.dumps(summary | {"import_seconds": IMPORT_SECONDS, "results": [asdict(r) for r in results]}))
