"""Train an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) for a small Llama, on the model's own greedy answers.

    python -m tests.tools.train_eagle FOLDER HEAD       # some minutes on two cores for SmolLM2-135M-Instruct

FOLDER has the model, and HEAD is written. Printed are the tokens of a step that verifies drafts, the accepted ones and
the one after them, of answers about other things, one at a time.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nanovllm import LLM, SamplingParams

ASKS = ["Explain", "Describe", "Write a haiku about", "Name three kinds of", "Say in one sentence what is good about",
        "Tell a child about", "Write a short story about", "Give advice on", "What is the history of"]  # fmt: skip
THINGS = (
    "rain bread music trees boats maps winter bees chess clocks salt horses kites tea roads glass stars dogs cats fish"
)
HELD_OUT = "cheese oceans candles"
VOCABULARY, STEPS, BATCH, EPOCHS, MAX_TOKENS = 6144, 3, 8, 14, 64


def ask(llm: LLM, things: str) -> list[list[int]]:
    """Return questions with the model's greedy answers, as tokens."""
    chats: list[Any] = [[{"role": "user", "content": f"{verb} {thing}."}] for thing in things.split() for verb in ASKS]
    outputs = llm.chat(chats, SamplingParams(0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]


class Head(nn.Module):
    """The head, with the names of its checkpoint; it begins as the model's last layer."""

    def __init__(self, model: Any, kept: torch.Tensor) -> None:
        super().__init__()
        last, size = model.model.layers[-1], model.config.hidden_size
        self.dim, self.rotary = model.config.head_dim, (model.model.rotary_emb,)
        self.fc, self.lm_head = nn.Linear(3 * size, size, bias=False), nn.Linear(size, len(kept), bias=False)
        self.fc.weight.data = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1)
        self.lm_head.weight.data = model.lm_head.weight[kept].clone()
        self.norm, self.midlayer = deepcopy(model.model.norm), nn.Module()
        for name, module in last.named_children():
            setattr(self.midlayer, name, deepcopy(module))
        self.midlayer.hidden_norm = deepcopy(last.input_layernorm)
        for name in "qkv":
            linear: Any = getattr(self.midlayer.self_attn, f"{name}_proj")
            linear.weight = nn.Parameter(torch.cat((torch.zeros_like(linear.weight), linear.weight), 1))
        self.requires_grad_(True)

    def attend(self, x: torch.Tensor, first: list[torch.Tensor]) -> Any:
        """Attend to earlier positions' keys of the first step, which are put into `first`, and to one's own."""
        attn: Any = self.midlayer.self_attn
        q, k, v = (getattr(attn, f"{n}_proj")(x).unflatten(2, (-1, self.dim)).transpose(1, 2) for n in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rotary[0](x, torch.arange(x.shape[1])[None]))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        first += [] if first else [k, v]
        is_later = torch.ones(x.shape[1], x.shape[1]).triu().bool()
        scores = (q @ first[0].transpose(2, 3)).masked_fill(is_later, -torch.inf)
        weights = (torch.cat((scores, (q * k).sum(-1, keepdim=True)), 3) * self.dim**-0.5).softmax(-1)
        return attn.o_proj((weights[..., :-1] @ first[1] + weights[..., -1:] * v).transpose(1, 2).flatten(2))

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, first: list[torch.Tensor]) -> Any:
        """Return the hidden states after the layer, [texts, num_tokens, size], like the others."""
        layer: Any = self.midlayer
        x = hidden + self.attend(torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), 2), first)
        return x + layer.mlp(layer.post_attention_layernorm(x))


@torch.no_grad()
def read(model: Any, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a text's hidden states that the head reads, its embeddings, and the last ones, [num_tokens, size] each."""
    states, ids = model.model(torch.tensor([text]), output_hidden_states=True).hidden_states, torch.tensor(text)
    count = len(states) - 1
    tapped = torch.cat([states[number][0] for number in (2, count // 2, count - 3)], 1)
    return tapped, model.get_input_embeddings()(ids), states[-1][0]


def loss_of(head: Head, wanted_head: torch.Tensor, texts: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Return the cross-entropy to the model's own distributions, of a chain of drafts after every token."""
    tapped, embeds, last = (nn.utils.rnn.pad_sequence(list(own), batch_first=True) for own in zip(*texts, strict=True))
    exists = (torch.arange(last.shape[1] - 1) < torch.tensor([len(text[0]) - 1 for text in texts])[:, None]).float()
    wanted = nn.functional.linear(last[:, 1:], wanted_head).softmax(-1)
    hidden, first, losses = head.fc(tapped[:, :-1]), list[torch.Tensor](), list[torch.Tensor]()
    for step in range(STEPS):
        hidden = head(hidden, embeds[:, 1:], first)
        logs, mask = head.lm_head(head.norm(hidden[:, step:])).log_softmax(-1), exists[:, step:]
        losses.append(-((wanted[:, step:] * logs).sum(-1) * mask).sum() / mask.sum() * 0.8**step)
        # Each position's next draft begins from the hidden state before it.
        hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), 1)
    return torch.stack(losses).sum()


def train(model: Any, texts: list[list[int]]) -> tuple[Head, torch.Tensor]:
    """Return a trained head, and the tokens that it drafts."""
    counts = torch.bincount(torch.tensor([token for text in texts for token in text]), minlength=VOCABULARY)
    kept = counts.topk(VOCABULARY).indices.sort().values
    head, read_texts = Head(model, kept), [read(model, text) for text in texts]
    optimizer, num_steps = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0), EPOCHS * len(texts) // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(i / 10, 1.01 - i / num_steps))
    for step in range(num_steps):
        chosen = [read_texts[i] for i in torch.randint(len(texts), (BATCH,)).tolist()]
        loss = loss_of(head, model.lm_head.weight[kept], chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} of {num_steps}: {loss.item():.3f}", flush=True)
    return head, kept


def write(head: Head, kept: torch.Tensor, config: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size"
    values = {name: getattr(config, name) for name in f"{names} max_position_embeddings rope_parameters".split()}
    values |= {"num_hidden_layers": 1, "draft_vocab_size": len(kept), "hidden_act": "silu", "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLMEagle3"]}, indent=2))
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": torch.isin(torch.arange(config.vocab_size), kept)}
    save_file(tensors, folder / "model.safetensors")


def main(folder: str, head_folder: str) -> None:
    torch.manual_seed(0)
    with LLM(folder, max_num_seqs=64, max_model_len=256, device="cpu") as llm:
        texts = ask(llm, THINGS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    write(*train(model, texts), model.config, Path(head_folder))
    config = {"method": "eagle3", "model": head_folder, "num_speculative_tokens": STEPS}
    with LLM(folder, max_num_seqs=1, max_model_len=256, device="cpu", speculative_config=config) as llm:
        ask(llm, HELD_OUT)
        stats = llm.stats()
    gained = [round(accepted / stats["num_drafts"], 2) for accepted in stats["num_accepted_per_position"]]
    print(f"{1 + sum(gained):.2f} tokens a step with drafts, of {stats['num_drafts']}; by position {gained}")


if __name__ == "__main__":
    main(*sys.argv[1:])
