"""Write a benchmark's results: a file of parts, each with the machine, the commit and the command that it was
measured by."""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from penstock.bench.machine import machine


def need_commit(out: Path | None) -> None:
    """Raise SystemExit where results would be written that do not say of which sources they are."""
    if out is not None and machine().commit is None:
        sys.exit(
            f"{out} would not say which sources were measured: they lie here without git's history; set "
            "PENSTOCK_COMMIT to what "
            "`git rev-parse HEAD` prints where they come from, with a + behind it if files differ"
        )


def environment() -> dict[str, object]:
    """Return machine, versions, commit, date, and the command."""
    return asdict(machine()) | {"command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}


class Recording:
    """Writes a file of results again after every part. Parts that another command has left there stay.

    out: None writes nothing. facts: entries that hold for all parts.
    """

    def __init__(self, out: Path | None, **facts: object) -> None:
        need_commit(out)
        self._out, self._facts = out, facts

    def part(self, name: str, found: dict[str, object]) -> None:
        """Note what a part has found, with its environment."""
        if self._out is None:
            return
        whole = json.loads(self._out.read_text()) if self._out.exists() else {}
        whole |= self._facts | {name: {"environment": environment(), **found}}
        self._out.write_text(json.dumps(whole, indent=1) + "\n")


def write(out: Path, found: dict[str, object]) -> None:
    """Write a file of one piece: all of it, and its environment."""
    out.write_text(json.dumps({**found, "environment": environment()}, indent=1) + "\n")
