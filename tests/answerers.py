"""Answers to the tasks of `penstock eval`, given by rules that read nothing but the prompt's text: right
ones, and typical wrong ones."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from penstock import LLM, SamplingParams
from penstock.evals import phrases

Answer = Callable[[str], str]
"""From the text of a prompt to the text of an answer."""
_KEY = r"(?P<np>the [a-z ]+ of (?:[A-Z]\w+|the \w+ \w+))"


def _form(template: str, **groups: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{", "{").replace(r"\}", "}").format(**groups))


_QUESTIONS = [_form(form, np=_KEY) for form in phrases.QUESTIONS]
_STATEMENTS = [
    _form(form, np=_KEY, Np=_KEY.replace("the ", "The ", 1), v=r"(?P<v>\d+)") for form in phrases.STATEMENTS
]


def _split(prompt: str) -> tuple[str, str]:
    """The text, and the question behind it."""
    text, _, question = prompt.rpartition("\n\n")
    return text, question


def _said(prompt: str) -> tuple[dict[str, str], str]:
    """The number of every key that the text names, and the key that is asked for."""
    text, question = _split(prompt)
    found = {match["np"].lower(): match["v"] for form in _STATEMENTS for match in form.finditer(text)}
    [asked] = {match["np"].lower() for form in _QUESTIONS if (match := form.search(question))}
    return found, asked


def fact(prompt: str) -> str:
    found, asked = _said(prompt)
    return f"{asked.capitalize()} is {found[asked]}."


def neighbour(prompt: str) -> str:
    """Some other fact of the text."""
    found, asked = _said(prompt)
    return next(
        (f"{asked.capitalize()} is {value}." for key, value in found.items() if key != asked),
        "I do not know.",
    )


def shortened(prompt: str) -> str:
    """The right number without its last digit."""
    found, asked = _said(prompt)
    return f"It is {found[asked][:-1]}."


def _values(prompt: str) -> tuple[dict[str, str], str, list[str]]:
    """The value of every name, the value that is asked for, and the names that were given a number
    themselves."""
    text, question = _split(prompt)
    told = re.findall(r"The value of (\w+) is (?:(\d+)|that of (\w+))\.", text)
    values: dict[str, str] = {}
    for name, number, other in told:
        values[name] = number or values[other]
    asked = re.search(r"have the value (\d+)", question)
    assert asked
    return values, asked[1], [name for name, number, _ in told if number]


def _listed(names: Sequence[str]) -> str:
    return f"They are {', '.join(names[:-1])} and {names[-1]}."


def variables(prompt: str) -> str:
    values, asked, _ = _values(prompt)
    return _listed([name for name, value in values.items() if value == asked])


def bullets(prompt: str) -> str:
    values, asked, _ = _values(prompt)
    return "\n".join(f"- {name.lower()}" for name, value in values.items() if value == asked)


def only_the_first(prompt: str) -> str:
    """The one name that stands beside the number."""
    values, asked, direct = _values(prompt)
    return " ".join(name for name in direct if values[name] == asked)


def every_name(prompt: str) -> str:
    return _listed([*_values(prompt)[0]])


def other_chain(prompt: str) -> str:
    values, asked, _ = _values(prompt)
    return _listed([name for name, value in values.items() if value != asked])


def _ranked(prompt: str) -> list[str]:
    # The first six words are the instruction's; the list may lack letters of its last one.
    return [word for word, _ in Counter(_split(prompt)[0].split()[6:-1]).most_common()]


def words(prompt: str) -> str:
    return _listed(_ranked(prompt)[:3])


def two_words_and_another(prompt: str) -> str:
    ranked = _ranked(prompt)
    return _listed([*ranked[:2], ranked[-1]])


def rarest_words(prompt: str) -> str:
    return _listed(_ranked(prompt)[-3:])


def nothing(prompt: str) -> str:
    return ""


def script(llm: LLM, answer: Answer) -> None:
    """Let `answer` speak for the model. It sees the prompt's tokens as text, and is cut off where a model's
    answer is."""

    def generate(prompts: Sequence[list[int]], params: SamplingParams) -> list[SimpleNamespace]:
        told = [answer(llm.tokenizer.decode(prompt, skip_special=False)) for prompt in prompts]
        return [
            SimpleNamespace(
                text=llm.tokenizer.decode(llm.tokenizer.encode(text, special=False)[: params.max_tokens])
            )
            for text in told
        ]

    llm.generate = generate  # type: ignore[assignment,method-assign]
