"""The arguments of `LLM(...)`: the settings of the engine, and how progress is shown."""

from dataclasses import dataclass

from penstock.base.config import Config
from penstock.base.setting import setting, settings_of
from penstock.base.trace import Trace
from penstock.weights.streaming.loading import Loading


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMArguments(Config):
    """The settings of `Config`, and what the process that starts an engine adds to them.

    Each field is a keyword argument of `LLM`.
    """

    progress: bool | None = setting(
        None,
        help="Show a progress bar while `generate` runs.",
        usual="for several prompts on a terminal",
    )
    trace: Trace | None = setting(
        None, help="Record of every read, copy, wait and use of weights that stream.", usual="none"
    )
    loading: Loading | None = setting(
        None,
        help="Called while weights are packed and loaded, with what is done, bytes done and bytes in all.",
        usual="none",
    )

    @property
    def config(self) -> Config:
        """Return the settings of the engine alone, which go to all of its processes."""
        return Config(**{one.name: getattr(self, one.name) for one in settings_of(Config)})
