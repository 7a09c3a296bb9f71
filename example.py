"""Answer two prompts with a chat model: `python example.py [--model FOLDER_OR_HUB_ID]`."""

from __future__ import annotations

import argparse

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    """Load the model, complete the prompts, print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="folder or Hub id; the bundled checkpoint by default")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")
    options = parser.parse_args()

    with LLM(options.model, device=options.device, tensor_parallel_size=options.tensor_parallel_size) as llm:
        prompts = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=256))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output['text']!r}")


if __name__ == "__main__":
    main()
