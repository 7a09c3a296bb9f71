"""Tiny random models of every causal LM in transformers' mapping, over the paged cache, against `generate`.

`python -m tests.tools.sweep_models [MODEL_TYPE ...]` prints a row for each; `--write` writes the table in
`nanovllm/models/README.md`. Each model completes prompts in a batch, in chunks, preempted and with prefix hits: its
greedy tokens must be the likeliest of a forward pass, and its log-probabilities the pass's. Windows are shorter than
prompts.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from nanovllm import LLM, SamplingParams
from nanovllm.configs.model import MODELS

TABLE = Path(__file__).parents[2] / "nanovllm" / "models" / "README.md"
CAUSAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WRAPPERS = ("gemma3", "gemma4", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose text half runs; there are more."""
VOCAB, NUM_LAYERS, NUM_NEW, FEW_BLOCKS = 320, 4, 10, 7
LENGTHS = (1, 2, 15, 16, 17, 33, 60, 90)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 64, "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "n_inner": 96, "ffn_hidden_size": 96,
    "mlp_intermediate_size": 96,
    "dense_intermediate_size": 96, "hidden_size_mlp": 96, "intermediate_size_mlp": 96, "shared_intermediate_size": 32,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "moe_ffn_hidden_size": 32, "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "d_kv": 16, "v_head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16, "rotary_dim": 16, "query_pre_attn_scalar": 16, "num_kv_shared_layers": 0, "mup_base": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "dense_layers": 1, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 512, "max_position_embeddings": 512, "max_seq_len": 512, "n_positions": 512, "sliding_window": 12,
    "attention_chunk_size": 16, "max_window_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "layernorm_epsilon": 1e-5, "initializer_range": 0.2,
}  # fmt: skip
MADE_ALWAYS = {
    "pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "num_experts_per_tok", "n_routed_experts",
    "n_shared_experts", "num_key_value_heads",
}  # fmt: skip
"""Fields that are set where the family's default is None, too."""
HYBRID = [*["sliding_attention"] * 3, "full_attention"]
ALTERNATING = ["sliding_attention", "full_attention"] * 2
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": NUM_LAYERS},
    "deepseek_v2": {"topk_method": "greedy", "num_key_value_heads": 4},
    "falcon": {"new_decoder_architecture": True, "alibi": False, "num_kv_heads": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "gemma2": {"layer_types": ALTERNATING},
    "gemma4_text": {"layer_types": HYBRID, "enable_moe_block": False},
    "gpt_bigcode": {"n_embd": 64},
    "gpt_neo": {"num_layers": NUM_LAYERS, "attention_types": [[["global", "local"], 2]], "window_size": 12},
    "gpt_oss": {"layer_types": ALTERNATING},
    "granitemoehybrid": {"layer_types": ["attention"] * NUM_LAYERS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * NUM_LAYERS},
    "phi3": {"rope_scaling": None, "original_max_position_embeddings": 512, "sliding_window": None},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "num_hidden_layers": 1, "embed_dim": 32,
    "num_attention_heads": 2, "out_hidden_size": 64, "image_size": 32, "patch_size": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}  # fmt: skip


@dataclass
class Result:
    """The result for a family.

    Attributes:
        verdict: "equal", "wrong", "refused", "error" (ours), or "not made": this script makes no tiny model of it.
        cause: of a refusal or an error.
        num_equal: prompts whose tokens are the likeliest: preempted, at first, and out of the cache.
        num_distinct: different tokens in the answers; a model that repeats one is right by chance.
        difference: the largest one of log-probabilities.
        num_preemptions, num_cached_tokens: that the engine has counted.
    """

    verdict: str
    cause: str = ""
    num_equal: tuple[int, ...] = ()
    num_distinct: int = 0
    difference: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0


def class_of(model_type: str) -> Any:
    """Return the class of a family."""
    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if model_type in WRAPPERS else CAUSAL
    return getattr(transformers, names[model_type])


