"""Says what was found, and what is told of a download while it runs."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.base.units import format_size
from penstock.hub.names import ModelName

if TYPE_CHECKING:  # The command line needs what is here before it needs to know any model.
    from penstock.hub.about import About

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Found:
    """A model was found: a directory or file of this machine.

    name: what it is called for others: its name on the Hub, or that of its directory.
    """

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Describes what would be fetched, before anything large is.

    size: bytes that are still to come. free: those that the disk has. shape: what describes the model, for a
    forecast: a directory with config.json, or what begins like its GGUF file.
    """

    name: ModelName
    size: int
    free: int
    about: "About"
    shape: Path


class Telling:
    """Hears what is fetched, and may refuse it. This one writes it to the log, and refuses nothing."""

    def agree(self, offer: Offer) -> None:
        """Hear what will be fetched. Raises an error to refuse."""
        log.info("fetching %s: %s", offer.name, format_size(offer.size))

    def advance(self, count: int) -> None:
        """Hear that so many bytes came; less than none if some have to come again."""

    def end(self, found: Found) -> None:
        """Hear that all is there."""
        log.info("fetched %s into %s", found.name, found.path)
