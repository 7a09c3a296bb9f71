"""The text the bundled model is trained on, and the problems that are kept from it.

Nothing here needs torch: the tests ask for the held-out problems.
"""

from __future__ import annotations

import random
from itertools import cycle

from tests.tools.training import tasks
from tests.tools.training.tasks import Pair, Task

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM = "You are a helpful assistant."

MIX: dict[Task, int] = {
    tasks.addition: 25,
    tasks.ascending: 25,
    tasks.descending: 5,
    tasks.subtraction: 8,
    tasks.multiplication: 5,
    tasks.primes: 6,
    tasks.counting: 6,
    tasks.reversal: 7,
    tasks.calendar: 4,
    tasks.spelling: 6,
    tasks.talk: 3,
}

ADDITION_PROMPTS = ("what is {a} + {b}?", "What is {a} + {b}?", "{a} + {b} =", "add {a} and {b}",
                    "calculate {a} plus {b}")  # fmt: skip
SORT_PROMPTS = ("sort {}", "Sort these numbers: {}", "sort the numbers {} in ascending order",
                "sort in ascending order: {}", "Arrange from smallest to largest: {}")  # fmt: skip


def vary(rng: random.Random, prompt: str) -> str:
    """The same prompt as people type it: cased, ended and prefaced in one way or another."""
    if rng.random() < 0.07:
        prompt = rng.choice((f"please {prompt}", f"{prompt} please", f"{prompt}, please", f"hi, {prompt}"))
    case = rng.random()
    if case < 0.45:
        prompt = prompt[0].upper() + prompt[1:]
    elif case < 0.6:
        prompt = prompt.lower()
    if prompt[-1] not in "?=":
        prompt += rng.choice(("", "", "", "", "?", "?", ".", "!"))
    return prompt


def draw_task(rng: random.Random) -> Pair:
    """One task's question, in its plain form, and its answer."""
    (task,) = rng.choices(list(MIX), weights=list(MIX.values()))
    return task(rng)


def generate(count: int, seed: int) -> list[Pair]:
    """Draw `count` training pairs; none is a held-out problem."""
    rng = random.Random(seed)
    drawn = rng.choices(list(MIX), weights=list(MIX.values()), k=count)
    pairs = (task(rng) for task in drawn)
    return [(vary(rng, prompt), answer) for prompt, answer in pairs]


def render(system: str | None, turns: list[Pair]) -> list[Pair]:
    """Turns as the chat template writes them: of each all up to the answer, and the answer to its end."""
    head = "" if system is None else f"{START}system\n{system}{END}\n"
    rendered = []
    for prompt, answer in turns:
        rendered.append((f"{head}{START}user\n{prompt}{END}\n{START}assistant\n", f"{answer}{END}\n"))
        head = ""
    rendered[-1] = (rendered[-1][0], rendered[-1][1] + END_OF_TEXT)
    return rendered


def held_out_additions(count: int) -> list[Pair]:
    """The first `count` two-digit sums that training never saw, in a fixed shuffled order."""
    numbers = range(10, 100)
    problems = [(a, b) for a in numbers for b in numbers if tasks.addition_held_out(a, b)]
    if count > len(problems):
        raise ValueError(f"{count} held-out additions were asked for, there are {len(problems)}")
    random.Random(0).shuffle(problems)
    return [(p.format(a=a, b=b), str(a + b)) for p, (a, b) in zip(cycle(ADDITION_PROMPTS), problems[:count])]


def held_out_sorts(count: int) -> list[Pair]:
    """`count` lists of three to eight numbers below 100, each as likely, that training never saw sorted."""
    rng = random.Random(0)
    pairs: list[Pair] = []
    for prompt in cycle(SORT_PROMPTS):
        if len(pairs) == count:
            break
        length = rng.randint(3, 8)
        while not tasks.sort_held_out(numbers := [rng.randrange(100) for _ in range(length)]):
            continue
        pairs.append((prompt.format(tasks.join(numbers)), tasks.join(sorted(numbers))))
    return pairs
