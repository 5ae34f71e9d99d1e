"""Generates simple, coherent children's stories from templates: seeded, endless, pure Python."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import story_words as words

Node = Callable[[random.Random, dict[str, str]], str]
TEMPLATES = Path(__file__).with_name("story_templates.txt")
TITLES = {
    "lost": "losing something dear",
    "helping": "helping somebody",
    "learning": "learning something new",
    "storm": "a storm",
    "sharing": "sharing",
    "gift": "a birthday gift",
    "night": "a noise in the night",
    "journey": "a long journey",
    "race": "a race",
    "garden": "a garden",
    "honest": "telling the truth",
    "neighbor": "a strange neighbor",
    "map": "a treasure",
    "wish": "a wish",
    "broken": "mending something broken",
}
# In these stories the friend is a stranger or far away, or the object is not the hero's own: the introduction
# must not say otherwise.
STRANGER_PLOTS = {"neighbor", "journey"}
FOREIGN_OBJECT_PLOTS = {"sharing", "gift", "honest", "wish", "race", "journey"}


@dataclass(frozen=True)
class Beat:
    """One step of a story: several wordings, of which one is told."""

    wordings: tuple[tuple[str, Node], ...]
    optional: bool


@dataclass(frozen=True)
class Story:
    """A finished story, its paragraphs joined by blank lines, and what it is about."""

    text: str
    name: str
    kind: str
    thing: str
    place: str
    theme: str


def _parse(text: str, pos: int, in_choice: bool) -> tuple[Node, int]:
    """Compile a template from `pos` up to the end, or up to the `|` or `]` that ends this branch of a
    choice."""
    parts: list[str | Node] = []
    literal = ""
    while pos < len(text):
        char = text[pos]
        if in_choice and char in "|]":
            break
        if char == "[":
            branches: list[Node] = []
            while text[pos] != "]":
                branch, pos = _parse(text, pos + 1, True)
                branches.append(branch)
            node = _choice(tuple(branches))
        elif char in "{<":
            end = text.index("}" if char == "{" else ">", pos)
            node = _slot(text[pos + 1 : end]) if char == "{" else _listed(text[pos + 1 : end])
            pos = end
        else:
            literal += char
            pos += 1
            continue
        if literal:
            parts.append(literal)
            literal = ""
        parts.append(node)
        pos += 1
    if literal:
        parts.append(literal)
    fixed = tuple(parts)
    return (lambda rng, slots: "".join(p if isinstance(p, str) else p(rng, slots) for p in fixed)), pos


def _choice(branches: tuple[Node, ...]) -> Node:
    count = len(branches)
    return lambda rng, slots: branches[int(rng.random() * count)](rng, slots)


def _slot(name: str) -> Node:
    return lambda rng, slots: slots[name]


def _listed(name: str) -> Node:
    compiled: list[Node] = []

    def pick(rng: random.Random, slots: dict[str, str]) -> str:
        if not compiled:
            compiled.extend(_parse(entry, 0, False)[0] for entry in words.LISTS[name.lower()])
        text = compiled[int(rng.random() * len(compiled))](rng, slots)
        return text[0].upper() + text[1:] if name[0].isupper() else text

    return pick


def expand(template: str, rng: random.Random) -> str:
    """One reading of a template without slots."""
    return _parse(template, 0, False)[0](rng, {})


def _load() -> dict[str, list[list[Beat]]]:
    """Section name -> paragraphs -> beats."""
    sections: dict[str, list[list[Beat]]] = {}
    paragraphs: list[list[Beat]] = []
    for line in TEMPLATES.read_text().splitlines():
        line = line.strip()
        mark, _, body = line.partition(" ")
        if mark == "==":
            paragraphs = sections[body] = [[]]
        elif not line:
            if paragraphs and paragraphs[-1]:
                paragraphs.append([])
        elif mark in ("*", "?"):
            paragraphs[-1].append(Beat(((body, _parse(body, 0, False)[0]),), mark == "?"))
        elif mark == "|":
            last = paragraphs[-1][-1]
            paragraphs[-1][-1] = Beat((*last.wordings, (body, _parse(body, 0, False)[0])), last.optional)
    return {name: [p for p in body if p] for name, body in sections.items()}


SECTIONS = _load()
PLOTS = tuple(name for name in SECTIONS if name in TITLES)

_SENTENCE_START = re.compile(r'(^|\n|[.!?] "?|\." )([a-z])')
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiAEI]|[oO](?!ne)|u(?!ni|se)|U(?!ni|se)|hour|honest)")


def tidy(text: str) -> str:
    """Capital letters at the start of sentences, `an` before vowels, single blanks."""
    text = re.sub(r" +", " ", text).strip()
    text = re.sub(r" ([.,!?])", r"\1", text)
    text = _SENTENCE_START.sub(lambda m: m[1] + m[2].upper(), text)
    return _ARTICLE.sub(lambda m: m[1] + "n ", text)


def with_article(noun: str) -> str:
    """a fox, an old fox"""
    return _ARTICLE.sub(lambda m: m[1] + "n ", f"a {noun}")


def _character(rng: random.Random, kind: str, prefix: str, avoid: str = "") -> dict[str, str]:
    female = (rng.random() < 0.5 or kind in words.FEMALE) and kind not in words.MALE
    names = words.GIRLS if female else words.BOYS
    name = rng.choice(names)
    while name == avoid:
        name = rng.choice(names)
    he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
    hand = (
        "wing"
        if kind in words.BIRDS
        else "paw"
        if kind in (*words.MAMMALS, "dog", "dragon", "dinosaur")
        else "hand"
    )
    if kind in (
        "deer",
        "lamb",
        "goat",
        "pony",
        "donkey",
        "elephant",
        "horse",
        "cow",
        "pig",
        "unicorn",
        "zebra",
        "giraffe",
    ):
        hand = "hoof" if kind != "elephant" else "foot"
    hands = {"hoof": "hooves", "foot": "feet"}.get(hand, hand + "s")
    slots = {
        "he": he,
        "him": him,
        "his": his,
        "self": him + "self",
        "kind": kind,
        "hand": hand,
        "hands": hands,
    }
    slots["trait"] = rng.choice(words.TRAITS)
    slots = {prefix + key: value for key, value in slots.items()}
    slots["M" if prefix else "N"] = name
    slots.update({"MHe": he.title()} if prefix else {"He": he.title(), "His": his.title()})
    return slots


def draw_kind(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(words.MAMMALS)
    if draw < 0.5:
        return rng.choice(words.BIRDS)
    if draw < 0.62:
        return rng.choice(words.CREATURES)
    return rng.choice(("boy", "girl")) if draw < 0.84 else rng.choice(words.PEOPLE)


def cast(rng: random.Random, kind: str = "", name: str = "", place: str = "") -> dict[str, str]:
    """Everybody and everything that one story is about, as template slots."""
    slots = _character(rng, kind or draw_kind(rng), "")
    if name:
        slots["N"] = name
        female = name in words.GIRLS
        he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
        slots.update(he=he, him=him, his=his, self=him + "self", He=he.title(), His=his.title())
        if slots["kind"] in ("boy", "girl"):
            slots["kind"] = "girl" if female else "boy"
    friend_kind = draw_kind(rng)
    while friend_kind == slots["kind"]:
        friend_kind = draw_kind(rng)
    slots.update(_character(rng, friend_kind, "m", slots["N"]))
    slots["trait2"] = rng.choice([t for t in words.TRAITS if t != slots["trait"]])
    grown = slots["kind"] in words.PEOPLE or slots["kind"] in (
        "king",
        "queen",
        "giant",
        "captain",
        "doctor",
        "soldier",
        "wizard",
    )
    slots["size"] = "" if grown or rng.random() < 0.3 else rng.choice(words.SIZES) + " "
    slots["fingers"] = "fingers" if slots["hand"] == "hand" else slots["hands"]
    elder, elder_female = rng.choice(
        (
            ("mother", True),
            ("father", False),
            ("grandmother", True),
            ("grandfather", False),
            ("aunt", True),
            ("uncle", False),
        )
    )
    slots["E"], slots["E2"], slots["Ethe"] = f"{slots['his']} {elder}", f"my {elder}'s", f"your {elder}"
    slots["ehe"], slots["ehis"] = ("she", "her") if elder_female else ("he", "his")
    things = rng.sample(words.OBJECTS, 2)
    looks = rng.sample(words.COLORS + words.MATERIALS, 2)
    slots["obj"], slots["objn"], slots["obj2"] = (
        f"{looks[0]} {things[0]}",
        things[0],
        f"{looks[1]} {things[1]}",
    )
    places = rng.sample(words.PLACES, 2)
    slots["place"] = "the " + (place or places[0])
    slots["place2"] = "the " + (places[1] if places[1] != place else places[0])
    slots["x"] = rng.choice([x for x in words.LITTLE if x not in (slots["kind"], friend_kind)])
    slots["color"] = rng.choice(words.COLORS)
    slots["skill"] = rng.choice(words.LISTS["skill"])
    slots["home"] = _parse(rng.choice(words.LISTS["home"]), 0, False)[0](rng, slots)
    slots["homenow"] = f"near {slots['place']}"
    slots["petcolor"] = rng.choice(
        [c for c in words.COLORS if c not in ("blue", "green", "pink", "purple", "silver", "orange")]
    )
    slots["elder"] = elder
    return slots


def _tell(beats: list[Beat], rng: random.Random, slots: dict[str, str], banned: tuple[str, ...] = ()) -> str:
    told = []
    for beat in beats:
        if beat.optional and rng.random() < 0.5:
            continue
        wordings = [node for body, node in beat.wordings if not any(slot in body for slot in banned)]
        told.append(wordings[int(rng.random() * len(wordings))](rng, slots).strip())
    return " ".join(told)


def make_story(rng: random.Random, kind: str = "", name: str = "", place: str = "", plot: str = "") -> Story:
    """One story of about 100 to 400 words; whatever is not given is drawn."""
    slots = cast(rng, kind, name, place)
    plot = plot or rng.choice(PLOTS)
    banned = ("{M}",) * (plot in STRANGER_PLOTS) + ("{obj}",) * (plot in FOREIGN_OBJECT_PLOTS)
    opening = _tell(SECTIONS["opening" if rng.random() < 0.45 else "start"][0], rng, slots, banned)
    for section, chance in (("habit", 0.8), ("weather", 0.25)):
        if rng.random() < chance:
            opening += " " + _tell(SECTIONS[section][0], rng, slots, banned)
    paragraphs = [opening, *(_tell(beats, rng, slots) for beats in SECTIONS[plot])]
    if rng.random() < 0.5:
        paragraphs[-1] += " " + _tell(SECTIONS["ending"][0], rng, slots)
    if rng.random() < 0.3:  # some stories have fewer, longer paragraphs
        paragraphs[:2] = [" ".join(paragraphs[:2])]
    text = "\n\n".join(tidy(p) for p in paragraphs)
    return Story(text, slots["N"], slots["kind"], slots["obj"], slots["place"], TITLES[plot])


def make_note(rng: random.Random) -> str:
    """A few sentences that somebody tells about a pet."""
    return tidy(_tell(SECTIONS["me"][0], rng, cast(rng, kind="cat")))


_LATER_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def from_the_middle(text: str, rng: random.Random) -> str:
    """The text from a random sentence of its first half on."""
    starts = [
        m.end()
        for m in _LATER_SENTENCE.finditer(text, 0, len(text) // 2)
        if text.count('"', 0, m.end()) % 2 == 0
    ]
    return text[rng.choice(starts) :] if starts else text


def make_description(rng: random.Random) -> str:
    """A short piece of prose without a plot: seasons, markets, places."""
    slots = cast(rng)
    told: list[str] = []
    for beat in SECTIONS["describe"][0]:
        picked = rng.sample(beat.wordings, rng.choice((1, 2, 2, 3)))
        told += [node(rng, slots) for _, node in picked]
    return tidy(" ".join(told))


def book_paragraphs(text: str) -> list[str]:
    """Paragraphs of a plain-text book, one line each, without the licence text around it."""
    start, end = text.find("*** START OF"), text.find("*** END OF")
    if start >= 0:
        text = text[text.index("\n", start) : end if end > 0 else len(text)]
    paragraphs = re.split(r"\n\s*\n", text.replace("\r", "").replace("\ufeff", ""))
    return [p.strip() for p in paragraphs if p.strip()]


def unwrap(paragraph: str) -> str:
    """Join the lines of one hard-wrapped paragraph."""
    return re.sub(r"\s*\n\s*", " ", paragraph)


if __name__ == "__main__":
    generator = random.Random()
    for _ in range(3):
        print(make_story(generator).text, "\n\n-----\n")
