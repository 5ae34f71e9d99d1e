"""Reads the checkpoint of a draft head, in the names of its authors or of the library `speculators`, and
the MTP layer in a model's own checkpoint."""

import array
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from penstock.arch.heads import HeadSpec, check_kind, flat_config, is_head, read_head, refuse_older
from penstock.arch.layout import GroupLayout
from penstock.arch.mtp import no_mtp, read_mtp
from penstock.base.errors import CheckpointError, PenstockError
from penstock.weights.checkpoint.config import expect_directory, read_config
from penstock.weights.checkpoint.generation import GenerationDefaults
from penstock.weights.checkpoint.identity import Memory
from penstock.weights.checkpoint.links import expect_inside
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shards import EMBEDDING, INDEX, SINGLE, Shards
from penstock.weights.gguf.files import is_gguf
from penstock.weights.jsonfile import readable

_IDS, _KNOWN = "d2t", "t2d"
"""Tensors: what is added to the number of each token that can be drafted to give the target's, and which of
the target's tokens these are, which follows from it."""
_LAYERS = ("midlayer.", "layers.0.")
_OUTSIDE = ("norm.weight", "embed_tokens.weight")


class HeadCheckpoint(Checkpoint):
    """Holds the checkpoint of a draft head open. Its tensors have the names of a model with one layer; an MTP
    layer has those of the model's checkpoint, which holds it."""

    head: HeadSpec
    ids: tuple[int, ...]
    """The target's token of each one that the head can draft."""

    @classmethod
    def open_head(cls, path: Path) -> Self:
        """Open the head in directory `path`. Raises CheckpointError for what is missing or damaged, and what
        `read_head` raises."""
        expect_directory(path)
        expect_inside(path)
        config, where = read_config(path), str(path / "config.json")
        head, shards = read_head(config, where), Shards(path)
        try:
            shards.tensors = {_named(name): tensor for name, tensor in shards.tensors.items()}
            found = cls(
                path, flat_config(config, where), GenerationDefaults(), shards, head.spec, Memory(None)
            )
            found.head = head
            found.ids = found._read_ids()
        except PenstockError:
            shards.close()
            raise
        return found

    @classmethod
    def open_mtp(cls, path: Path) -> Self:
        """Open the MTP layer in the checkpoint of a model. Raises ConfigError if
        there is none that runs here, and what opening a checkpoint raises."""
        if is_gguf(path):
            raise no_mtp(f"{path} is a GGUF file, in which it is not read")
        found = cls.open(path)
        try:
            found.head = read_mtp(found.config, found.spec, str(path / "config.json"))
            projection = f"model.layers.{found.head.place}.eh_proj"
            if not any(name.startswith(f"{projection}.") for name in found._shards.tensors):
                raise no_mtp(f"the weights in {path} lack it: no tensor is called {projection}.weight")
        except PenstockError:
            found.close()
            raise
        found.ids = tuple(range(found.spec.vocab_size))
        return found

    @property
    def embeds(self) -> bool:
        """Tell whether there is an embedding in its checkpoint, not the target's."""
        return EMBEDDING in self._shards.tensors

    def verify(self, layouts: Iterable[GroupLayout]) -> None:
        """Check the tensors of these layouts, but for an embedding that is the target's."""
        first, *rest = layouts
        super().verify([first, *rest] if self.embeds else rest)

    def _ignorable(self, name: str) -> bool:
        # The model, which is held against its own layouts, is beside an MTP layer.
        return self.head.place is not None or name in (_IDS, _KNOWN) or super()._ignorable(name)

    def _read_ids(self) -> tuple[int, ...]:
        count, vocabulary = self.head.draft_vocab, self.spec.vocab_size
        stored = self._shards.tensors.get(_IDS)
        if stored is None:
            if count == vocabulary:
                return tuple(range(count))
            raise CheckpointError(
                f"{self.path} lacks tensor {_IDS}, which says which {count:,} of the model's {vocabulary:,} "
                "tokens the draft head knows; fetch the file that has it"
            )
        if stored.entry.dtype != "I64" or stored.entry.shape != (count,):
            raise CheckpointError(
                f"{stored.file.path}: tensor {_IDS} is {stored.entry.dtype} {list(stored.entry.shape)}; "
                f"config.json calls for I64 {[count]}; fetch config.json and the weights of the same head"
            )
        added = array.array("q", bytes(8 * count))
        with readable():
            stored.file.read_into(memoryview(added).cast("B"), stored.entry.offset)
        if sys.byteorder == "big":
            added.byteswap()
        ids = tuple([own + more for own, more in enumerate(added)])
        if min(ids) < 0 or max(ids) >= vocabulary or len(set(ids)) < count:
            raise CheckpointError(
                f"{stored.file.path}: tensor {_IDS} leads to tokens that the model does not have, or "
                "twice to one; fetch the file again"
            )
        return ids


def holds_head(path: Path) -> bool:
    """Tell whether the files at `path` are of an EAGLE-3 head. Raises ConfigError for a draft head of another
    kind, CheckpointError for files that are damaged."""
    if not os.path.isdir(path) or is_gguf(path) or not os.path.lexists(path / "config.json"):
        return False
    config = read_config(path)
    if is_head(config):
        return True
    check_kind(config, str(path / "config.json"))
    if any(os.path.lexists(path / name) for name in (SINGLE, INDEX)):
        names = set[str]()
        with suppress(CheckpointError):  # Whoever opens it says so.
            shards = Shards(path)
            shards.close()
            names = {name.removeprefix("model.") for name in shards.tensors}
        if "fc.weight" in names:
            refuse_older(str(path))
    return False


def _named(tensor: str) -> str:
    """Return the name that a tensor has in a whole model of one layer."""
    name = tensor.removeprefix("model.")
    for layer in _LAYERS:
        if name.startswith(layer):
            return f"model.layers.0.{name.removeprefix(layer)}"
    return f"model.{name}" if name in _OUTSIDE else name
