"""Text to tokens and back, and conversations to prompts, as the files beside a model's weights say."""

import hashlib
import json
import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import tokenizers

from penstock.api.text.detokenize import (
    Detokenizer,
    Headers,
    MessageDetokenizer,
    Pieces,
    failures_as,
    growth_of,
    longest_share,
)
from penstock.api.text.messages import conversation
from penstock.api.text.processes import Pool, Process, serve
from penstock.api.text.rendering import Template
from penstock.base.errors import CheckpointError, PenstockError, RequestError, UnsupportedModelError
from penstock.weights.checkpoint.links import expect_inside
from penstock.weights.gguf.files import is_gguf
from penstock.weights.gguf.tokenizer import read_gguf_tokenizer

MOST_BYTES = 256 << 20
"""Bytes that a tokenizer's file may have; the largest in use have some 35 MiB."""
MOST_GROWTH = 64
"""Times as long as a text may become before it is cut into tokens, or a token's name when it becomes text."""
LONG = 64 << 10
"""Bytes from which on a text is cut into tokens aside, where that is wanted."""
_PATIENCE, _SLOWEST = 60.0, 16 << 10
"""Seconds that a text may take aside, and as many more as it takes at this rate, bytes/s."""
_LOG = logging.getLogger("penstock")
_LEAST, _PLAIN, _SPECIAL = b"l", b"p", b"s"
"""The wishes that are sent with a text: for the number of tokens that it has at least, or for its tokens,
without special ones or with."""
_DONE, _REFUSED, _OTHER = b"d", b"r", b"o"
"""The byte that comes back first: an answer follows, or the reason why there is none, or the file has
changed."""


