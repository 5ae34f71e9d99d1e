"""Makes the tokenizer.json and tokenizer_config.json that a GGUF file's metadata stand for.

Two kinds of vocabularies are read: byte-level BPE (`gpt2`), for which texts are first divided as
`tokenizer.ggml.pre` says, and SentencePiece's BPE (`llama`). Both become what the tokenizers library runs.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.weights.gguf.container import Value
from penstock.weights.gguf.files import GGUFFiles
from penstock.weights.jsonfile import shown

MODELS = ("gpt2", "llama")
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
"""Types of tokens, beside normal ones (1) and unused ones (5)."""
_SPACE = "\u2581"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer divides a text before BPE.

    pattern: of the pieces; empty for GPT-2's own, which the tokenizers library has.
    digits: whether each digit is first taken apart.
    whole: whether a piece that is a token stays whole, whatever the merges are.
    composed: whether texts are brought to Unicode's form NFC first.
    begins: whether the token that begins a text is put before it where a file does not say so.
    """

    pattern: str = ""
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False


_GPT2, _QWEN = PreTokenizer(), PreTokenizer(_QWEN2, composed=True)
_LLAMA = PreTokenizer(_LLAMA3, whole=True, begins=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": PreTokenizer(digits=True),
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": PreTokenizer(_TEKKEN, whole=True, begins=True),
}
"""Those that are known, by the name in `tokenizer.ggml.pre`."""


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """Holds a tokenizer as the files beside a model have it.

    tokenizer: text of tokenizer.json.
    config: of tokenizer_config.json: special tokens by their names, and chat templates.
    """

    tokenizer: str
    config: Mapping[str, object]


def read_gguf_tokenizer(path: Path) -> GGUFTokenizer | None:
    """Return the tokenizer in the GGUF file at `path`; None if it has none.

    Raises CheckpointError for a vocabulary that is damaged, UnsupportedModelError for a kind of vocabulary or
    a pre-tokenizer that is not known.
    """
    with GGUFFiles(path) as files:
        metadata = files.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    return _TokenizerMetadata(metadata, path).tokenizer()


