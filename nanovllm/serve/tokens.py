"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from nanovllm.serve.protocol import DetokenizeBody, TokenizeBody
from nanovllm.serve.service import Service


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Return the token ids of a text, or of messages by the chat template.

    Raises:
        ValueError: there are both or none, or they cannot be encoded.
    """
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("give either a prompt or messages")
    llm = service.llm.llm
    if body.messages is not None:
        token_ids = await service.render_chat(body.messages, add_generation_prompt=body.add_generation_prompt)
    else:
        encode = llm.input_processor.tokenize
        (token_ids,) = await service.llm.run_beside(encode, [body.prompt], body.add_special_tokens)
    answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": llm.llm_engine.limits.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = llm.tokenizer.convert_ids_to_tokens(token_ids)
    return answer


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Return the text of token ids.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    service.check_model(body.model)
    vocab_size = service.llm.llm.llm_engine.limits.vocab_size
    bad = next((token_id for token_id in body.tokens if token_id >= vocab_size), None)
    if bad is not None:
        raise ValueError(f"token id {bad} is outside the vocabulary, 0 ... {vocab_size - 1}")
    return {"prompt": await service.llm.run_beside(service.decode, body.tokens)}
