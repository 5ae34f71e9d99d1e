"""Stands for a model of which only the shape is known: an engine is built from it where weights do not
matter, as in measuring speed."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.arch.families import TensorNames, family_of, read_spec
from penstock.arch.spec import ModelSpec
from penstock.weights.checkpoint.config import read_config


@dataclass(frozen=True, slots=True)
class Shape:
    """Stands where an open Checkpoint does; the engine then fills its weights with random numbers, the same
    every time."""

    spec: ModelSpec
    names: TensorNames

    @classmethod
    def of(cls, config: Mapping[str, object], where: str = "config.json") -> Self:
        """Return the shape that a parsed config.json describes. Raises UnsupportedModelError."""
        return cls(read_spec(config, where), family_of(config, where).names)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the shape of the model in directory `path`, of which only config.json is looked at. Raises
        CheckpointError too."""
        return cls.of(read_config(path), str(path / "config.json"))

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are the same for equal shapes, with equal random weights, and differ for
        others."""
        return hashlib.blake2b(repr(self.spec).encode(), digest_size=16).digest()
