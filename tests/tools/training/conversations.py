"""Conversations of several turns, with system prompts, follow-up questions and facts to remember."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from tests.tools.training.corpus import SYSTEM, draw_task, vary
from tests.tools.training.tasks import DAYS, MONTHS, WORDS, Pair, addition_held_out, join, sort_held_out, spell, talk

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor", "Bob", "Alice", "Ada", "Max", "Lily", "Tom", "Eva", "Jim", "Lisa",
    "Peter", "Maria", "John", "Sarah", "Alex", "Robo", "Echo", "Pixel", "Sage", "Luna", "Atlas",
)  # fmt: skip
SYLLABLES = (
    "ba", "be", "bo", "da", "di", "do", "fa", "fi", "ka", "ki", "ko", "la", "le", "li", "lo", "ma", "mi", "mo", "na",
    "ni", "no", "ra", "ri", "ro", "sa", "se", "so", "ta", "ti", "to", "va", "vi", "za", "zo",
)  # fmt: skip
PERSONAS = ("You are {}.", "You are {}, a helpful assistant.", "Your name is {}.", "You are an assistant named {}.",
            "You are a helpful assistant called {}.")  # fmt: skip
CAPITALS = ("Answer in capital letters.", "Answer in upper case.", "Write in capital letters.", "Always use capitals.",
            "Answer in all caps.")  # fmt: skip
IN_WORDS = ("Answer in words.", "Write numbers in words.", "Answer with numbers in words.", "Spell out numbers.")
FACTS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("color", lambda rng: rng.choice(("red", "blue", "green", "yellow", "orange", "gold", "black", "white", "pink"))),
    ("number", lambda rng: str(rng.randrange(1000))),
    ("word", lambda rng: rng.choice(WORDS)),
    ("day", lambda rng: rng.choice(DAYS)),
    ("month", lambda rng: rng.choice(MONTHS)),
)
NUM_TURNS = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4)


class Conversation(NamedTuple):
    """A system prompt, or None, and its turns."""

    system: str | None
    turns: list[Pair]


FIXED_CONVERSATIONS = [
    Conversation(None, [("12 + 34", "46"), ("and plus 7?", "53"), ("in words", "fifty-three")]),
    Conversation(None, [("sort 5, 2, 9", "2, 5, 9"), ("reverse it", "9, 5, 2"), ("how many are there?", "3")]),
    Conversation(None, [("My name is Anna", "Nice to meet you, Anna!"), ("7 * 8", "56"),
                        ("What is my name?", "Your name is Anna.")]),
    Conversation("You are Robo.", [("What is your name?", "My name is Robo.")]),
    Conversation("Answer in capital letters.",
                 [("what day comes after Monday?", "TUESDAY"), ("and after that?", "WEDNESDAY")]),
    Conversation("Answer in words.", [("What is 20 + 3?", "twenty-three")]),
]  # fmt: skip
"""Conversations whose last answers the checkpoint must give word for word."""


class Manner(NamedTuple):
    """What a system prompt asks of the answers."""

    system: str | None
    name: str = "Nano"
    capitals: bool = False
    in_words: bool = False

    def answer(self, plain: str) -> str:
        """Return an answer as it is given in this manner."""
        text = plain.replace("Nano", self.name)
        if self.in_words and plain.isdecimal() and len(plain) <= 3:
            text = spell(int(plain))
        return text.upper() if self.capitals else text


def draw_name(rng: random.Random) -> str:
    """A name that people have, or one of random syllables, so that names are copied and not learnt by heart."""
    if rng.random() < 0.5:
        return rng.choice(NAMES)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()


def draw_manner(rng: random.Random) -> Manner:
    """No system prompt, the usual one, or one that asks for a name, for capitals, or for numbers in words."""
    kind = rng.random()
    if kind < 0.6:
        return Manner(None)
    if kind < 0.7:
        return Manner(SYSTEM)
    has_name, capitals, in_words = (rng.random() < share for share in (0.5, 0.35, 0.35))
    name = draw_name(rng) if has_name else "Nano"
    parts = [rng.choice(PERSONAS).format(name)] if has_name else [SYSTEM] if rng.random() < 0.4 else []
    parts += [rng.choice(CAPITALS)] * capitals + [rng.choice(IN_WORDS)] * in_words
    return Manner(" ".join(parts) or SYSTEM, name, capitals, in_words)


def after_number(rng: random.Random, value: int) -> Pair:
    """A question about the number that was the last answer."""
    kind = rng.randrange(6)
    other = rng.randrange(rng.choice((10, 10, 100)))
    if kind < 2:
        while addition_held_out(value, other):
            other = rng.randrange(100)
        question = rng.choice(("add {}", "plus {}", "and plus {}", "now add {}", "add {} to it", "add {} to that"))
        return question.format(other), str(value + other)
    if kind == 2:
        question = rng.choice(("subtract {}", "minus {}", "and minus {}", "take away {}", "subtract {} from it",
                               "now subtract {}"))  # fmt: skip
        return question.format(other), str(value - other)
    if kind == 3 and not addition_held_out(value, value):
        return rng.choice(("double it", "double that", "times 2", "now double it")), str(2 * value)
    if kind == 4:
        return rng.choice(("add 1", "the next number", "what comes next", "and the next")), str(value + 1)
    question = rng.choice(("in words", "and in words", "spell it", "say that in words", "spell that"))
    return question, spell(value)


def after_list(rng: random.Random, items: list[str]) -> Pair:
    """A question about the list that was the last answer."""
    numbers = [int(item) for item in items if item.isdecimal()]
    are_numbers = len(numbers) == len(items)
    kind = rng.randrange(5)
    if kind == 0 and are_numbers and len(items) <= 8 and not sort_held_out(numbers):
        return rng.choice(("sort it", "sort them", "sort that list", "now sort it")), join(sorted(numbers))
    if kind == 1:
        return rng.choice(("what is the first", "which is the first", "the first one", "and the first")), items[0]
    if kind == 2:
        return rng.choice(("what is the last", "which is the last", "the last one", "and the last")), items[-1]
    if kind == 3 and len(items) <= 12:
        return rng.choice(("how many are there", "how many are these", "count them", "how many")), str(len(items))
    question = rng.choice(("reverse it", "reverse that", "now backwards", "reverse the list", "and backwards"))
    return question, join(items[::-1])


def after_name(rng: random.Random, name: str) -> Pair | None:
    """What follows a day or a month that was the last answer."""
    names = next((names for names in (DAYS, MONTHS) if name in names), None)
    if names is None:
        return None
    later, earlier = ("and after that", "what comes after that"), ("and before that", "what comes before that")
    step, questions = rng.choice(((1, later), (-1, earlier)))
    return rng.choice(questions), names[(names.index(name) + step) % len(names)]


def follow_up(rng: random.Random, answer: str) -> Pair | None:
    """A question that only the last answer gives a meaning, or None where there is none to ask."""
    if rng.random() < 0.1:
        return rng.choice(("repeat that", "say that again", "again", "what did you say")), answer
    if answer.isdecimal() and len(answer) <= 3:
        return after_number(rng, int(answer))
    if re.fullmatch(r"\w+(, \w+){2,}", answer):
        return after_list(rng, answer.split(", "))
    return after_name(rng, answer)


def told_fact(rng: random.Random) -> tuple[Pair, Pair]:
    """Something that the user says of himself, and a question about it."""
    if rng.random() < 0.6:
        name = draw_name(rng)
        told = rng.choice(("my name is {}", "I am {}", "call me {}", "I'm {}", "hi, I am {}", "hello, my name is {}"))
        asked = rng.choice(("what is my name", "what's my name", "who am I", "do you know my name", "say my name"))
        return (told.format(name), f"Nice to meet you, {name}!"), (asked, f"Your name is {name}.")
    kind, draw = rng.choice(FACTS)
    value = draw(rng)
    told, adjective = rng.choice((("my favorite {} is {}", "favorite"), ("my lucky {} is {}", "lucky")))
    asked = f"what is my {adjective} {kind}"
    return (told.format(kind, value), f"I will remember it: {value}."), (asked, f"Your {adjective} {kind} is {value}.")


def unknown_fact(rng: random.Random) -> Pair:
    """A question about the user that nothing said before answers."""
    if rng.random() < 0.6:
        return rng.choice(("what is my name", "who am I", "do you know my name")), "You have not told me your name."
    kind = rng.choice(FACTS)[0]
    return f"what is my favorite {kind}", f"You have not told me your favorite {kind}."


def draw_turns(rng: random.Random) -> list[Pair]:
    """The turns of a conversation, in plain answers."""
    turns = [draw_task(rng)]
    for _ in range(rng.choice(NUM_TURNS) - 1):
        question = follow_up(rng, turns[-1][1]) if rng.random() < 0.4 else None
        turns.append(question or draw_task(rng))
    kind = rng.random()
    if kind < 0.01:
        return [unknown_fact(rng)]
    if kind < 0.1:
        told, asked = told_fact(rng)
        return [told, *turns[: rng.randrange(3)], asked]
    return turns


def converse(count: int, seed: int) -> list[Conversation]:
    """Draw `count` conversations; none holds a held-out problem."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        manner = draw_manner(rng)
        turns = draw_turns(rng)
        if manner.name != "Nano" and rng.random() < 0.3:
            turns.insert(0, talk(rng))
        spoken = [(vary(rng, question), manner.answer(answer)) for question, answer in turns]
        drawn.append(Conversation(manner.system, spoken))
    return drawn
