"""Turns tokens into text as they arrive: whole characters only, and nothing that a stop string may still take
back."""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import tokenizers

from penstock.base.errors import UnsupportedModelError

# Byte-level BPE writes each byte as one printable character (Radford et al. 2019): itself, or the next one
# from U+0100 on.
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_SHOWN)))
}
_SEPARATE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Decoders that treat each token by itself, but for the start of the text. Then a token's share of a text is
known at once."""


@contextmanager
def failures_as(fault: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `fault` of the reason, in one line, where the tokenizers library fails within this block.

    Where the library panics it raises what is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise fault(" ".join(str(error).split())) from error


def growth_of(part: "tokenizers.normalizers.Normalizer | tokenizers.decoders.Decoder | None") -> int:
    """Return how many times as long a text may become by this part of a tokenizer. Replacements one after
    another multiply."""
    if part is None:
        return 1
    return _grown(json.loads(part.__getstate__()))


def _grown(step: dict[str, Any]) -> int:
    if step["type"] == "Sequence":
        return prod(map(_grown, step.get("normalizers") or step.get("decoders") or ()))
    if step["type"] != "Replace":
        return 1
    [(kind, pattern)] = step["pattern"].items()
    if kind == "String" and pattern:
        return max(-(-len(step["content"]) // len(pattern)), 1)
    return len(step["content"]) + 1  # An expression may match between all characters.


_WHOLE = {"ByteLevel", "Sequence", "Split", "Digits", "Metaspace", "Punctuation"}
"""Ways to cut a text that leave nothing of it out, unless they are set to remove what they find."""


def longest_share(tokenizer: tokenizers.Tokenizer) -> int:
    """Return the bytes of a text without its blanks that one token stands for at most; 0 where that cannot be
    said: part of the text may be left out, or any number of characters become one token."""
    model, vocabulary = tokenizer.model, tokenizer.get_vocab()
    before = tokenizer.pre_tokenizer.__getstate__().decode() if tokenizer.pre_tokenizer else ""
    if (
        not isinstance(model, tokenizers.models.BPE)
        or '"Removed"' in before
        or set(re.findall(r'"type":"(\w+)"', before)) - _WHOLE
    ):
        return 0
    known = '"ByteLevel"' in before and vocabulary.keys() >= _BYTE_OF.keys()
    if not known and not (
        model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    ):
        return 0
    shrunk = _shrunk(json.loads(tokenizer.normalizer.__getstate__())) if tokenizer.normalizer else 1
    return shrunk * max(len(name.encode()) for name in vocabulary)


def _shrunk(step: dict[str, Any]) -> int:
    """Return how many bytes of a text may become one by this part of a normalizer; 0 if any number."""
    if step["type"] == "Sequence":
        return prod(map(_shrunk, step["normalizers"]))
    if step["type"] == "Replace":
        [(kind, pattern)] = step["pattern"].items()
        return int(kind == "String" and len(step["content"].encode()) >= len(pattern.encode()))
    return {"Prepend": 1, "NFC": 4}.get(
        step["type"], 0
    )  # A composed character has at least a quarter of its parts' bytes.


class Pieces:
    """Learns the bytes that each token adds to a text from the tokenizer's own decoder, and keeps them.

    Several threads may ask at once: at worst both compute the same entry. Raises UnsupportedModelError for a
    decoder by which a token's text depends on its neighbours.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        decoder = tokenizer.decoder
        state = decoder.__getstate__().decode() if decoder else ""
        kinds = set(re.findall(r'"type":"(\w+)"', state)) - {"Sequence"}
        odd = kinds - _SEPARATE or re.findall(r'"start":[2-9]|"stop":[1-9]', state)
        if odd or ("ByteLevel" in kinds and kinds & {"Metaspace", "Replace", "Strip"}):
            raise UnsupportedModelError(
                f"tokenizer.json has the decoder {state}, which is not supported; use a checkpoint with one "
                f"of these: {', '.join(sorted(_SEPARATE))}"
            )
        self._tokenizer = tokenizer
        self._decode = decoder.decode if decoder else " ".join
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._known: dict[int, tuple[bytes, bytes]] = {}
        self.special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )

    def of(self, token: int) -> tuple[bytes, bytes]:
        """Return the bytes that a token adds as the first of a text, and those that it adds later. Both are
        empty for a token that the tokenizer does not know."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._learn(self._tokenizer.id_to_token(token))
        return piece

    def _learn(self, name: str | None) -> tuple[bytes, bytes]:
        if name is None:
            return b"", b""
        if self._byte_level:
            plain = all(character in _BYTE_OF for character in name)
            piece = bytes(_BYTE_OF[character] for character in name) if plain else name.encode()
            return piece, piece
        first, later = self._decode([name]), self._decode(["a", name]).removeprefix("a")
        piece = later.encode()
        if self._byte_fallback and re.fullmatch(
            "<0x[0-9A-Fa-f]{2}>", name
        ):  # half a character has no text of its own
            piece = bytes([int(name[3:5], 16)])
        return (piece if first == later else first.encode()), piece


class Detokenizer:
    """Gives out the text of one output as it becomes certain.

    All of it together is `Tokenizer.decode` of all tokens, if no stop string was met, with one exception:
    tokenizers with byte fallback show every byte of an ill-formed run of byte tokens as U+FFFD, also its
    whole characters, which a stream has given out by then. Here the run reads as `bytes.decode("utf-8",
    "replace")`, as byte-level tokenizers do anyway.

    Of several stop strings the one that is complete first ends the text, the longest of those that end
    together. So the result does not depend on how the tokens were cut into pushes.
    """

    def __init__(
        self,
        pieces: Pieces,
        stop: Sequence[str],
        include_stop: bool,
        skip_special: bool,
        continues: bool,
        kept: Collection[int] = (),
    ) -> None:
        """Begin a text.

        stop: no empty strings.
        continues: whether the output goes on from text before it, so that a space at its start counts.
        kept: special tokens that are not skipped with the others.
        """
        self._pieces = pieces
        self._skipped = pieces.special.difference(kept) if skip_special else frozenset[int]()
        self._stop = tuple(stop)
        self._looks = bool(stop)
        """True while stop strings are looked for."""
        self._within = frozenset("".join(stop))
        self._include_stop = include_stop
        self._started = continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # whole characters that may be the beginning of a stop string
        self._given: list[str] = []
        self.stopped = False
        self.matched = ""
        """The stop string that has ended the text."""

    @property
    def text(self) -> str:
        """Return the text that was given out so far."""
        return "".join(self._given)

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is now certain: empty while a character or a stop string may be incomplete,
        and after a stop."""
        if self.stopped:
            return ""
        added = bytearray()
        for token in tokens:
            if token not in self._skipped:
                first, later = self._pieces.of(token)
                added += later if self._started else first
                self._started = self._started or bool(later)
        return self._release(self._utf8.decode(bytes(added)), last=False)

    def finish(self) -> str:
        """Return the text that is left, half a character as U+FFFD. Nothing may be pushed after it."""
        return "" if self.stopped else self._release(self._utf8.decode(b"", final=True), last=True)

    def _release(self, new: str, *, last: bool) -> str:
        if not self._looks:
            self._given.append(new)
            return new
        text, self._held = self._held + new, ""
        met = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if met:
            end, start = min(met)
            self.stopped, self.matched = True, text[start:end]
            text = text[: end if self._include_stop else start]
        elif not last and text[-1:] in self._within:
            begun = (
                n
                for stop in self._stop
                for n in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:n])
            )
            certain = len(text) - max(begun, default=0)
            text, self._held = text[:certain], text[certain:]
        self._given.append(text)
        return text


@dataclass(frozen=True, slots=True)
class Headers:
    """Says where the texts of messages are, in outputs that have headers before them.

    marks: tokens at which a text ends. text: the one of them behind which one begins.
    within: whether the output begins within a text.
    """

    marks: frozenset[int]
    text: int
    within: bool


class MessageDetokenizer(Detokenizer):
    """Gives out the text of one output whose messages have headers: stop strings end texts of messages."""

    def __init__(
        self,
        headers: Headers,
        pieces: Pieces,
        stop: Sequence[str],
        include_stop: bool,
        skip_special: bool,
        continues: bool,
        kept: Collection[int] = (),
    ) -> None:
        """Begin a text. All but `headers` is as of Detokenizer."""
        super().__init__(pieces, stop, include_stop, skip_special, continues, kept)
        self._headers, self._looks = headers, headers.within

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is now certain, as of Detokenizer."""
        said = list[str]()
        for token in tokens:
            if token in self._headers.marks:  # No stop string goes on over a mark: what was held is certain.
                said.append(self._held)
                self._given.append(self._held)
                self._looks, self._held = False, ""
            said.append(super().push([token]))
            self._looks = self._looks or token == self._headers.text
        return "".join(said)
