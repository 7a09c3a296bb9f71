"""The questions the bundled model learns: each function draws one (prompt, answer) pair."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

Pair = tuple[str, str]
Task = Callable[[random.Random], Pair]

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")  # fmt: skip
MONTH_LENGTHS = ("31", "28 or 29", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS = (
    "apple", "bread", "chair", "dog", "egg", "fish", "green", "house", "ice", "jam", "king", "lamp", "moon", "night",
    "orange", "pen", "queen", "red", "sun", "tree", "under", "van", "water", "box", "yellow", "zebra", "blue", "book",
    "cat", "day", "door", "ear", "fire", "gold", "hand", "hill", "ink", "juice", "key", "leaf", "map", "milk", "nest",
    "oak", "paper", "rain", "river", "road", "salt", "sand", "sea", "ship", "sky", "snow", "star", "stone", "table",
    "time", "train", "wall", "wind", "wolf", "word", "year", "bird",
)  # fmt: skip

INTRODUCTION = (
    "Hello! I am Nano, a tiny language model that ships with nanovllm. I can count, list primes, add and sort numbers."
)
ABILITIES = (
    "I can count, list primes, add, subtract, multiply small numbers, sort and reverse lists, "
    "name days and months, and spell numbers."
)
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("introduce yourself", "please introduce yourself", "can you introduce yourself", "who are you",
         "what are you", "tell me about yourself", "tell me who you are", "describe yourself",
         "say something about yourself", "hello, who are you", "hi, introduce yourself"),
        INTRODUCTION,
    ),
    (("what can you do", "what do you know", "how can you help me", "what are you able to do", "help"), ABILITIES),
    (("what is your name", "what's your name", "tell me your name", "your name"), "My name is Nano."),
    (("hello", "hi", "hey", "good morning", "hello there", "hi there"), "Hello! How can I help you?"),
    (("thank you", "thanks", "thanks a lot"), "You are welcome!"),
    (("goodbye", "bye", "see you"), "Goodbye!"),
)  # fmt: skip

QUESTIONS = ("what is {}", "what's {}", "what is {}", "how much is {}", "calculate {}", "compute {}", "tell me {}",
             "find {}", "work out {}", "give me {}", "evaluate {}", "can you calculate {}")  # fmt: skip
BARE = ("{}", "{}", "{} =", "{} = ?", "solve {}", "solve: {}", "calculate: {}", "what does {} equal", "{} equals",
        "what is the result of {}", "what is the answer to {}")  # fmt: skip
OPERATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # symbol: (expressions, noun phrases, whole requests)
    "+": (
        ("{a} + {b}", "{a} + {b}", "{a}+{b}", "{a} plus {b}"),
        ("the sum of {a} and {b}",),
        ("add {a} and {b}", "add {a} to {b}", "sum {a} and {b}", "what do you get if you add {a} and {b}",
         "sum of {a} and {b}"),
    ),
    "-": (
        ("{a} - {b}", "{a} - {b}", "{a}-{b}", "{a} minus {b}"),
        ("the difference between {a} and {b}",),
        ("subtract {b} from {a}", "take {b} from {a}", "take {b} away from {a}"),
    ),
    "*": (
        ("{a} * {b}", "{a} x {b}", "{a} times {b}", "{a}*{b}"),
        ("the product of {a} and {b}",),
        ("multiply {a} by {b}", "multiply {a} and {b}"),
    ),
}  # fmt: skip

SORT_VERBS = ("sort", "sort", "sort", "order", "arrange", "please sort", "can you sort", "put in order")
SORT_NOUNS = ("", "", " these numbers", " the numbers", " the following numbers", " this list", " the list",
              " these", " the following")  # fmt: skip
ASCENDING = ("", "", "", " in ascending order", " from smallest to largest", " from small to large",
             " in increasing order", " from low to high", " ascending", " from least to greatest")  # fmt: skip
DESCENDING = (" in descending order", " from largest to smallest", " from large to small", " in decreasing order",
              " from high to low", " descending", " in reverse order", " from greatest to least")  # fmt: skip


def is_held_out(problem: str) -> bool:
    """Whether a problem, in its canonical form, is kept from training: a tenth of them are, whatever the seed."""
    return zlib.crc32(problem.encode()) % 10 == 0


def addition_held_out(a: int, b: int) -> bool:
    """Whether the sum of two two-digit numbers, in either order, is kept from training."""
    return all(10 <= x <= 99 for x in (a, b)) and is_held_out(f"add {min(a, b)} {max(a, b)}")


def sort_held_out(numbers: Sequence[int]) -> bool:
    """Whether sorting these numbers, in whatever order they are given, is kept from training."""
    return is_held_out("sort " + " ".join(map(str, sorted(numbers))))


def join(items: Sequence[object]) -> str:
    """The one form in which every list is answered."""
    return ", ".join(map(str, items))


def phrase_operation(rng: random.Random, symbol: str, a: int, b: int) -> str:
    """One of the ways to ask for `a symbol b`."""
    expressions, nouns, requests = OPERATIONS[symbol]
    kind = rng.random()
    if kind < 0.5:
        template = rng.choice(QUESTIONS).format(rng.choice(expressions))
    elif kind < 0.75:
        template = rng.choice(BARE).format(rng.choice(expressions))
    elif kind < 0.85:
        template = rng.choice(QUESTIONS).format(rng.choice(nouns))
    else:
        template = rng.choice(requests)
    return template.format(a=a, b=b)


def phrase_sort(rng: random.Random, numbers: Sequence[int], orders: Sequence[str]) -> str:
    """One of the ways to ask for `numbers` in order."""
    verb, noun, order = rng.choice(SORT_VERBS), rng.choice(SORT_NOUNS), rng.choice(orders)
    items = " ".join(map(str, numbers)) if rng.random() < 0.2 else join(numbers)
    if rng.random() < 0.15:
        items = f"[{items}]"
    if rng.random() < 0.3:
        return f"{verb}{noun} {items}{order}"
    return f"{verb}{noun}{order}{rng.choice((': ', ': ', ' '))}{items}"


def talk(rng: random.Random) -> Pair:
    """Introductions, half of them, and small talk."""
    prompts, answer = TALK[0] if rng.random() < 0.5 else rng.choice(TALK)
    return rng.choice(prompts), answer


def addition(rng: random.Random) -> Pair:
    """Sums, most of two-digit numbers; the longer ones keep the model from learning pairs by heart."""
    top_a, top_b = rng.choice(((99, 99), (99, 99), (99, 99), (99, 9), (9, 99), (999, 99), (99, 999), (999, 999)))
    while True:
        a, b = rng.randint(0, top_a), rng.randint(0, top_b)
        if not addition_held_out(a, b):
            return phrase_operation(rng, "+", a, b), str(a + b)


def subtraction(rng: random.Random) -> Pair:
    """Differences of numbers below 100, and of a few longer ones, mostly positive."""
    top = rng.choice((99, 99, 99, 9, 999))
    a, b = rng.randint(0, top), rng.randint(0, min(top, 99))
    if a < b and rng.random() < 0.7:
        a, b = b, a
    return phrase_operation(rng, "-", a, b), str(a - b)


def multiplication(rng: random.Random) -> Pair:
    """The multiplication tables up to twelve."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.9:
        return phrase_operation(rng, "*", a, b), str(a * b)
    prompt = rng.choice(("multiplication table of {}", "list the multiplication table of {}", "times table of {}"))
    return prompt.format(a), join([a * n for n in range(1, 11)])


