"""The bundled checkpoint's files: its shape, its tokenizer, and how both are written in the Hub's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from tests.tools.training.corpus import CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL_TOKENS, START

VOCAB_SIZE = 512
MAX_LENGTH = 4096
ROPE_THETA = 10000.0
# A digit stands alone, and punctuation takes the space after it, so that ", " between two numbers is one token.
PIECES = r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+ ?|\s+"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": MAX_LENGTH,
    # transformers before 5 reads the first of these, later ones read the second.
    "rope_theta": ROPE_THETA,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 6,
    "tie_word_embeddings": True,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` entries: any text survives it, seen in training or not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """What transformers needs to know beside tokenizer.json, the chat template included."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": [START],
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as the Hub's files have it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_checkpoint(folder: Path, model: nn.Module, tokenizer: Tokenizer) -> None:
    """Write the five files; by hand, as their form would otherwise follow the release of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    end, end_of_text = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end_of_text}
    write_json(folder / "config.json", CONFIG | ids)
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [end, end_of_text], "pad_token_id": end_of_text},
    )
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    (folder / "model.safetensors").write_bytes(serialize(weights, metadata={"format": "pt"}))