def tiny_text(config_class: Any, special: dict[str, Any]) -> Any:
    """Return a small config of a decoder; `special` is what the family wants in it."""
    default = config_class()
    values, names = default.to_dict(), default.attribute_map
    values |= {usual: values.get(name) for usual, name in names.items()}
    changes = {k: v for k, v in SIZES.items() if k in values and (values[k] is not None or k in MADE_ALWAYS)}
    kinds = values.get("layer_types")
    if kinds:
        is_hybrid = {"sliding_attention", "full_attention"} <= set(kinds)
        changes["layer_types"] = HYBRID if is_hybrid else [*kinds[:3], kinds[-1]]
    if "qk_rope_head_dim" in values:
        changes |= {"head_dim": 8, "num_key_value_heads": 4, "qk_head_dim": 24}
    if kinds := values.get("mlp_layer_types"):
        changes["mlp_layer_types"] = ["dense" if "dense" in kinds else "sparse", *["sparse"] * 3]
    changes |= special
    dropped = (
        (),
        ("global_head_dim",),
        ("layer_types",),
        ("layer_types", "mlp_layer_types"),
        ("head_dim", "qk_head_dim"),
    )
    for names_left_out in dropped:
        try:
            return config_class(**{k: v for k, v in changes.items() if k not in names_left_out})
        except Exception as error:  # each family has its own checks of these
            failure = error
    raise failure


def tiny_config(model_type: str) -> Any:
    """Return a small config of a family; of a wrapper with an even smaller tower."""
    default = CONFIG_MAPPING[model_type]()
    text, special = default.get_text_config(), SPECIAL.get(model_type, {})
    if text is default or class_of(model_type).config_class is type(text):
        return tiny_text(type(text), special)
    if model_type.startswith("qwen"):
        interleaved = {"mrope_interleaved": True} if model_type == "qwen3_vl" else {}
        special = {"rope_parameters": MROPE | interleaved}
    text = tiny_text(type(text), SPECIAL.get(text.model_type, {}) | special)
    towers = {}
    if getattr(default, "vision_config", None) is not None:
        tower = type(default.vision_config)
        values = {key: value for key, value in VISION.items() if key in tower().to_dict()}
        towers["vision_config"] = tower(**values).to_dict()
    return CONFIG_MAPPING[model_type](text_config=text.to_dict(), **towers)


def make_model(model_type: str, config: Any) -> Any:
    """Make a random model whose answers vary: neither norms of ones, nor biases of zeros."""
    torch.manual_seed(0)
    model = class_of(model_type)(config).eval().float()
    for name, param in model.named_parameters():
        if "norm" in name or name.endswith("bias") or "sink" in name:
            is_factor = "norm" in name and not name.endswith("bias")
            torch.nn.init.normal_(param, mean=float(is_factor), std=0.2)
        elif param.dim() >= 2:
            is_embedding = "embed" in name or "wte" in name
            torch.nn.init.normal_(param, std=0.3 if is_embedding else 1.2 / param.shape[-1] ** 0.5)
    return model


def prompts() -> list[list[int]]:
    """Random tokens; one prompt begins as another does."""
    generator = torch.Generator().manual_seed(0)
    made: list[list[int]] = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    made[-2] = made[-1][:40] + made[-2][:20]
    return made


