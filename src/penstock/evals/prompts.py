"""Builds prompts of an exact number of tokens: a stretch of text, statements at depths of it, a question
behind it, and the chat template around all that."""

import random
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import ConfigError, RequestError
from penstock.evals.phrases import CHAT_LEAD, RAW_ANSWER, RAW_LEAD

ANSWER_TOKENS = 64
"""Tokens of a length that are left free for the answer. A length is of prompt and answer together, as a
model's context is."""
_MARK = "PROMPT-STANDS-HERE"
_TRIES = 64
_PARAGRAPHS = 64
"""Paragraphs that are encoded as one text: enough that hardly a token differs from those of the whole text,
and several threads can share a long one."""
_MOST_TEXT = 4_000_000
"""Letters of a given text at most. What is beyond is not read."""


@dataclass(frozen=True, slots=True)
class Question:
    """Holds a question behind a text. answer_head: the first words of the answer, which end the prompt of a
    model without a chat template."""

    instruction: str
    question: str
    answer_head: str


class Dress:
    """Wraps prompts: in the model's chat template, or, with `raw` and where it has none, in what its
    tokenizer puts around a text and the beginning of the answer."""

    def __init__(self, tokenizer: Tokenizer, raw: bool) -> None:
        self.tokenizer = tokenizer
        self.chat, self._before, self._after = False, "", ""
        if not raw:
            try:
                self._before, self._after = tokenizer.render_chat([{"role": "user", "content": _MARK}]).split(
                    _MARK
                )
                self.chat = True
            except (RequestError, ValueError):  # no template, or none that takes a lone message as it is
                pass
        plain = tokenizer.encode("a", special=False)
        # Some tokenizers put a blank before every text: it would be a second one in the midst of a prompt.
        self._adds_blank = tokenizer.token_bytes(plain[0]).startswith(b" ")
        whole = tokenizer.encode("a")
        at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        self._first, self._last = ([], []) if self.chat else (whole[:at], whole[at + len(plain) :])

    def inner(self, text: str) -> list[int]:
        """Return the tokens of a text in the midst of a prompt. It begins with a blank or a new line."""
        return self.tokenizer.encode(text[1:] if self._adds_blank and text[0] == " " else text, special=False)

    def ends(self, asked: Question) -> tuple[list[int], list[int]]:
        """Return the tokens before the text and those behind it."""
        first = self._first + self.tokenizer.encode(self._before + asked.instruction, special=False)
        if self.chat:
            return first, self.inner(f"{CHAT_LEAD}{asked.question}{self._after}")
        return first, self.inner(f"{RAW_LEAD}{asked.question}{RAW_ANSWER}{asked.answer_head}") + self._last


class Haystack:
    """Cuts stretches out of a text in tokens. The text is repeated where a stretch of `longest` tokens needs
    more."""

    def __init__(self, text: str, dress: Dress, longest: int) -> None:
        """Encode the text. Raises ConfigError if it is empty."""
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
        parts = [
            "\n\n" + "\n\n".join(paragraphs[at : at + _PARAGRAPHS])
            for at in range(0, len(paragraphs), _PARAGRAPHS)
        ]
        tokens = [token for part in dress.tokenizer.encode_batch(parts, special=False) for token in part]
        if not tokens:
            raise ConfigError(
                "the text that hides the needles is empty; give --text a file or a folder with words in it, "
                "or leave it out"
            )
        tokens *= -(-2 * longest // len(tokens)) if len(tokens) < 2 * longest else 1
        shown = {token: dress.tokenizer.token_bytes(token) for token in set(tokens)}
        begins = {token for token, text in shown.items() if text[:1].isspace()}
        closes = {
            token
            for token, text in shown.items()
            if text.rstrip(b"\"'\xe2\x80\x9d\x99").endswith((b".", b"!", b"?"))
        }
        words = [i for i in range(1, len(tokens)) if tokens[i] in begins]
        self._tokens, self._begins = tokens, begins
        # Where a statement may stand: between sentences, in a text without any between words or letters.
        self._ends = [i for i in words if tokens[i - 1] in closes] or words or list(range(1, len(tokens)))

    def stretch(self, count: int, rng: random.Random) -> tuple[list[int], list[int]]:
        """Return `count` tokens from the beginning of a word to the end of a sentence, and the places in them
        where statements may stand."""
        least = min(bisect_left(self._ends, count), len(self._ends) - 1)
        for _ in range(_TRIES):
            end = max(rng.choice(self._ends[least:]), count)
            if self._tokens[end - count] in self._begins:
                break
        start = end - count
        inside = self._ends[bisect_left(self._ends, start + 1) : bisect_left(self._ends, end)]
        return self._tokens[start:end], [0, *(place - start for place in inside), count]


def text_of(path: Path) -> str:
    """Read a text file, or all of a folder's .txt files. Raises ConfigError."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no .txt files; give a text file, or a folder with some")
    texts, letters = [], 0
    for file in files:
        if letters < _MOST_TEXT:
            try:
                with file.open(encoding="utf-8-sig") as opened:
                    texts.append(opened.read(_MOST_TEXT - letters))
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{file} is not valid UTF-8; convert it, for example with iconv -f latin1 -t utf-8"
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"cannot read {file}: {error.strerror}; name a file that can be read"
                ) from error
            letters += len(texts[-1])
    return "\n\n".join(texts)


def fill(
    length: int,
    asked: Question,
    statements: Sequence[tuple[float, str]],
    haystack: Haystack,
    dress: Dress,
    rng: random.Random,
) -> list[int]:
    """Return a prompt of exactly `length` less ANSWER_TOKENS tokens. Raises RequestError if there is no room.

    statements: texts with their depths in the haystack, from 0 (before it) to 1 (behind it). Each stands at
        the nearest end of a sentence, in their order where these are the same.
    """
    before, after = dress.ends(asked)
    hidden = [(depth, dress.inner(f" {statement}")) for depth, statement in statements]
    text, places = haystack.stretch(
        room(length, len(before) + len(after) + sum(len(tokens) for _, tokens in hidden)), rng
    )
    put = sorted(
        ((min(places, key=lambda place: abs(place - depth * len(text))), tokens) for depth, tokens in hidden),
        key=lambda it: it[0],
    )
    prompt, done = before, 0
    for place, tokens in put:
        prompt += text[done:place] + tokens
        done = place
    return prompt + text[done:] + after


def room(length: int, taken: int) -> int:
    """Return the tokens that a prompt of `taken` tokens and its answer leave of `length`. Raises RequestError
    if there are none."""
    left = length - taken - ANSWER_TOKENS
    if left < 1:
        raise RequestError(
            f"a length of {length:,} tokens has no room for the question, which takes {taken:,}, and "
            f"{ANSWER_TOKENS} for the answer; "
            "give longer --lengths"
        )
    return left
