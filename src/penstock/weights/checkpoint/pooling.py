"""Reads how a checkpoint makes an embedding of hidden states, from the files of sentence-transformers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object, read_objects, shown

MODULES, POOLING = "modules.json", "config.json"
_MODE = "pooling_mode_"
_KINDS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """Says that the hidden state of the last token is the embedding.

    normalised: whether it is scaled to length 1.
    """

    normalised: bool

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return what the checkpoint in directory `path` says.

        Its modules.json lists a transformer, a pooling with a config.json of its own, and perhaps a
        normalisation (sentence-transformers). Raises UnsupportedModelError where it has no such file or asks
        for another pooling, CheckpointError for a file that is damaged.
        """
        where = path / MODULES
        if not os.path.lexists(where):
            raise UnsupportedModelError(
                f"{path} has no {MODULES}, which says how hidden states become an embedding; use a "
                "checkpoint that is made for embeddings, such as Qwen3-Embedding, or fetch that file"
            )
        kinds, folder = list[str](), None
        for module in read_objects(where, MAX_CONFIG_BYTES):
            kind = str(module.get("type")).rsplit(".", 1)[-1]
            if kind not in _KINDS:
                raise UnsupportedModelError(
                    f"{where} asks for {shown(module.get('type'))} behind the model; embeddings are made by "
                    f"{', '.join(_KINDS)} alone"
                )
            kinds.append(kind)
            if kind == "Pooling":
                folder = module.get("path")
        if kinds[:2] != list(_KINDS[:2]) or kinds[2:] not in ([], ["Normalize"]):
            raise UnsupportedModelError(
                f"{where} lists {', '.join(kinds) or 'nothing'}; embeddings are made by {', '.join(_KINDS)}, "
                "in this order"
            )
        if not isinstance(folder, str) or "/" in folder or folder in ("", ".", ".."):
            raise CheckpointError(f"{where} names the folder {shown(folder)} of its pooling; fetch it again")
        _expect_last(path / folder / POOLING)
        return cls(kinds[2:] == ["Normalize"])


def _expect_last(where: Path) -> None:
    """Raise UnsupportedModelError unless a pooling takes the last token's hidden state alone."""
    config = read_object(where, MAX_CONFIG_BYTES)
    modes = [key.removeprefix(_MODE) for key, on in config.items() if key.startswith(_MODE) and on is True]
    if isinstance(named := config.get("pooling_mode"), str):  # Newer files say it in one word.
        modes = [named]
    if modes != ["lasttoken"]:
        raise UnsupportedModelError(
            f"{where} asks for the pooling {' and '.join(modes) or 'of nothing'}; supported: lasttoken"
        )