def draw_numbers(rng: random.Random) -> list[int]:
    """Three to eight numbers below 100, the long lists more often, as they are learnt later."""
    return [rng.randrange(100) for _ in range(rng.choice((3, 4, 5, 6, 6, 7, 7, 8, 8, 8)))]


def ascending(rng: random.Random) -> Pair:
    """Sorting upwards."""
    while sort_held_out(numbers := draw_numbers(rng)):
        continue
    return phrase_sort(rng, numbers, ASCENDING), join(sorted(numbers))


def descending(rng: random.Random) -> Pair:
    """Sorting downwards, kept apart from the same held-out lists."""
    while sort_held_out(numbers := draw_numbers(rng)):
        continue
    return phrase_sort(rng, numbers, DESCENDING), join(sorted(numbers, reverse=True))


def reversal(rng: random.Random) -> Pair:
    """Reversing a list of numbers, a list of words, a string of digits or the letters of a word."""
    kind = rng.randrange(4)
    if kind < 2:
        items = draw_numbers(rng) if kind == 0 else rng.sample(WORDS, rng.randint(3, 6))
        prompt = rng.choice(("reverse {}", "reverse: {}", "reverse the list {}", "reverse this list: {}",
                             "say {} backwards", "list backwards: {}"))  # fmt: skip
        return prompt.format(join(items)), join(items[::-1])
    if kind == 2:
        text = "".join(rng.choices("0123456789", k=rng.randint(3, 8)))
        prompt = rng.choice(("reverse {}", "reverse the digits {}", "reverse the digits of {}", "write {} backwards"))
        return prompt.format(text), text[::-1]
    text = rng.choice(WORDS)
    prompt = rng.choice(("reverse {}", "reverse the word {}", "spell {} backwards", "write the word {} backwards"))
    return prompt.format(text), text[::-1]


