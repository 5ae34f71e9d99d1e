"""Reads how a checkpoint scores a document for a query: the head that makes a number of a hidden state.

Nothing here imports torch: whoever reads prompts does without.
"""

import json
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import mul
from pathlib import Path
from typing import Self

from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.weights.checkpoint.config import read_config
from penstock.weights.checkpoint.pooling import MODULES, POOLING
from penstock.weights.checkpoint.shards import EMBEDDING, HEAD, Shards
from penstock.weights.gguf.files import is_gguf
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, is_size, read_object, read_objects, readable, shown

SCORE = "score.weight"
"""The tensor of a head that scores."""
SCORE_FILE = "score.json"
"""Stands in a pack for all that is read here."""
_CLASSIFIES = "ForSequenceClassification"
_MAX_TOKENIZER_BYTES = 200_000_000
_NAME = re.compile(r"qwen3-reranker", re.IGNORECASE)
_CARD = re.compile(r"^(?:# .*|base_model:\s*(?:-\s*)?\S*)qwen3-reranker", re.IGNORECASE | re.MULTILINE)
"""A model card's title, or what it says that a model was made of."""
_CARD_BYTES = 1 << 16
_FORMS = {"F32": "<f", "F16": "<e", "BF16": "<h"}
"""Dtypes of a head, and what has as many bytes."""


class ScoreActivation(Enum):
    """Names what a head makes of its number."""

    SIGMOID = "sigmoid"
    IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Makes a score of the hidden state of the last token, behind the last norm.

    weights: by which the state's numbers are multiplied, and summed. Of a model that answers yes or no they
        are the difference of both rows of its output matrix, so that the sum is the difference of both
        logits, and its sigmoid the probability of yes against no.
    instructs: whether a pair is put to it as to Qwen3-Reranker (its model card).
    """

    weights: tuple[float, ...]
    activation: ScoreActivation = ScoreActivation.SIGMOID
    instructs: bool = False

    def score(self, hidden: Sequence[float], *, activated: bool = True) -> float:
        """Return the score. activated: else it is the sum alone."""
        total = math.fsum(map(mul, self.weights, hidden))
        if not activated or self.activation is ScoreActivation.IDENTITY:
            return total
        small = math.exp(-abs(total))
        return (1.0 if total >= 0 else small) / (1.0 + small)

    def written(self) -> bytes:
        """Return the head as a pack's file has it."""
        return json.dumps(
            {"weights": self.weights, "activation": self.activation.value, "instructs": self.instructs}
        ).encode()

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Return the head of the checkpoint or pack at `path`; None where a score is the cosine of two
        embeddings.

        A head is a classifier of one label (`...ForSequenceClassification`), or what a model answers: tokens
        that modules.json (sentence-transformers: LogitScore) or the key classifier_from_token of config.json
        (vLLM) name, or yes and no of a Qwen3-Reranker, which is known by its name. Raises
        UnsupportedModelError for what is no reranker, CheckpointError for a file that is damaged.
        """
        if is_gguf(path):
            raise _no_reranker(path, "scores are not read from GGUF files")
        if os.path.lexists(path / SCORE_FILE):
            return cls._read(path / SCORE_FILE)
        config = read_config(path)
        activation, instructs = _activation(path, config), _is_qwen(path, config)
        if classifies(config):
            return cls(_classifier(path), activation, instructs)
        modules = list[Mapping[str, object]]()
        if os.path.lexists(path / MODULES):
            modules += read_objects(path / MODULES, MAX_CONFIG_BYTES)
        by_kind = {str(module.get("type")).rsplit(".", 1)[-1]: module for module in modules}
        if (module := by_kind.get("LogitScore")) is not None:
            return cls(_rows(path, config, *_scored_tokens(path, module)), activation, instructs)
        if (words := config.get("classifier_from_token")) is not None:
            if not isinstance(words, list) or len(words) != 2 or not all(isinstance(w, str) for w in words):
                raise CheckpointError(
                    f"{path / 'config.json'}: key 'classifier_from_token' is {shown(words)}; it must be a "
                    'list of two tokens, such as ["no", "yes"]'
                )
            no, yes = _ids(path, words)
            return cls(_rows(path, config, yes, no), activation, instructs)
        if "Pooling" in by_kind:
            return None
        if instructs:
            no, yes = _ids(path, ["no", "yes"])
            return cls(_rows(path, config, yes, no), activation, instructs)
        raise _no_reranker(path, "it has no head that scores, and nothing that names tokens to score by")

    @classmethod
    def _read(cls, where: Path) -> Self:
        found = read_object(where, MAX_CONFIG_BYTES)
        weights = found.get("weights")
        try:
            numbers = tuple(map(float, weights if isinstance(weights, list) else "none"))
            return cls(numbers, ScoreActivation(found.get("activation")), found.get("instructs") is True)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{where} is not a head that scores; pack the model again") from error


def classifies(config: Mapping[str, object]) -> bool:
    """Tell whether a model ends in a classifier, instead of the logits of tokens."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_CLASSIFIES) for name in names)


def yields_no_text(path: Path) -> str:
    """Return what the checkpoint or pack at `path` does instead of continuing text; empty if it does
    continue it. Raises CheckpointError."""
    if is_gguf(path):
        return ""
    if classifies(read_config(path)):
        return "scores documents"
    modules = read_objects(path / MODULES, MAX_CONFIG_BYTES) if os.path.lexists(path / MODULES) else []
    pools = any(str(module.get("type")).rsplit(".", 1)[-1] == "Pooling" for module in modules)
    return "makes embeddings" if pools else ""


