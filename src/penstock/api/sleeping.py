"""Put a model to sleep, so that its memory is free for others, and wake it up."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from penstock.api.driver import EngineDriver
from penstock.base.errors import RequestError
from penstock.engine.boot import Booted
from penstock.step.params import shown


@dataclass(frozen=True, slots=True)
class Sleep:
    """Tells how a model sleeps.

    level: as it was asked for.
    weights: where they are meanwhile: "host memory", where a CPU computes with them; "page cache", in host
        memory too, as long as the system has room; or "disk".
    """

    level: int
    weights: str


class Sleeper:
    """Puts the model of a driver to sleep.

    On a CPU, level 1 frees the memory of KV, and weights stay where they are. Elsewhere, and with level 2,
    the engine is closed, which frees all that it has, and `wake` starts another one in its place.

    Why this is safe. One lock lets `sleep` and `wake` follow each other. The driver refuses prompts from the
    moment at which it has seen that there are none, under its own lock, and takes them again when an engine
    that can compute is in place: so no prompt ever meets an engine that sleeps. LoRA adapters are neither
    loaded nor unloaded meanwhile, so the next engine has those of the last one. An engine that cannot be
    started leaves everything asleep, and `wake` may be tried again. One that has started when the model was
    closed meanwhile is closed too.
    """

    def __init__(self, driver: EngineDriver, model: Path) -> None:
        """model: the files of the weights, or their directory."""
        self._driver, self._model = driver, model
        self._lock = Lock()
        self.state: Sleep | None = None
        """None while the model is awake."""

    def sleep(self, level: int, device: str) -> Sleep:
        """Put the model to sleep, unless it is asleep, and return how it sleeps. device: that computes.

        Raise RequestError for another level than 1 and 2, and while prompts are being computed.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise RequestError(
                f"level {shown(level)} is none: 1 frees KV and the device, and keeps weights in host memory; "
                "2 frees everything, and weights are read from disk again"
            )
        with self._lock:
            if self.state is not None:
                return self.state
            stays = level == 1 and device == "cpu"
            self._driver.sleep(closes=not stays)
            kept = level == 1 and (stays or _fetch(self._model))
            self.state = Sleep(level, "host memory" if stays else "page cache" if kept else "disk")
            return self.state

    def wake(self, start: Callable[[], Booted]) -> Booted | None:
        """Wake the model up, unless it is awake. Return what `start` has started, if that was necessary.
        Raise what that raises."""
        with self._lock:
            if self.state is None:
                return None
            self._driver.check_open()
            booted = None if self.state.weights == "host memory" else start()
            self._driver.wake(None if booted is None else booted.engine)
            self.state = None
            return booted


def _fetch(model: Path) -> bool:
    """Ask the system to read the weights of a checkpoint into its page cache. Return whether there are any
    that are read from there: a pack's are not."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    with suppress(OSError):
        for path in files:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)
    return bool(files)
