"""Hides facts in long texts and asks for them: the questions of the retrieval training and of the retrieval
evaluation."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Protocol

import story_words as words

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | "
    "trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def distinct(*lists: list[str]) -> list[str]:
    return list(dict.fromkeys(word for some in lists for word in some))


GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "

PERSON_LABELS = words.listed(
    "secret code|passkey|lucky number|ticket number|room number|locker number|phone number|badge "
    "number|house number|account number|"
    "membership number|access code|door code|customer number|seat number|license number|favorite "
    "number|order number|PIN|passport number",
    "|",
)
THING_LABELS = words.listed(
    "number|code|price|serial number|weight|secret number|access code|registration number|value|key "
    "code|lock code|year",
    "|",
)
PLAIN_KEYS = words.listed(
    "the passkey|the pass key|the secret number|the magic number|the secret code|the hidden number|the "
    "special number|the password|"
    "the access code|the answer code|the code word|the secret key",
    "|",
)
ADJECTIVES = distinct(
    words.COLORS,
    words.MATERIALS,
    words.listed(
        "big small heavy broken lost secret ancient dusty narrow bright dark empty little lonely royal "
        "quiet northern southern "
        "eastern western hidden frozen crooked stone iron marble first second third last"
    ),
)
NOUNS = distinct(
    words.OBJECTS,
    words.MAMMALS,
    words.BIRDS,
    words.FLOWERS,
    words.listed(
        "tower bridge train ship engine wheel door window room vault cabinet chest safe garden mill ticket "
        "station library "
        "museum machine desk bottle crown sword lamp carriage chair table painting statue clock telescope "
        "rocket robot camera "
        "computer guitar piano violin bicycle truck tractor hotel bakery factory school market"
    ),
)
VALUE_WORDS = distinct(
    words.COLORS,
    words.OBJECTS,
    words.FLOWERS,
    words.TREES,
    words.MAMMALS,
    words.listed(
        "river mountain ocean copper silver thunder winter summer morning shadow crystal falcon harbor "
        "meadow island comet "
        "dragon forest velvet amber storm candle marble garden pepper sugar"
    ),
)
SYLLABLES = words.listed(
    "ka lo mi ra ven tor bel na sha dri zo ul wen fa gri pol mar tes ku ly an ro sil va jen do kir ma ne pa "
    "qui ri so ta vo xa yu ze bra el"
)

STATEMENTS = (
    "{Np} is {v}.",
    "{Np} is {v}.",
    "{Np} is {v}.",
    "Remember: {np} is {v}.",
    "Remember that {np} is {v}.",
    "Please note that {np} is {v}.",
    "By the way, {np} is {v}.",
    "Do not forget: {np} is {v}.",
    "Everybody should know that {np} is {v}.",
    "I was told that {np} is {v}.",
    "Write this down: {np} is {v}.",
    "Somebody wrote on the wall that {np} is {v}.",
    "{Np}: {v}.",
    "{Np} is: {v}.",
    "Important: {np} is {v}.",
    "On a piece of paper it said that {np} is {v}.",
    "There is one thing to remember: {np} is {v}.",
    "It is a secret, but {np} is {v}.",
    "{Np} was {v}.",
    "{Np} = {v}.",
)
QUESTIONS = (
    "What is {np}?",
    "What is {np}?",
    "What is {np}?",
    "What was {np}?",
    "Tell me {np}.",
    "Please tell me {np}.",
    "Can you tell me {np}?",
    "Do you remember {np}?",
    "I need {np}.",
    "According to the text, what is {np}?",
    "What is {np} mentioned in the text?",
    "What did the text say about {np}?",
    "Give me {np}.",
    "Do you know what {np} is?",
    "Could you find {np} in the text?",
    "{Np}?",
    "Please find {np}.",
    "In the text above, what is {np}?",
    "Which value is {np}?",
    "what is {np}",
    "And {np}?",
)
INSTRUCTIONS = (
    "",
    "",
    "",
    "",
    "Read the text and answer the question at the end.",
    "Here is a text.",
    "Read this carefully:",
    "Text:",
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will "
    "quiz you about the important "
    "information there.",
    "Answer the question with the help of the following text.",
    "Some special magic numbers are hidden within the "
    "following text. Make sure to memorize it. I will quiz you about the numbers afterwards.",
    "Remember everything that you read.",
)
QUESTION_LEADS = (
    "\n\n",
    "\n\n",
    "\n\n",
    "\n",
    " ",
    "\n\nQuestion: ",
    "\nQuestion: ",
    "\n\nNow the question: ",
    "\n\nThe text ends here. ",
)
PLAIN_LEADS = (("\n\n", " "), (" ", " "), ("\n", " "), ("\n\nQuestion: ", "\nAnswer: "), ("\nQ: ", "\nA: "))
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about long texts.",
    "You are a friendly storyteller with a good memory.",
    "Answer briefly.",
    "Be helpful and honest.",
)


class Encoder(Protocol):
    """What is needed of a tokenizer: `encode` gives token ids, or an object with `ids`."""

    def encode(self, text: str) -> object: ...


@dataclass(frozen=True)
class Fact:
    """A hidden fact. The answer to the question is `answer_head`, a blank, `value` and a full stop."""

    key: str
    value: str
    statement: str
    question: str
    answer_head: str

    @property
    def answer(self) -> str:
        return f"{self.answer_head} {self.value}."


@dataclass(frozen=True)
class Sample:
    """One question about a long text. The model continues `prompt` with `answer`."""

    messages: list[dict[str, str]]
    prompt: str
    answer: str
    value: str
    tokens: int
    depth: float


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """What CHAT_TEMPLATE gives, without a template engine. It begins with <|endoftext|>, which the tokenizer
    must not add again."""
    turns = "".join(f"<|{m['role']}|>{m['content'].strip()}{END_OF_TURN}" for m in messages)
    return END_OF_TEXT + turns + ASSISTANT * add_generation_prompt


def _up(text: str) -> str:
    return text[0].upper() + text[1:]


def _invented(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3))))


class FactMaker:
    """Draws facts for one text. Keys are unique in it, and half of the texts draw from few words, so that
    keys look alike."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[str] = set()
        narrow = rng.random() < 0.5
        self.names = [self._name() for _ in range(8 if narrow else 64)]
        self.person_labels = rng.sample(PERSON_LABELS, 4) if narrow else PERSON_LABELS
        self.thing_labels = rng.sample(THING_LABELS, 2) if narrow else THING_LABELS
        self.adjectives = rng.sample(ADJECTIVES, 8) if narrow else ADJECTIVES
        self.nouns = rng.sample(NOUNS, 8) if narrow else NOUNS

    def _name(self) -> str:
        rng = self.rng
        return (
            _up(_invented(rng))
            if rng.random() < 0.3
            else rng.choice(words.GIRLS if rng.random() < 0.5 else words.BOYS)
        )

    def _key(self) -> tuple[str, str]:
        """Two wordings of one key; the answer uses the first."""
        rng, draw = self.rng, self.rng.random()
        if draw < 0.4:
            name, label = rng.choice(self.names), rng.choice(self.person_labels)
            return f"the {label} of {name}", f"{name}'s {label}"
        if draw < 0.75:
            adjective, noun, label = (
                rng.choice(self.adjectives),
                rng.choice(self.nouns),
                rng.choice(self.thing_labels),
            )
            return f"the {label} of the {adjective} {noun}", f"the {adjective} {noun}'s {label}"
        if draw < 0.8:
            place = f"the {rng.choice(self.adjectives)} {rng.choice(words.PLACES).split()[-1]}"
            return f"the password of {place}", f"the password for {place}"
        if draw < 0.88:
            word = rng.choice(self.nouns) if rng.random() < 0.6 else _invented(rng)
            if rng.random() < 0.3:
                word += "-" + rng.choice(self.nouns)
            return f"the special magic number for {word}", f"one of the special magic numbers for {word}"
        if draw < 0.96:
            project = _up(_invented(rng) if rng.random() < 0.5 else rng.choice(self.nouns))
            label = rng.choice(("code", "budget", "number", "access code", "deadline code", "passkey"))
            return f"the {label} of project {project}", f"the {label} for project {project}"
        key = rng.choice(PLAIN_KEYS)
        return key, key

    def value(self, wordy: bool) -> str:
        rng = self.rng
        if wordy:
            return f'"{rng.choice(VALUE_WORDS)} {rng.choice(VALUE_WORDS)}"'
        digits = rng.choice((4, 4, 5, 5, 5, 5, 6, 6, 7))
        return str(rng.randrange(10 ** (digits - 1), 10**digits))

    def draw(self, key: tuple[str, str] | None = None) -> Fact:
        """A fact with a key that this text does not have yet."""
        rng = self.rng
        while key is None or key[0] in self.used:
            key = self._key()
        self.used.add(key[0])
        canonical, other = key
        said = other if rng.random() < 0.25 else canonical
        asked = said if rng.random() < 0.4 else canonical
        if asked.startswith("one of"):
            asked = canonical
        value = self.value(rng.random() < (0.6 if "password" in canonical or "word" in canonical else 0.06))
        statement = rng.choice(STATEMENTS).format(np=said, Np=_up(said), v=value)
        question = rng.choice(QUESTIONS).format(np=asked, Np=_up(asked))
        if rng.random() < 0.05:
            statement += f" Remember it. {value} is {said}."
        return Fact(canonical, value, statement, question, f"{_up(canonical)} is")