def made_head(path: Path) -> Mapping[str, bytes]:
    """Return the file that a pack of a reranker has of its head, by name; nothing for other models. Raises
    CheckpointError."""
    try:
        head = ScoreHead.of(path)
    except UnsupportedModelError:
        return {}
    return {} if head is None else {SCORE_FILE: head.written()}


def _no_reranker(path: Path, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is no reranker: {why}; use Qwen3-Reranker, a checkpoint of a family that is run with a "
        "classifier of one label (...ForSequenceClassification), or one that makes embeddings"
    )


def _activation(path: Path, config: Mapping[str, object]) -> ScoreActivation:
    """Return what config.json says that is made of the number, as sentence-transformers writes it."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = config.get("sbert_ce_default_activation_function") if named is None else named
    if named is None:
        return ScoreActivation.SIGMOID
    try:
        return ScoreActivation(str(named).rsplit(".", 1)[-1].lower())
    except ValueError as error:
        raise UnsupportedModelError(
            f"{path / 'config.json'} asks for the activation {shown(named)}; supported: Sigmoid, Identity"
        ) from error


def _is_qwen(path: Path, config: Mapping[str, object]) -> bool:
    """Tell whether a checkpoint is a Qwen3-Reranker, or was made of one: nothing but names tells it from a
    model for texts."""
    if config.get("is_original_qwen3_reranker") is True:
        return True
    if config.get("model_type") != "qwen3":
        return False
    place = path.absolute()
    place = place.parent.parent if place.parent.name == "snapshots" else place  # As the Hub's cache has it.
    if _NAME.search(place.name) or _NAME.search(str(config.get("_name_or_path"))):
        return True
    try:
        with (path / "README.md").open("rb") as file:
            return _CARD.search(file.read(_CARD_BYTES).decode("utf-8", "replace")) is not None
    except OSError:
        return False


def _classifier(path: Path) -> tuple[float, ...]:
    shards = Shards(path)
    try:
        if SCORE not in shards.tensors:
            raise CheckpointError(
                f"{path} lacks tensor {SCORE} that config.json calls for; fetch the file that has it"
            )
        shape = shards.tensors[SCORE].entry.shape
        if len(shape) != 2 or shape[0] != 1:
            labels = shape[0] if shape else 0
            raise _no_reranker(path, f"its classifier has {labels} labels, and a score is one number")
        return tuple(_row(shards, SCORE, 0))
    finally:
        shards.close()


def _rows(path: Path, config: Mapping[str, object], yes: int, no: int | None) -> tuple[float, ...]:
    """Return the output matrix's row of a token, less that of another one."""
    shards = Shards(path)
    try:
        name = EMBEDDING if config.get("tie_word_embeddings") is True or HEAD not in shards.tensors else HEAD
        ours = _row(shards, name, yes)
        if no is None:
            return tuple(ours)
        return tuple(one - other for one, other in zip(ours, _row(shards, name, no), strict=True))
    finally:
        shards.close()


def _row(shards: Shards, name: str, row: int) -> list[float]:
    stored = shards.tensors.get(name)
    if stored is None or len(stored.entry.shape) != 2 or row >= stored.entry.shape[0]:
        raise CheckpointError(
            f"{shards.files[0].path.parent} has no row {row} of tensor {name}, by which it is to score; "
            "fetch the checkpoint again"
        )
    dtype, width = stored.entry.dtype, stored.entry.shape[1]
    if dtype not in _FORMS:
        raise UnsupportedModelError(
            f"{stored.file.path}: tensor {name} has dtype {dtype}, and scores are read of "
            f"{', '.join(_FORMS)}; use a checkpoint that leaves it as it was trained"
        )
    size = struct.calcsize(_FORMS[dtype])
    data = bytearray(width * size)
    with readable():
        stored.file.read_into(memoryview(data), stored.entry.offset + row * len(data))
    if dtype == "BF16":  # The upper half of a float32.
        data = bytearray(b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)))
    return list(struct.unpack(f"<{width}{'e' if dtype == 'F16' else 'f'}", data))


def _scored_tokens(path: Path, module: Mapping[str, object]) -> tuple[int, int | None]:
    """Return the tokens by whose logits is scored, as a module says: for, and against."""
    folder = module.get("path")
    if not isinstance(folder, str) or "/" in folder or folder in ("", ".", ".."):
        raise CheckpointError(
            f"{path / MODULES} names the folder {shown(folder)} of its score; fetch it again"
        )
    where = path / folder / POOLING
    config = read_object(where, MAX_CONFIG_BYTES)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not is_size(yes) or not (no is None or is_size(no)):
        raise CheckpointError(f"{where} names the tokens {shown(yes)} and {shown(no)}; fetch it again")
    return yes, no


def _ids(path: Path, words: Sequence[str]) -> list[int]:
    """Return the ids of tokens. Raises UnsupportedModelError for a tokenizer that does not have one."""
    read = read_object(path / "tokenizer.json", _MAX_TOKENIZER_BYTES)
    model, added = read.get("model"), read.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    known: dict[str, object] = dict(vocab) if isinstance(vocab, dict) else {}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            known[str(token.get("content"))] = token.get("id")
    found = list[int]()
    for word in words:
        if not is_size(token := known.get(word)):
            raise _no_reranker(path, f"its tokenizer has no token {word!r}")
        found.append(token)
    return found