class Tokenizer:
    """Turns text into tokens and back, by a model's tokenizer.json and its chat templates. After loading
    nothing in it changes but caches: threads may share it."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, names: Mapping[str, str], templates: Mapping[str, str]
    ) -> None:
        """names: what the model calls its special tokens ("bos_token": "<s>"). templates: chat template
        sources by name."""
        tokenizer.no_truncation()  # some files carry the lengths of a training run
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._names = dict(names)
        self._templates = dict(templates)
        self._compiled: dict[str, Template] = {}
        self._pieces = Pieces(tokenizer)
        self._longest: int | None = None
        """Bytes of a text that a token may stand for; 0 if there may be any number of them."""
        self._source: tuple[Path, str] | None = None
        """The directory or file it was read from, and the digest of its tokenizer.json."""
        self._aside: Pool | None = None

    @classmethod
    def from_model(cls, path: Path) -> "Tokenizer | None":
        """Read the tokenizer of a model's directory or of its GGUF file; None if it has none. Raises as
        `from_directory` does, and UnsupportedModelError for a kind of GGUF files that is not read."""
        if is_gguf(path):
            found = read_gguf_tokenizer(path)
            if found is None:
                return None
            templates = _by_name(found.config.get("chat_template") or {})
            return cls._of(path, path, found.tokenizer, found.config, templates)
        return cls.from_directory(path) if (path / "tokenizer.json").exists() else None

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json and chat
        template files.

        Raises CheckpointError naming the file that is missing or damaged. Parsing a large vocabulary holds
        the GIL (0.4 s for 150,000 tokens): in a thread it runs beside reads and copies, not beside Python.
        """
        expect_inside(path)
        file = path / "tokenizer.json"
        source = _read(file)
        config = _table(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # an older config: the map overrules it
            config |= _table(path / "special_tokens_map.json")
        return cls._of(path, file, source, config, _templates(path, config))

    @classmethod
    def _of(
        cls, path: Path, file: Path, source: str, config: Mapping[str, object], templates: Mapping[str, str]
    ) -> "Tokenizer":
        """Return the tokenizer of the model at `path`, of the text of a tokenizer.json, which `file` has or
        stands for."""
        with failures_as(
            lambda why: CheckpointError(f"{file} is not a tokenizer: {why}; fetch the file again")
        ):
            tokenizer = tokenizers.Tokenizer.from_str(source)
        growth = max(growth_of(tokenizer.normalizer), growth_of(tokenizer.decoder))
        if growth > MOST_GROWTH:
            raise CheckpointError(
                f"{file} makes texts {growth:,} times as long, and {MOST_GROWTH} times is the most that is "
                "allowed; use another tokenizer"
            )
        names = {
            key: token
            for key, value in config.items()
            if key.endswith("_token") and (token := _content(value))
        }
        read = cls(tokenizer, names, templates)
        read._source = path, hashlib.sha256(source.encode()).hexdigest()
        return read

    def cut_aside(self) -> None:
        """Cut long texts into tokens in a process of its own from now on, which leaves the processor to
        whatever else wants it.

        A thread that does so holds the interpreter's lock now and then, for 20 ms a megabyte, and others wait
        for it. The process is started with the first long text, and reads the same file; should that have
        changed, it is not used.
        """
        if self._source is not None:
            given = [str(self._source[0]), self._source[1]]
            self._aside = Pool(1, lambda: Process(__name__, "cut", given, yields=True))

    @property
    def bos_token(self) -> str | None:
        """Return the token that begins a text; None if there is none."""
        return self._names.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Return the token that ends a text; None if there is none."""
        return self._names.get("eos_token")

    @property
    def vocabulary_size(self) -> int:
        """Return the number of tokens that the tokenizer knows; an embedding often has a few more rows."""
        return self._tokenizer.get_vocab_size()

    def differing(self, other: "Tokenizer") -> str | None:
        """Return the other tokenizer's first token that has another number here, or none; None if there is no
        such token."""
        mine, theirs = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        differing = [(number, token) for token, number in theirs.items() if mine.get(token) != number]
        return min(differing)[1] if differing else None

    @property
    def templates(self) -> Mapping[str, str]:
        """Return the sources of the chat templates, by name."""
        return self._templates

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    @property
    def special_tokens(self) -> frozenset[int]:
        """Return the special tokens, which have no text."""
        return self._pieces.special

    def is_special(self, token: int) -> bool:
        """Tell whether a token is a special one, which has no text."""
        return token in self._pieces.special

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none if the tokenizer does not know it."""
        return self._pieces.of(token)[1]

    def token_text(self, token: int) -> str:
        """Return a token's text for display: bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, by its length alone; 0 where a tokenizer may leave out
        some of it."""
        if (found := self._done_aside(_LEAST, text)) is not None:
            return int.from_bytes(found, "little")
        if self._longest is None:
            self._longest = longest_share(self._tokenizer)
        if not self._longest:
            return 0
        return -(-len("".join(text.split()).encode("utf-8", "replace")) // self._longest)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        special: whether to add the tokens that tokenizer.json puts around a text. add_bos_token in the config
            changes nothing, as in transformers 5, since the file was written with it in mind.

        Raise RequestError if the text is not valid Unicode.
        """
        if (found := self._done_aside(_SPECIAL if special else _PLAIN, text)) is not None:
            tokens = array("i")
            tokens.frombytes(found)
            return tokens.tolist()
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Return the token ids of each text, as `encode` does. Raise RequestError too where the tokenizer
        fails, such as for characters that it has no token for."""
        for text in texts:
            _check_unicode(text)
        # Without offsets it takes half the time, and unlike `encode` it lets other Python threads run
        # meanwhile.
        return self._encoded(list(texts), special=special)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts that are read together, with the special tokens that
        tokenizer.json puts around a pair. Raise RequestError as `encode_batch` does."""
        for text in (first, second):
            _check_unicode(text)
        return self._encoded([(first, second)], special=True)[0]

    def beginning(self, text: str, most: int) -> str:
        """Return a text as far as its first tokens reach, so many of them: no character of which one is only
        a part. Raise RequestError as `encode_batch` does."""
        _check_unicode(text)
        with failures_as(_no_tokens):
            spans = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].offsets
        if len(spans) <= most:
            return text
        return text[: min(max((stop for _, stop in spans[:most]), default=0), spans[most][0])]

    def _encoded(self, texts: list[str] | list[tuple[str, str]], *, special: bool) -> list[list[int]]:
        with failures_as(_no_tokens):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def _done_aside(self, what: bytes, text: str) -> bytes | None:
        """Return the answer of the process beside, if there is one and the text is long. Raises RequestError
        as `encode` does."""
        aside = self._aside
        if aside is None or len(text) < LONG:
            return None
        _check_unicode(text)
        sent = what + text.encode()
        try:
            found = aside.ask(sent, _PATIENCE + len(sent) / _SLOWEST)
        except (EOFError, OSError) as error:
            why = (
                "took too long"
                if isinstance(error, TimeoutError)
                else "has ended, for want of memory or since it was killed"
            )
            raise PenstockError(
                f"the process that tokenizes long texts {why}; try again, or send a shorter text"
            ) from error
        if found.startswith(_OTHER):
            _LOG.warning(
                "tokenizer.json has changed on disk: long prompts are tokenized in this process, which "
                "slows other requests; restart penstock to read the new file"
            )
            aside.end()
            self._aside = None
            return None
        if found.startswith(_REFUSED):
            raise RequestError(found[1:].decode())
        return found[1:]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; those that the tokenizer does not know are left out. Raises RequestError
        where it fails."""
        with failures_as(
            lambda why: RequestError(
                f"the model's tokenizer cannot turn these tokens into text: {why}; give ids of its vocabulary"
            )
        ):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def detokenizer(
        self,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        *,
        skip_special: bool = True,
        continues: bool = False,
        kept: Collection[int] = (),
        headers: Headers | None = None,
    ) -> Detokenizer:
        """Return a new detokenizer; see Detokenizer."""
        how = self._pieces, stop, include_stop, skip_special, continues, kept
        return MessageDetokenizer(headers, *how) if headers is not None and stop else Detokenizer(*how)

    def template_variables(self, *, tools: bool = False) -> frozenset[str]:
        """Return the names that the chat template reads, of those that `render_chat` may be given. tools:
        whether of the template for conversations with tools. Raise RequestError as `render_chat` does."""
        return self._template(tools).variables

    def render_pair(self, name: str, messages: Sequence[Mapping[str, object]]) -> str:
        """Return the prompt for a query and a document, of the chat template of a name. Raises RequestError
        as `render_chat` does."""
        said = {"messages": conversation(messages, any_role=True), "tools": None, "documents": None}
        return self._template_of(name).render({**self._names, **said, "add_generation_prompt": True})

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True,
                    tools: Sequence[Mapping[str, object]] | None = None,
                    **variables: object) -> str:  # fmt: skip
        """Return the prompt for a conversation.

        variables: more that the model's template reads, such as enable_thinking.

        Raises RequestError for messages of another form, for a model without a template, and for what the
        template refuses.
        """
        template = self._template(tools is not None)
        given = {
            "messages": conversation(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render({**self._names, "documents": None, **variables, **given})

    def _template(self, tools: bool) -> Template:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            what = (
                f"no default chat template, only {', '.join(sorted(self._templates))}"
                if self._templates
                else "no chat template"
            )
            raise RequestError(
                f"this model has {what}; use plain generation: a prompt to continue instead of messages"
            )
        return self._template_of(name)

    def _template_of(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = Template(self._templates[name])
        return self._compiled[name]

    def encode_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True,
                    tools: Sequence[Mapping[str, object]] | None = None,
                    **variables: object) -> list[int]:  # fmt: skip
        """Return the token ids of a conversation. Templates write the special tokens themselves, so none are
        added to what `render_chat` returns."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables),
            special=False,
        )


def cut(directory: str, digest: str) -> None:
    """Do all that a process aside does: a Tokenizer's work on one text after the other."""
    try:
        tokenizer = Tokenizer.from_model(Path(directory))
    except (CheckpointError, UnsupportedModelError):
        tokenizer = None
    if tokenizer is None:
        return serve(lambda _: _OTHER)

    def answer(sent: bytes) -> bytes:
        what, text = sent[:1], sent[1:].decode()
        if tokenizer._source is None or tokenizer._source[1] != digest:
            return _OTHER
        try:
            if what == _LEAST:
                return _DONE + tokenizer.least_tokens(text).to_bytes(8, "little")
            return _DONE + array("i", tokenizer.encode(text, special=what == _SPECIAL)).tobytes()
        except RequestError as fault:
            return _REFUSED + str(fault).encode()

    serve(answer)


def _no_tokens(why: str) -> RequestError:
    return RequestError(
        f"the model's tokenizer has no tokens for this text: {why}; try another, or send token ids"
    )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = (
            f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"surrogate U+{code:04X}"
        )  # a raw byte from the command line
        raise RequestError(
            f"the prompt is not valid UTF-8: {what} at character {error.start}; give it as UTF-8"
        ) from error


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():  # Opening a pipe would wait for its writer for ever.
        raise CheckpointError(
            f"{path} cannot be read: it is not a regular file; fetch the model's directory again"
        )
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise CheckpointError(
                f"{path} has {size:,} bytes, more than the {MOST_BYTES:,} allowed; fetch the model's "
                "directory again"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise CheckpointError(
            f"{path} cannot be read: {reason}; check its permissions, or fetch the file again"
        ) from error


def _table(path: Path) -> dict[str, object]:
    """Return the JSON object in a file, empty if there is no such file."""
    try:
        table = json.loads(_read(path)) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch the file again") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds a {type(table).__name__}, not an object; fetch the file again")
    return table


def _content(value: object) -> str | None:
    """Return a special token, which is written as its text, or as an object with it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _templates(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return chat templates by name: files of their own come before the config, that before the older
    chat_template.json."""
    found = {file.stem: _read(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").exists():
        found["default"] = _read(path / "chat_template.jinja")
    source = (
        found or config.get("chat_template") or _table(path / "chat_template.json").get("chat_template") or {}
    )
    return _by_name(source)


def _by_name(source: object) -> dict[str, str]:
    """Return chat templates by name, of a list of them or of a single one."""
    if isinstance(source, list):
        source = {
            entry["name"]: entry["template"]
            for entry in source
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
    return source if isinstance(source, dict) else {"default": str(source)}