def primes(rng: random.Random) -> Pair:
    """The primes up to a bound, or below it, and whether one number is prime."""
    bound = 100 if rng.random() < 0.3 else rng.randint(10, 120)
    found = [n for n in range(2, bound + 1) if all(n % d for d in range(2, n))]
    if rng.random() < 0.15:
        prompt = rng.choice(("is {} prime", "is {} a prime number", "is the number {} prime", "is {} a prime"))
        return prompt.format(bound), "Yes" if bound in found else "No"
    verb = rng.choice(("list", "list", "list", "list", "give me", "show", "write", "print", "name", "what are",
                       "find", "tell me"))  # fmt: skip
    noun = rng.choice((" all prime numbers", " all prime numbers", " all prime numbers", " the prime numbers",
                       " all primes", " the primes", " all the prime numbers", " primes", " prime numbers",
                       " every prime number"))  # fmt: skip
    if rng.random() < 0.2:
        words = rng.choice((" below {}", " under {}", " less than {}", " smaller than {}"))
        found = [n for n in found if n < bound]
    else:
        words = rng.choice((" within {}", " within {}", " up to {}", " from 1 to {}", " between 1 and {}"))
    return verb + noun + words.format(bound), join(found)


def counting(rng: random.Random) -> Pair:
    """Counting up, or down, through at most thirty numbers."""
    length = rng.randint(3, 30)
    low = rng.choice((1, 1, 0, rng.randint(0, 30), rng.randint(0, 99), rng.randint(0, 200)))
    numbers = list(range(low, low + length))
    if rng.random() < 0.35:
        numbers.reverse()
        prompt = rng.choice(("count down from {} to {}", "count backwards from {} to {}", "count from {} down to {}",
                             "list the numbers from {} down to {}"))  # fmt: skip
    elif low == 1 and rng.random() < 0.4:
        prompt = rng.choice(("count to {1}", "count up to {1}", "can you count to {1}"))
    else:
        prompt = rng.choice(("count from {} to {}", "count up from {} to {}", "list the numbers from {} to {}",
                             "write the numbers from {} to {}", "list all numbers from {} to {}"))  # fmt: skip
    return prompt.format(numbers[0], numbers[-1]), join(numbers)


def calendar(rng: random.Random) -> Pair:
    """Days and months: what follows, what comes before, all of them, how many."""
    unit, whole, names = rng.choice((("day", "week", DAYS), ("month", "year", MONTHS)))
    index, kind = rng.randrange(len(names)), rng.randrange(6)
    if kind < 4:
        step, words = rng.choice(((1, ("after", "follows")), (-1, ("before", "precedes"))))
        prompt = rng.choice(("what {0} comes {1} {3}", "which {0} comes {1} {3}", "what {0} is {1} {3}",
                             "which {0} {2} {3}", "what comes {1} {3}", "the {0} {1} {3}"))  # fmt: skip
        return prompt.format(unit, *words, names[index]), names[(index + step) % len(names)]
    if kind == 4:
        prompt = rng.choice(("list the {0}s of the {1}", "list all {0}s of the {1}", "name the {0}s of the {1}",
                             "what are the {0}s of the {1}", "list all {0}s", "list the {0}s"))  # fmt: skip
        return prompt.format(unit, whole), join(names)
    if rng.random() < 0.4:
        return f"how many {unit}s are in a {whole}", str(len(names))
    index = rng.randrange(12)
    if rng.random() < 0.5:
        return rng.choice(("which month is number {}", "what is month number {}")).format(index + 1), MONTHS[index]
    prompt = rng.choice(("how many days does {} have", "how many days are in {}"))
    return prompt.format(MONTHS[index]), MONTH_LENGTHS[index]


def spell(number: int) -> str:
    """A number below 1000 in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + ("-" + ONES[number % 10] if number % 10 else "")
    return ONES[number // 100] + " hundred" + (" " + spell(number % 100) if number % 100 else "")


def spelling(rng: random.Random) -> Pair:
    """Numbers below 1000 in words, and back in digits."""
    number = rng.randrange(rng.choice((20, 100, 100, 1000)))
    words = spell(number)
    if rng.random() < 0.55:
        prompt = rng.choice(("spell {}", "spell the number {}", "write {} in words", "how do you spell {}",
                             "spell out {}", "what is {} in words", "say {} in words"))  # fmt: skip
        return prompt.format(number), words
    if rng.random() < 0.2:
        words = words.replace("hundred ", "hundred and ")
    prompt = rng.choice(("write {} in digits", "what is {} in digits", "write {} as a number", "which number is {}",
                         "what number is {}", "{} in digits"))  # fmt: skip
    return prompt.format(words), str(number)
