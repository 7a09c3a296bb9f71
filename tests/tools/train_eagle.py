"""Train an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) for a small Llama, on the model's own greedy answers.

    python -m tests.tools.train_eagle FOLDER HEAD       # some minutes on two cores for SmolLM2-135M-Instruct

FOLDER is the model, in float32; HEAD the folder to write, which `speculative_config={"method": "eagle3", "model": HEAD,
"num_speculative_tokens": 3}` loads. Questions about other things than those trained on are answered in the end, one by
one: printed are the tokens of a step that verifies drafts, the accepted ones and the one after them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from nanovllm import LLM, SamplingParams

ASKS = ["Explain", "Write a haiku about", "Name three kinds of", "Say in one sentence what is good about", "Describe",
        "Tell a child about", "Write a short story about", "Give advice on", "What is the history of", "Why do people like"]  # fmt: skip
THINGS = """rain bread music trees boats maps bridges winter bees chess rivers clocks gardens paper salt mountains horses
letters kites lamps tea coffee roads wheat glass stars dogs cats fish birds books trains milk apples wool iron gold fire
snow wind islands markets schools doctors cooking painting dancing sleep dreams money""".split()
HELD_OUT = "cheese bicycles oceans candles poetry hats volcanoes onions".split()
VOCABULARY, STEPS, BATCH = 6144, 3, 8


def ask(llm: LLM, things: list[str], max_tokens: int) -> list[list[int]]:
    """Return questions with the model's greedy answers, as tokens."""
    chats: list[Any] = [[{"role": "user", "content": f"{verb} {thing}."}] for thing in things for verb in ASKS]
    outputs = llm.chat(chats, SamplingParams(0, max_tokens=max_tokens), use_tqdm=False)
    return [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]


class Head(nn.Module):
    """The head, with the names of its checkpoint; it begins as the model's last layer."""

    def __init__(self, model: Any, kept: torch.Tensor) -> None:
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        size, dim = config.hidden_size, config.head_dim
        self.fc, self.lm_head = nn.Linear(3 * size, size, bias=False), nn.Linear(size, len(kept), bias=False)
        self.norm, self.midlayer = LlamaRMSNorm(size, config.rms_norm_eps), nn.Module()
        layer: Any = self.midlayer
        layer.self_attn, layer.mlp = nn.Module(), LlamaMLP(config)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, LlamaRMSNorm(size, config.rms_norm_eps))
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(last.self_attn, name).weight
            setattr(layer.self_attn, name, nn.Linear(2 * size, len(old), bias=False))
            getattr(layer.self_attn, name).weight.data = torch.cat((torch.zeros_like(old), old), 1)
        layer.self_attn.o_proj = nn.Linear(size, size, bias=False)
        layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        layer.mlp.load_state_dict(last.mlp.state_dict())
        layer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        self.norm.load_state_dict(model.model.norm.state_dict())
        self.lm_head.weight.data = model.lm_head.weight[kept].clone()
        self.fc.weight.data = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1)
        self.dim, self.rotary = dim, (model.model.rotary_emb,)

    def attend(self, x: torch.Tensor, first: list[torch.Tensor]) -> torch.Tensor:
        """Attend to earlier positions' keys of the first step, which are put into `first`, and to one's own."""
        attn: Any = self.midlayer.self_attn
        q, k, v = (
            getattr(attn, n)(x).unflatten(2, (-1, self.dim)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj")
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary[0](x, torch.arange(x.shape[1])[None]))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        first += [] if first else [k, v]
        scores = (q @ first[0].transpose(2, 3)).masked_fill(
            torch.ones(x.shape[1], x.shape[1]).triu().bool(), -torch.inf
        )
        weights = (torch.cat((scores, (q * k).sum(-1, keepdim=True)), 3) * self.dim**-0.5).softmax(-1)
        out = weights[..., :-1] @ first[1] + weights[..., -1:] * v
        mixed: torch.Tensor = attn.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, first: list[torch.Tensor]) -> torch.Tensor:
        layer: Any = self.midlayer
        x = hidden + self.attend(torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), 2), first)
        states: torch.Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return states


def loss_of(model: Any, head: Head, kept: torch.Tensor, texts: list[list[int]]) -> torch.Tensor:
    """Return the cross-entropy to the model's own distributions, of a chain of drafts after every token."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    exists = nn.utils.rnn.pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True)[:, 2:]
    with torch.no_grad():
        states = model.model(ids, output_hidden_states=True).hidden_states
        embeds, count = model.get_input_embeddings()(ids)[:, 1:], len(states) - 1
        wanted = functional.linear(states[-1][:, 1:], model.lm_head.weight[kept]).softmax(-1)
    hidden, first = head.fc(torch.cat([states[i][:, :-1] for i in (2, count // 2, count - 3)], 2)), list[torch.Tensor]()
    losses = list[torch.Tensor]()
    for step in range(STEPS):
        hidden = head(hidden, embeds, first)
        logs = head.lm_head(head.norm(hidden[:, step:])).log_softmax(-1)
        each = -(wanted[:, step:] * logs).sum(-1)[:, : exists.shape[1] - step]
        losses.append((each * exists[:, step:]).sum() / exists[:, step:].sum() * 0.8**step)
        # Each position's next draft begins from the hidden state before it.
        hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), 1)
    return torch.stack(losses).sum()


def train(model: Any, texts: list[list[int]], epochs: int, head_folder: Path) -> None:
    counts = torch.bincount(
        torch.tensor([token for text in texts for token in text]), minlength=model.config.vocab_size
    )
    kept = counts.topk(min(VOCABULARY, model.config.vocab_size)).indices.sort().values
    head = Head(model, kept)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, weight_decay=0.0, betas=(0.9, 0.95))
    num_steps = epochs * (len(texts) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / 10, 1) * (1 - step / num_steps) + 0.01
    )
    for step in range(num_steps):
        chosen = torch.randint(len(texts), (BATCH,)).tolist()
        loss = loss_of(model, head, kept, [texts[i] for i in chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} of {num_steps}: loss {loss.item():.3f}", flush=True)
    write(head, model.config, kept, head_folder)


def write(head: Head, config: Any, kept: torch.Tensor, folder: Path) -> None:
    """Write the head as the Hub has them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
             "vocab_size", "max_position_embeddings", "rope_parameters", "hidden_act"]  # fmt: skip
    values = {name: getattr(config, name) for name in names} | {"num_hidden_layers": 1, "draft_vocab_size": len(kept)}
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": torch.isin(torch.arange(config.vocab_size), kept)}
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("head", type=Path)
    parser.add_argument("--things", type=int, default=len(THINGS))
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "max_num_seqs": 64}
    begin = time.perf_counter()
    with LLM(args.folder, **settings) as llm:
        texts = ask(llm, THINGS[: args.things], 64)
    print(f"{sum(map(len, texts))} tokens in {len(texts)} texts after {time.perf_counter() - begin:.0f} s", flush=True)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).requires_grad_(False)
    train(model, texts, args.epochs, args.head)
    print(f"trained after {time.perf_counter() - begin:.0f} s", flush=True)
    config = {"method": "eagle3", "model": str(args.head), "num_speculative_tokens": 3}
    with LLM(args.folder, **settings | {"max_num_seqs": 1}, speculative_config=config) as llm:
        ask(llm, HELD_OUT, 64)
        stats = llm.stats()
    gained = [accepted / stats["num_drafts"] for accepted in stats["num_accepted_per_position"]]
    print(f"{1 + sum(gained):.2f} tokens a step, by position {gained}, {stats['num_drafts']} steps with drafts")


if __name__ == "__main__":
    main()
