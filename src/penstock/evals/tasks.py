"""Makes the tasks: what is hidden in a text, what is asked, and how much of an answer is right."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from penstock.base.errors import RequestError
from penstock.evals.phrases import INSTRUCTIONS, facts, invented
from penstock.evals.prompts import Dress, Haystack, Question, fill, room

_CHAIN = 5
"""Variables that have the value asked for. As many have another one."""
_FREQUENT, _OTHERS = 3, 24
_TURN = 6
"""Other words between two shuffles, for two of each frequent one: frequent words come eight times as
often."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a prompt in tokens, and the words of a right answer. decoys: words that an answer may name
    wrongly."""

    tokens: list[int]
    expected: tuple[str, ...]
    decoys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Material:
    """Holds the parts that all prompts of a run are made of."""

    dress: Dress
    haystack: Haystack


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A task has a maker of samples, and a score for answers.

    make: returns a sample of `length` tokens less ANSWER_TOKENS, with the thing that is asked for at `depth`
        of the text, 0 to 1. Raises RequestError if the length has no room for it.
    score: how right an answer is, 0 to 1.
    deep: the depth means something.
    """

    about: str
    make: Callable[[random.Random, int, float, Material], Sample]
    score: Callable[[str, Sample], float]
    deep: bool = True


def exact(answer: str, sample: Sample) -> float:
    """Return 1 if the first number of the answer is the one expected, however its thousands are parted."""
    numbers = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", answer))
    return float(numbers[:1] == list(sample.expected))


def share(answer: str, sample: Sample) -> float:
    """Return the share of expected words that the answer has. Each decoy in it counts as one more that was
    missed."""
    words = set(re.findall(r"\w+", answer.casefold()))
    found, wrong = (
        sum(word.casefold() in words for word in some) for some in (sample.expected, sample.decoys)
    )
    return found / (len(sample.expected) + wrong)


def _keys(rng: random.Random, length: int, depth: float, material: Material) -> Sample:
    return _find(rng, length, depth, material, min(max(length // 128, 3), 64))


def _find(rng: random.Random, length: int, depth: float, material: Material, others: int = 0) -> Sample:
    asked, *more = islice(facts(rng), 1 + others)
    question = Question(rng.choice(INSTRUCTIONS), asked.question, asked.answer_head)
    hidden = [(depth, asked.statement), *((rng.random(), other.statement) for other in more)]
    return Sample(fill(length, question, hidden, material.haystack, material.dress, rng), (asked.value,))


def _variables(rng: random.Random, length: int, depth: float, material: Material) -> Sample:
    names = [word.capitalize() for word in invented(rng, 2 * _CHAIN)]
    values = rng.sample(range(10_000, 100_000), 2)
    hidden: list[tuple[float, str]] = []
    for chain, value, first in (
        (names[:_CHAIN], values[0], depth),
        (names[_CHAIN:], values[1], rng.random()),
    ):
        said = [f"The value of {chain[0]} is {value}."]
        said += [f"The value of {later} is that of {earlier}." for earlier, later in pairwise(chain)]
        depths = sorted(first + (1 - first) * rng.random() for _ in chain[1:])
        hidden += zip([first, *depths], said, strict=True)
    question = (
        f"Which {_CHAIN} names in the text have the value {values[0]}, directly or through other names?"
    )
    asked = Question("Read the text and answer the question at the end.", question, "They are")
    tokens = fill(length, asked, hidden, material.haystack, material.dress, rng)
    return Sample(tokens, tuple(names[:_CHAIN]), tuple(names[_CHAIN:]))


def _words(rng: random.Random, length: int, depth: float, material: Material) -> Sample:
    """Make a list of exactly the tokens that there is room for. Its last word may lack letters."""
    words = invented(rng, _FREQUENT + _OTHERS)
    frequent, others = words[:_FREQUENT], words[_FREQUENT:]
    asked = Question(
        "Here is a list of words.", f"Which {_FREQUENT} words occur most often in the list?", "They are"
    )
    before, after = material.dress.ends(asked)
    count = room(length, len(before) + len(after))
    spelled = {word: material.dress.inner(f" {word}") for word in words}
    listed: list[int] = []
    turn = 0
    while len(listed) < count:
        some = [*frequent, *frequent, *(others[(_TURN * turn + i) % _OTHERS] for i in range(_TURN))]
        rng.shuffle(some)
        listed += [token for word in some for token in spelled[word]]
        turn += 1
        if turn == 1 and len(listed) > count:
            raise RequestError(
                f"a list of {count:,} tokens is too short for its words to repeat; give longer --lengths"
            )
    return Sample([*before, *listed[:count], *after], tuple(frequent), tuple(others))


TASKS: Mapping[str, EvalTask] = {
    "single": EvalTask("one fact in a text", _find, exact),
    "keys": EvalTask("one fact among many of the same kind", _keys, exact),
    "variables": EvalTask("all names that got one value, through each other", _variables, share),
    "words": EvalTask("the most frequent words of a list", _words, share, deep=False),
}