_SENTENCE_END = re.compile(r"[.!?][\"\u201d\u2019]?(?=\s)")


def _count(tokenizer: Encoder, text: str) -> int:
    encoded = tokenizer.encode(text)
    return len(getattr(encoded, "ids", encoded))  # type: ignore[arg-type]


def haystack(tokens: int, rng: random.Random, tokenizer: Encoder, text: str) -> str:
    """A stretch of `text` (repeated where it is too short) that starts at a paragraph and has at most
    `tokens` tokens, few less."""
    if tokens <= 0:
        return ""
    start = text.find("\n\n", rng.randrange(max(len(text) // 2, 1)))
    source = text[max(start, 0) :].lstrip()
    size = tokens * 4
    low = 0
    for _ in range(8):
        while len(source) < size:
            source += "\n\n" + text.strip()
        count = _count(tokenizer, source[:size])
        if 0.99 * tokens - 32 <= count <= tokens - 1:
            low = size
            break
        size = max(1, int(size * (tokens - 1) / max(count, 1)) - 8)
        low = size
    piece = source[:low]
    ends = [m.end() for m in _SENTENCE_END.finditer(piece)]
    return piece[: ends[-1]] if ends else piece.rstrip()


def hide(document: str, statements: list[str], depths: list[float]) -> str:
    """Put each statement at the sentence boundary nearest to its depth (0: before the text, 1: after it)."""
    bounds = [0, *(m.end() for m in _SENTENCE_END.finditer(document)), len(document)]
    places = sorted(
        (
            (min(bounds, key=lambda b: abs(b - depth * len(document))), s)
            for depth, s in zip(depths, statements, strict=True)
        ),
        reverse=True,
    )
    for place, statement in places:
        before, after = document[:place], document[place:]
        document = (
            before
            + (" " if before else "")
            + statement
            + (" " if after and not after[0].isspace() else "")
            + after
        )
    return document


def make_sample(
    length_tokens: int,
    depth: float,
    rng: random.Random,
    tokenizer: Encoder,
    text: str,
    style: str = "chat",
    distractors: int = 3,
) -> Sample:
    """A prompt of at most `length_tokens` tokens with one fact at `depth` (0 to 1) that is asked for, and
    others that are not.

    style "chat": text and question are one user message. style "plain": the answer's beginning follows the
    question without any roles. style "passkey": plain, with "the pass key" as its only fact.
    """
    maker = FactMaker(rng)
    fact = maker.draw(("the pass key", "the pass key") if style == "passkey" else None)
    others = [] if style == "passkey" else [maker.draw() for _ in range(distractors)]
    statements = [fact.statement, *(f.statement for f in others)]
    depths = [depth, *(rng.random() for _ in others)]
    instruction = rng.choice(INSTRUCTIONS)
    lead, between = rng.choice(PLAIN_LEADS)
    if style == "chat":
        lead, tail = rng.choice(QUESTION_LEADS), ""
    else:
        tail = between + fact.answer_head
    frame = (instruction + "\n\n" if instruction else "") + " ".join(statements) + lead + fact.question + tail
    body = haystack(length_tokens - _count(tokenizer, frame) - 8, rng, tokenizer, text)
    document = (instruction + "\n\n" if instruction else "") + hide(body, statements, depths)
    content = document + lead + fact.question
    messages = [{"role": "user", "content": content}]
    prompt = render_chat(messages) if style == "chat" else content + tail
    answer = fact.answer if style == "chat" else f" {fact.value}."
    return Sample(messages, prompt, answer, fact.value, _count(tokenizer, prompt), depth)