class _TokenizerMetadata:
    """Reads the metadata of a tokenizer."""

    def __init__(self, metadata: Mapping[str, Value], path: Path) -> None:
        self._metadata, self._path = metadata, path
        self.tokens = self._strings("tokens")
        kinds = metadata.get("tokenizer.ggml.token_type")
        if kinds is None:
            kinds = array("i", [1]) * len(self.tokens)
        if not isinstance(kinds, array) or len(kinds) != len(self.tokens):
            raise self._fault("token_type", f"an array of {len(self.tokens)} numbers, one for each token")
        self.kinds: Sequence[float] = kinds

    def tokenizer(self) -> GGUFTokenizer:
        """Return the tokenizer."""
        makers: dict[object, Callable[[], dict[str, object]]] = {
            "gpt2": self._byte_level,
            "llama": self._pieces,
        }
        kind = self._metadata.get("tokenizer.ggml.model")
        if not isinstance(kind, str) or kind not in makers:
            raise self._unsupported("model", kind, MODELS)
        body = makers[kind]() | {"version": "1.0", "truncation": None, "padding": None}
        body |= {"added_tokens": self._added(), "post_processor": self._around()}
        names = {name: self._special(key) for name, key in _SPECIAL.items()}
        config: dict[str, object] = {name: token for name, token in names.items() if token is not None}
        return GGUFTokenizer(json.dumps(body, ensure_ascii=False), config | self._templates())

    def _byte_level(self) -> dict[str, object]:
        """Return byte-level BPE, and how texts are divided before."""
        pre = self._metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
            raise self._unsupported("pre", pre, tuple(PRE_TOKENIZERS))
        way, bytes_ = (
            PRE_TOKENIZERS[pre],
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        )
        steps: list[dict[str, object]] = [{"type": "Digits", "individual_digits": True}] if way.digits else []
        if way.pattern:
            split = {
                "type": "Split",
                "pattern": {"Regex": way.pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            steps.append(split)
        steps.append(bytes_ | {"use_regex": not way.pattern})
        merges = [self._merge(merge) for merge in self._strings("merges")]
        return {
            "normalizer": {"type": "NFC"} if way.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": bytes_ | {"use_regex": True},
            "model": self._model(merges, ignore_merges=way.whole),
        }

    def _merge(self, merge: str) -> list[str]:
        """Return the halves of a merge, which a space divides."""
        halves = merge.split(" ")
        if len(halves) != 2 or not all(halves):
            raise self._fault("merges", f"pairs divided by one space, not {shown(merge)}")
        return halves

    def _pieces(self) -> dict[str, object]:
        """Return SentencePiece's BPE: a piece's score says how early it is merged."""
        scores = self._metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, array) or len(scores) != len(self.tokens):
            raise self._fault("scores", f"an array of {len(self.tokens)} numbers, one for each token")
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        spaced = self._metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        before = [{"type": "Prepend", "prepend": _SPACE}] if spaced else []
        after = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []),
        ]
        model = self._model(self._merges_of_scores(scores), ignore_merges=False)
        unknown = next(
            (token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind == _UNKNOWN), None
        )
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, replaced]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": after},
            "model": model | {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown},
        }

    def _merges_of_scores(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """Return the merges that make the pieces, best first: of every way in which a piece is two others."""
        ids = {
            token: at for at, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind not in (_CONTROL, _UNKNOWN, _BYTE)
        }  # fmt: skip
        found = list[tuple[float, int, int, tuple[str, str]]]()
        for token, at in ids.items():
            for cut in range(1, len(token)):
                if (left := ids.get(token[:cut])) is not None and (right := ids.get(token[cut:])) is not None:
                    found.append((-scores[at], left, right, (token[:cut], token[cut:])))
        return [merge for *_, merge in sorted(found)]

    def _model(self, merges: Sequence[Sequence[str]], *, ignore_merges: bool) -> dict[str, object]:
        vocabulary = {token: at for at, token in enumerate(self.tokens)}
        if len(vocabulary) < len(self.tokens):
            twice = next(token for at, token in enumerate(self.tokens) if vocabulary[token] != at)
            raise self._fault("tokens", f"tokens that differ, but {shown(twice)} is there twice")
        known = vocabulary.keys()
        for left, right in merges:
            if left not in known or right not in known or left + right not in known:
                raise self._fault("merges", f"merges of tokens into tokens, not {shown(f'{left} {right}')}")
        return {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": ignore_merges, "vocab": vocabulary, "merges": merges,
        }  # fmt: skip

    def _added(self) -> list[dict[str, object]]:
        """Return the tokens that are found in a text before it is divided: special ones, and a user's."""
        special = {self._token_id(key) for key in _SPECIAL.values()}
        added = []
        for at, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind in (_CONTROL, _UNKNOWN, _USER) or at in special:
                flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
                added.append({"id": at, "content": token, "special": kind != _USER, **flags})
        return added

    def _around(self) -> dict[str, object] | None:
        """Return what puts special tokens around a text."""
        way = PRE_TOKENIZERS.get(str(self._metadata.get("tokenizer.ggml.pre")), _GPT2)
        begins = way.begins or self._metadata.get("tokenizer.ggml.model") == "llama"
        ends: dict[str, str] = {}
        for name, usual in (("bos", begins), ("eos", False)):
            wanted = self._metadata.get(f"tokenizer.ggml.add_{name}_token", usual)
            token = self._special(name)
            if wanted is True and token is not None:
                ends[name] = token
        if not ends:
            return None
        text = {"Sequence": {"id": "A", "type_id": 0}}
        pieces = {name: {"SpecialToken": {"id": token, "type_id": 0}} for name, token in ends.items()}
        single = [
            *([pieces["bos"]] if "bos" in ends else []),
            text,
            *([pieces["eos"]] if "eos" in ends else []),
        ]
        tokens = {
            token: {"id": token, "ids": [self._token_id(name)], "tokens": [token]}
            for name, token in ends.items()
        }
        return {
            "type": "TemplateProcessing", "single": single,
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": tokens,
        }  # fmt: skip

    def _templates(self) -> dict[str, object]:
        """Return the chat templates: one, or some by name."""
        start = "tokenizer.chat_template"
        named = {
            key.removeprefix(f"{start}."): value
            for key, value in self._metadata.items()
            if key.startswith(f"{start}.") and isinstance(value, str)
        }
        if isinstance(usual := self._metadata.get(start), str):
            named["default"] = usual
        if not named:
            return {}
        return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}

    def _special(self, name: str) -> str | None:
        """Return a special token; None if there is none."""
        at = self._token_id(name)
        return None if at is None else self.tokens[at]

    def _token_id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None or (isinstance(value, int) and value in (-1, 2**32 - 1)):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise self._fault(f"{name}_token_id", f"a token of the {len(self.tokens)} in the vocabulary")
        return value

    def _strings(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list):
            raise self._fault(key, "an array of strings")
        try:
            return [one.decode() for one in value]
        except UnicodeDecodeError:
            raise self._fault(key, "strings in UTF-8") from None

    def _fault(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: key tokenizer.ggml.{key} must be {wanted}; fetch the file again"
        )

    def _unsupported(self, key: str, given: object, supported: Sequence[str]) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._path}: key tokenizer.ggml.{key} is {shown(given)}; supported: {', '.join(supported)}; "
            "give prompts as token ids from a checkpoint with a tokenizer.json, or use another file"
        )
