"""Iterate over the pieces of one prompt's outputs."""

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.api.driver import EngineDriver
from penstock.api.outputs import Completion, Delta
from penstock.api.sequences import SequenceGroup
from penstock.sched.outlook import WaitForecast


class CompletionStream:
    """Gives out the pieces of one prompt's outputs as they become certain.

    `close`, or leaving a `with` block, ends what is still running and frees what it held. A stream that is
    simply dropped is closed at the engine's next step.
    """

    def __init__(
        self,
        driver: EngineDriver,
        group: SequenceGroup,
        until: Callable[[], bool] | None,
        forecast: WaitForecast,
    ) -> None:
        """until: asked before every step; once it is true, the stream is closed. None is never."""
        self._driver, self._group, self._until = driver, group, until or (lambda: False)
        self.forecast = forecast
        """What it had before it when it began, and when its first token was to come."""
        weakref.finalize(self, driver.drop, group).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            delta = self._driver.next_delta(self._group, self._until)
        except BaseException:
            self.close()
            raise
        if delta is None:
            raise StopIteration
        return delta

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Return the token ids of the prompt."""
        return self._group.tokens

    @property
    def completion(self) -> Completion:
        """Return the outputs up to now, as `generate` would return them. Those that have not ended by
        themselves count as aborted."""
        return self._group.completion()

    def close(self) -> None:
        """End what is still running."""
        self._driver.abandon([self._group])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
