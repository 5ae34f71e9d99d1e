"""Loads LoRA adapters into slots, and knows them by their names."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.arch.lora import LoraRoom
from penstock.base.config import Config
from penstock.base.errors import AdapterError, CheckpointError, RequestError, UnsupportedModelError
from penstock.step.adapter import LoadedAdapter

if TYPE_CHECKING:
    from penstock.weights.checkpoint.lora import Adapter

_LOG = logging.getLogger("penstock")


def module_paths(config: Config) -> dict[str, Path]:
    """Return the directories of the adapters that are loaded at the start, by their names."""
    named = (text.partition("=") for text in config.lora_modules)
    return {name: Path(os.path.expanduser(path)) for name, _, path in named}


def adapter_named(names: Sequence[str], models: Sequence[str], adapters: Collection[str]) -> str | None:
    """Return the adapter that a model's name in a request means, by its own name or as `model:adapter`: empty
    for the model itself, None for neither.

    names: all stand for the same. models: names of the model.
    """
    if set(names) & set(models):
        return ""
    meant = (
        own
        for name in names
        for own in (name, *(name[len(model) + 1 :] for model in models if name.startswith(f"{model}:")))
    )
    return next((own for own in meant if own in adapters), None)


def means_model(name: str, models: Sequence[str]) -> bool:
    """Tell whether an adapter's name would mean the model, or another adapter, in requests."""
    return name in models or name.startswith(tuple(f"{model}:" for model in models))


class LoadedAdapters:
    """Holds the adapters that requests may ask for. One thread at a time."""

    def __init__(
        self,
        room: LoraRoom | None,
        load: "Callable[[LoadedAdapter, Adapter], object]",
        needed: Callable[[], set[int]],
    ) -> None:
        """Begin without any. room: None for no adapters at all.

        load: puts an adapter into its slot, on all ranks. needed: returns the slots of requests that have not
        ended.
        """
        self.room, self._load, self._needed = room, load, needed
        self._loaded: dict[str, LoadedAdapter] = {}
        self._lost: dict[str, str] = {}

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """Return the adapters by their names. May be read from any thread; it is never changed."""
        return self._loaded

    @property
    def lost(self) -> Mapping[str, str]:
        """Return why those are not there that `restore` could not load, by their names. May be read from any
        thread; it is never changed."""
        return self._lost

    def of(self, name: str) -> LoadedAdapter | None:
        """Return the adapter of a name, or None for no name. Raises AdapterError for a name of none."""
        if not name:
            return None
        if (found := self._loaded.get(name)) is None:
            if name in self._lost:
                raise AdapterError(self._lost[name])
            there = ", ".join(self._loaded) or "none"
            raise AdapterError(f"the LoRA adapter {name[:200]!r} is not loaded; there is {there}")
        return found

    def add(self, name: str, adapter: "Adapter", *, replaces: bool = False) -> LoadedAdapter:
        """Load an adapter that has been read, and return it.

        replaces: whether another one of this name may be there: requests that run go on with that.
        Raises RequestError where there is no room: nothing has changed then. What loading raises, or an
        interrupt, leaves the adapter that was replaced, unless the new one needed its very slot: then none
        of this name is left, since nobody knows what is in the slot.
        """
        room, others = self.room, {key: one for key, one in self._loaded.items() if key != name}
        if not name or not name.isprintable() or len(name) > 200:
            raise RequestError(f"{name[:200]!r} is no name for an adapter; give a short text")
        if name in self._loaded and not replaces:
            raise RequestError(
                f"the LoRA adapter {name!r} is loaded already; unload it first, or give another name"
            )
        if room is None:
            raise RequestError("there is no room for LoRA adapters; start the engine with max_loras")
        if adapter.rank > room.rank:
            raise RequestError(
                f"the LoRA adapter {name!r} has rank {adapter.rank}, and there is room for {room.rank}; "
                "start the engine with a higher max_lora_rank"
            )
        taken = self._needed() | {one.slot for one in others.values()}
        free = [slot for slot in range(1, room.slots + 1) if slot not in taken]
        if not free:
            raise RequestError(
                f"all {room.slots} places for LoRA adapters are taken; unload one, and let its requests "
                "end, or start the engine with a higher max_loras"
            )
        old = self._loaded[name].slot if name in self._loaded else 0
        slot = next((one for one in free if one != old), old)
        if slot == old:
            self._loaded = others
        found = LoadedAdapter(name, str(adapter.path.absolute()), adapter.digest, slot)
        self._load(found, adapter)
        self._loaded = others | {name: found}
        self._lost = {key: why for key, why in self._lost.items() if key != name}
        return found

    def restore(self, before: "LoadedAdapters", read: "Callable[[Path], Adapter]") -> None:
        """Load what an engine before this one had loaded, from the very same files.

        One whose files are gone or are others by now is left out, and requests for it are told why: they must
        not be answered by another one, nor by the model alone. Raises what else loading raises.
        """
        self._lost = dict(before.lost)
        for name, one in before.loaded.items():
            try:
                adapter = read(Path(one.path))
                if adapter.digest != one.digest:
                    raise CheckpointError(f"the files in {one.path} have changed")
                self.add(name, adapter)
            except (CheckpointError, UnsupportedModelError, RequestError) as fault:
                why = f"the LoRA adapter {name!r} could not be loaded again after a sleep, since {fault}"
                self._lost = self._lost | {name: f"{why}; load it anew"}
                _LOG.error("%s; others and the model itself are answered", why)

    def remove(self, name: str) -> None:
        """Forget an adapter. Requests that run go on with it. Raises AdapterError for a name of none."""
        if name not in self._lost:
            self.of(name)
        self._loaded = {key: one for key, one in self._loaded.items() if key != name}
        self._lost = {key: why for key, why in self._lost.items() if key != name}