@torch.inference_mode()
def complete(model: Any, prompt: list[int]) -> list[int]:
    """Return what `generate` adds to a prompt."""
    ids, options = torch.tensor([prompt]), {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def make_llm(folder: str | Path, **settings: Any) -> LLM:
    """An engine of little room on transformers' code."""
    defaults: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "model_impl": "transformers"}
    sizes = {"max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 80, "device": "cpu"}
    return LLM(folder, **(defaults | sizes | settings))


@torch.inference_mode()
def compare(folder: str | Path, reference: Any, tight: LLM | None = None) -> Result:
    """Compare the engine on a folder, and one of few blocks, with a model of transformers."""
    batch, greedy = prompts(), SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    result, distinct = Result("wrong"), set[int]()

    def num_equal(llm: LLM) -> int:
        outputs = llm.generate(batch, greedy, use_tqdm=False)
        result.num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        answers = [output["token_ids"] for output in outputs]
        distinct.update(token for tokens in answers for token in tokens)
        return sum(is_greedy(reference, prompt, tokens) for prompt, tokens in zip(batch, answers, strict=True))

    with tight or make_llm(folder, num_kvcache_blocks=FEW_BLOCKS) as llm:
        result.num_equal = (num_equal(llm),)
        result.num_preemptions = llm.stats()["num_preemptions"]
    with make_llm(folder) as llm:
        result.num_equal += num_equal(llm), num_equal(llm)
        scored = llm.generate([batch[-1]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    result.num_distinct = len(distinct)
    logprobs = reference(torch.tensor([batch[-1]]), use_cache=False).logits[0].float().log_softmax(-1)
    for position, at in enumerate(scored.prompt_logprobs or []):
        if at is not None:
            token = batch[-1][position]
            difference = abs(at[token].logprob - logprobs[position - 1, token].item())
            result.difference = max(result.difference, difference)
    if min(result.num_equal) == len(batch) and result.difference < 1e-4:
        result.verdict = "equal"
    return result


def is_greedy(reference: Any, prompt: list[int], token_ids: list[int]) -> bool:
    """Return whether each token of an answer is the likeliest after the text before it."""
    logits = reference(torch.tensor([[*prompt, *token_ids[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == token_ids)


def run(model_type: str) -> Result:
    """Make a tiny model of a family, and compare it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = make_model(model_type, tiny_config(model_type))
            model.save_pretrained(folder)
        except Exception as error:  # whatever a family's own code finds wrong with these sizes
            return Result("not made", f"{type(error).__name__}: {error}")
        try:
            tight = make_llm(folder, num_kvcache_blocks=FEW_BLOCKS)
        except ValueError as error:
            return Result("refused", str(error))
        except Exception as error:
            return Result("error", f"{type(error).__name__}: {error}")
        try:
            reference = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            return compare(folder, reference.eval(), tight)
        except Exception as error:
            return Result("error", f"{type(error).__name__}: {error}")


def table(results: dict[str, Result]) -> str:
    """Return the page of families: what runs, and what is refused and why."""
    names = CAUSAL | {name: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in WRAPPERS}
    equal = sorted({names[name] for name, result in results.items() if result.verdict == "equal"} - set(MODELS))
    refused: dict[str, list[str]] = {}
    for name, result in results.items():
        if result.verdict == "refused":
            cause = result.cause.removeprefix(f"{names[name]} cannot run over a paged KV cache: ")
            cause = re.sub(r"^\w+ForCausalLM has", "it has", re.sub(r"\b\w+Attention\w*(?= )", "a layer", cause))
            cause = re.sub(
                r"^\d+ of \d+ layers attend", "not all layers attend, or not by transformers' interface", cause
            )
            refused.setdefault(cause, []).append(names[name])
    causes = sorted((cause, sorted(set(members) - {*equal, *MODELS})) for cause, members in refused.items())
    not_made = sorted({names[name] for name, result in results.items() if result.verdict == "not made"} - set(equal))
    return "\n".join(
        [
            "# Families",
            "",
            "[Index of pages](../README.md). Here: which architectures run, by whose code, and which are refused.",
            "",
            "Written by `python -m tests.tools.sweep_models --write` with transformers "
            f"{transformers.__version__}, on tiny",
            "random models: greedy tokens equal transformers' `generate`, log-probabilities within 1e-4.",
            "",
            "| by | architectures |",
            "|---|---|",
            f'| this library\'s code (`model_impl="native"`) | {", ".join(MODELS)} |',
            f"| transformers' code, {len(equal)} more | {', '.join(equal)} |",
            "",
            "| refused, since | architectures |",
            "|---|---|",
            *(f"| {cause.splitlines()[0]} | {', '.join(members)} |" for cause, members in causes if members),
            "",
            f"Not tried, since the script makes no tiny model of them: {', '.join(not_made)}.",
            "",
        ]
    )


def main() -> None:
    """Run the families that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} beside the models")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)

    def give_up(*_: object) -> None:
        raise TimeoutError("took over a minute")

    signal.signal(signal.SIGALRM, give_up)
    results = {}
    for name in arguments.model_types or sorted({*CAUSAL, *WRAPPERS}):
        signal.alarm(60)
        result = results[name] = run(name)
        signal.alarm(0)
        sys.stdout.write(f"{name:28} {result}\n")
        sys.stdout.flush()
    counts = {
        verdict: sum(r.verdict == verdict for r in results.values())
        for verdict in ("equal", "refused", "wrong", "error", "not made")
    }
    sys.stdout.write(f"{counts}\n")
    if arguments.write:
        TABLE.write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
