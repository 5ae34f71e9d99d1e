"""Words and sentences of the tasks: facts and questions as the shipped model was trained with
(`tools/needles.py`), and text to hide them in."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


def _listed(text: str) -> list[str]:
    return text.split("|")


NAMES = _listed(
    "Anna|Mary|Lily|Rosa|Clara|Emma|Nora|Ruth|Jane|Alice|Daisy|Hannah|Julia|Greta|Lucy|Sophie|"
    "Tom|Ben|Sam|Max|Jack|Leo|Paul|Peter|Oscar|Henry|Felix|Hugo|Otto|Emil|Simon|Walter"
)
PERSON_LABELS = _listed(
    "secret code|passkey|lucky number|ticket number|room number|locker number|phone number|badge number"
)
THING_LABELS = _listed("number|code|price|serial number|secret number|access code|lock code")
ADJECTIVES = _listed(
    "red|blue|green|white|golden|silver|wooden|copper|old|big|small|heavy|broken|lost|ancient|dusty|hidden|crooked|iron"
)
NOUNS = _listed(
    "tower|bridge|train|ship|engine|wheel|door|window|vault|cabinet|chest|mill|station|library|museum|clock|rocket|bell"
)
SYLLABLES = _listed(
    "ka|lo|mi|ra|ven|tor|bel|na|sha|dri|zo|ul|wen|fa|gri|pol|mar|tes|ku|ly|an|ro|sil|va|jen|do|kir"
)

STATEMENTS = (
    "{Np} is {v}.",
    "Remember: {np} is {v}.",
    "Please note that {np} is {v}.",
    "By the way, {np} is {v}.",
    "Do not forget: {np} is {v}.",
    "I was told that {np} is {v}.",
    "Write this down: {np} is {v}.",
)
QUESTIONS = (
    "What is {np}?",
    "Tell me {np}.",
    "Can you tell me {np}?",
    "According to the text, what is {np}?",
    "Do you remember {np}?",
)
INSTRUCTIONS = (
    "Here is a text.",
    "Read the text and answer the question at the end.",
    "Remember everything that you read.",
)
CHAT_LEAD = "\n\n"
RAW_LEAD, RAW_ANSWER = "\n\nQuestion: ", "\nAnswer: "

_PLACES = _listed(
    "forest|meadow|old "
    "mill|market|hill|lake|village|garden|bridge|orchard|harbor|castle|valley|farm|lighthouse|pond|barn|river"
)
_KINDS = _listed(
    "fox|rabbit|hedgehog|baker|miller|shepherd|sailor|gardener|painter|owl|robin|farmer|cat|goat|duck"
    "|little girl|old man|boy"
)
_THINGS = _listed(
    "kite|lantern|drum|whistle|basket|key|hat|scarf|ball|blanket|button|spoon|teapot|flute|map|ribbon|feather|compass|jar"
)
_LOOKS = _listed(
    "red|blue|yellow|brown|golden|wooden|shiny|painted|new|tiny|round|heavy|strange|beautiful|broken"
)
_WEATHER = _listed(
    "The sun was warm and the sky was clear|A cool wind blew over the fields|It was raining a little|Snow "
    "lay on the roofs|The leaves "
    "were turning red|White clouds moved slowly by|The air smelled of hay|Fog hung over the water"
)
_SENTENCES = (
    "{weather}, and {who} went to the {place}.",
    "{Who} found a {look} {thing} near the {place}.",
    '"Have you seen my {thing}?" asked {name}.',
    '"It must be somewhere by the {place}," said {name}, and smiled.',
    "{weather}.",
    "So {name} carried the {look} {thing} all the way to the {place}.",
    "In the evening they sat together by the {place} and talked about the {thing}.",
    "{Who} lived in a small house behind the {place}.",
    "Nobody knew where the {look} {thing} had come from.",
    "{name} laughed, and {who} laughed too.",
    "First they looked under the {thing}, then behind the {place}, but there was nothing.",
    "The next morning {who} was already waiting at the {place} with a {look} {thing}.",
    "It was a long walk from the {place} to the {place2}, and {name} grew tired.",
    "{name} gave {who} the {thing}, and was given a {look} {thing2} for it.",
    "Then it grew quiet at the {place}.",
    '"Thank you," said {who}, "I have always wanted a {look} {thing}."',
    "For many days they told each other stories of the {place2} and of a {look} {thing}.",
    "{Who} shook {name}'s hand and walked on towards the {place}.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A number has a name. The answer begins with `answer_head`, as the shipped model's do; then come a blank
    and `value`."""

    statement: str
    question: str
    answer_head: str
    value: str


def facts(rng: random.Random) -> Iterator[Fact]:
    """Yield facts for one text, without end. No name and no number occurs twice. Names are of few words, so
    that they look alike."""
    names, labels = rng.sample(NAMES, 10), rng.sample(PERSON_LABELS, 4)
    adjectives, nouns, things = rng.sample(ADJECTIVES, 10), rng.sample(NOUNS, 10), rng.sample(THING_LABELS, 3)
    people = [f"the {label} of {name}" for name in names for label in labels]
    objects = [
        f"the {label} of the {adjective} {noun}"
        for adjective in adjectives
        for noun in nouns
        for label in things
    ]
    rng.shuffle(people)
    rng.shuffle(objects)
    used: set[str] = set()
    while people or objects:
        key = (people if not objects or (people and rng.random() < 0.5) else objects).pop()
        value = str(rng.randrange(1000, 10 ** rng.choice((4, 5, 5, 6, 7))))
        if value not in used:
            used.add(value)
            words = {"np": key, "Np": _up(key), "v": value}
            yield Fact(
                rng.choice(STATEMENTS).format(**words),
                rng.choice(QUESTIONS).format(**words),
                f"{_up(key)} is",
                value,
            )


def invented(rng: random.Random, count: int) -> list[str]:
    """Return different words of three syllables that no language has."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(SYLLABLES, k=3))] = None
    return list(words)


def generated_text(rng: random.Random, letters: int) -> str:
    """Return prose of at least so many letters, without a number in it. Paragraphs are parted by blank
    lines."""
    paragraphs, done = [], 0
    while done < letters:
        names, kind = rng.sample(NAMES, 2), rng.choice(_KINDS)
        paragraph = " ".join(_sentence(rng, rng.choice(names), kind) for _ in range(rng.randint(3, 8)))
        paragraphs.append(paragraph)
        done += len(paragraph) + 2
    return "\n\n".join(paragraphs)


def _sentence(rng: random.Random, name: str, kind: str) -> str:
    places, things = rng.sample(_PLACES, 2), rng.sample(_THINGS, 2)
    return rng.choice(_SENTENCES).format(
        name=name,
        who=f"the {kind}",
        Who=f"The {kind}",
        place=places[0],
        place2=places[1],
        thing=things[0],
        thing2=things[1],
        look=rng.choice(_LOOKS),
        weather=rng.choice(_WEATHER),
    )


def _up(text: str) -> str:
    return text[0].upper() + text[1:]
