"""Small tokenizers that have one property of real ones each."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARK = "\u2581"
"""What SentencePiece writes for a space."""


def sentencepiece_tokenizer(*words: str, special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Any:
    """Return a tokenizer that decodes as Llama 2's: marks are spaces, and the first space of a text goes."""
    names = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", *words]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    made.pre_tokenizer = pre_tokenizers.Split(MARK, "merged_with_next")
    made.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[*special],
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer
