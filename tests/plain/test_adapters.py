"""The slots of LoRA adapters, whatever goes wrong while one is loaded: no name stands for a slot of which
nobody knows what is in it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.arch.lora import LoraRoom
from penstock.base.errors import AdapterError, ConfigError, RequestError
from penstock.cli.models import check_names
from penstock.engine.adapters import LoadedAdapters, adapter_named, means_model
from penstock.step.adapter import LoadedAdapter


def adapter(digest: bytes) -> Any:
    return SimpleNamespace(path=Path("somewhere"), digest=digest, rank=4)


class Slots:
    """What is in the slots of a device, of which a load that is interrupted leaves a half."""

    def __init__(self, count: int) -> None:
        self.there: dict[int, bytes] = {}
        self.used = set[int]()
        self.interrupt: type[BaseException] | None = None
        self.loaded = LoadedAdapters(LoraRoom(count, 8), self._load, lambda: self.used)

    def _load(self, loaded: LoadedAdapter, adapter: Any) -> None:
        self.there[loaded.slot] = b"half of one, and half of another"
        if self.interrupt is not None:
            raise self.interrupt
        self.there[loaded.slot] = adapter.digest

    def check(self) -> None:
        """Every name means what is there."""
        for one in self.loaded.loaded.values():
            assert self.there[one.slot] == one.digest


@pytest.mark.parametrize("interrupt", [MemoryError, KeyboardInterrupt])
def test_a_slot_that_was_half_written_is_nobodys(interrupt: type[BaseException]) -> None:
    slots = Slots(1)
    slots.loaded.add("a", adapter(b"old"))
    slots.interrupt = interrupt
    with pytest.raises(interrupt):
        slots.loaded.add("a", adapter(b"new"), replaces=True)
    slots.check()
    with pytest.raises(AdapterError, match="'a' is not loaded; there is none"):
        slots.loaded.of("a")
    slots.interrupt = None
    slots.loaded.add("a", adapter(b"new"))
    slots.check()
    assert [*slots.loaded.loaded] == ["a"]


def test_what_cannot_be_loaded_leaves_what_it_would_have_replaced() -> None:
    slots = Slots(3)
    for name in ("a", "b"):
        slots.loaded.add(name, adapter(name.encode()))
    slots.interrupt = MemoryError
    with pytest.raises(MemoryError):
        slots.loaded.add("a", adapter(b"new"), replaces=True)
    slots.check()
    assert [one.digest for one in slots.loaded.loaded.values()] == [b"a", b"b"]
    slots.interrupt = None
    slots.loaded.add("a", adapter(b"new"), replaces=True)
    slots.check()


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call()


def test_a_slot_that_a_request_needs_is_never_given_away() -> None:
    slots = Slots(2)
    slots.used = {slots.loaded.add("a", adapter(b"a")).slot}
    slots.loaded.remove("a")
    assert slots.loaded.add("b", adapter(b"b")).slot not in slots.used
    refused(lambda: slots.loaded.add("c", adapter(b"c")), "all 2 places for LoRA adapters are taken")
    assert slots.loaded.add("b", adapter(b"new"), replaces=True).slot not in slots.used
    slots.used = {1, 2}
    refused(lambda: slots.loaded.add("b", adapter(b"c"), replaces=True), "all 2 places")
    slots.check()
    slots.used = set()
    slots.loaded.add("c", adapter(b"c"))
    slots.check()


def test_names_and_ranks_that_are_refused() -> None:
    slots = Slots(2)
    for name in ("", "a\nb", "a" * 201):
        refused(lambda name=name: slots.loaded.add(name, adapter(b"a")), "is no name for an adapter")
    large = SimpleNamespace(path=Path("somewhere"), digest=b"a", rank=9)
    refused(lambda: slots.loaded.add("a", large), "has rank 9, and there is room for 8")
    assert not slots.there


def test_the_next_engine_has_the_same_adapters_or_says_why() -> None:
    """Also the one after it, until another one of the name is loaded."""
    first, second, third = (Slots(3) for _ in range(3))
    for name in ("a", "b", "c"):
        first.loaded.add(name, adapter(name.encode()))
    found = iter([b"a", b"another", b"c", b"a", b"c"])
    for before, slots in ((first, second), (second, third)):
        slots.loaded.restore(before.loaded, lambda _: adapter(next(found)))
        slots.check()
        assert [*slots.loaded.loaded] == ["a", "c"]
        with pytest.raises(
            RequestError, match=r"'b' could not be .* after a sleep, since the files in .* have"
        ):
            slots.loaded.of("b")
    third.loaded.add("b", adapter(b"another"))
    assert [*third.loaded.loaded, *third.loaded.lost] == ["a", "c", "b"]
    second.loaded.remove("b")
    with pytest.raises(RequestError, match="'b' is not loaded; there is a, c"):
        second.loaded.of("b")
    broken = Slots(3)
    broken.interrupt = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        broken.loaded.restore(first.loaded, lambda _: adapter(b"a"))


def test_what_a_name_in_a_request_means() -> None:
    """It is the same whichever adapters there are beside it: none may have a name that means another one."""
    models = ("base", "base:7b")
    for names, meant in (
        (["base"], ""),
        (["base:7b"], ""),
        (["red"], "red"),
        (["base:red"], "red"),
        (["base:7b:red"], "red"),
        (["red:latest", "red"], "red"),
        (["base:latest", "base"], ""),
        (["blue"], None),
        (["other:red"], None),
        (["base:"], None),
        ([""], None),
    ):
        assert adapter_named(names, models, {"red"}) == meant, names
    check_names(models, ["red", "bases", "7b", "other:red"])
    for name in (*models, "base:red", "base:"):
        assert means_model(name, models)
        with pytest.raises(ConfigError, match=f"the LoRA adapter '{name}' has a name of the model's, or"):
            check_names(models, ["red", name])
