"""Loads the model of a command, and prints on stderr what was decided about it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from penstock.base.config import Config
from penstock.cli.terminal import say

if TYPE_CHECKING:
    from penstock.api.llm import LLM


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), faint=True)


@contextmanager
def loaded(config: Config, *, quiet: bool) -> Iterator["LLM"]:
    """The model, closed at the end. Unless `quiet`, device, dtype and memory sizing go to stderr. Raises PenstockErrors."""
    log, remarks = logging.getLogger("penstock"), _Remarks(logging.INFO)
    before = log.level
    if not quiet:
        log.addHandler(remarks)
        log.setLevel(logging.INFO)
    try:
        from penstock.api.llm import LLM  # torch: 1.2 s on two cores; whatever could be checked before has been

        with LLM(**{field.name: getattr(config, field.name) for field in fields(Config)}, progress=False) as llm:
            yield llm
    finally:
        log.removeHandler(remarks)
        log.setLevel(before)
