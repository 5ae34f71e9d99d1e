#!/usr/bin/env python3
"""Plants faults, one at a time, in a copy of the project, and runs the tests that are to find each: a judge
of the tests.

    python tools/planted_faults.py [NAME ...] [--jobs N]      from anywhere, with the project's Python

The faults are in planted_faults.toml: where each stands, what it replaces, and its tests, named as narrowly
as they can be. A line of JSON tells of each fault whether it was caught, by which test, and how long that
took. The exit code is 1 if one was not. Before any fault is planted all tests that are named are run as they
stand: one that fails anyway would find everything.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from time import monotonic

import pytest

PROJECT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".hypothesis", ".*_cache", "build", "dist", "htmlcov"
)
_HEAVY = ("numpy", "torch", "torch.testing", "starlette.applications", "uvicorn", "transformers")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
"""A test that failed, in the summary; a captured line of the log has more spaces."""
_TEST_SECONDS = 120
"""That a test may take: what a fault makes hang is caught by then."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`new` stands in the place of `old` in `file`, a path from the project's root. tests: node ids, one of
    which has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def flaw(self, project: Path) -> str | None:
        """Why it cannot be planted, if it cannot."""
        path = project / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        if count != 1:
            return f"what is to be replaced stands {count} times in {self.file}"
        if self.old == self.new or not self.tests:
            return "it changes nothing, or names no test"
        return None


def read_table(path: Path = TABLE) -> list[Fault]:
    """All faults, in the order of the file. Raises ValueError if two have one name."""
    faults = [
        Fault(**{**one, "tests": tuple(one["tests"])}) for one in tomllib.loads(path.read_text())["fault"]
    ]
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name} has several faults named {', '.join(sorted(twice))}")
    return faults


class Copy:
    """A copy of the project, beside a link to the material that its tests want in `../shared`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path, self._output, self._file = folder / "copy", folder / "output", Path()
        self._text, self._began = "", 0.0
        if (shared := PROJECT.parent / "shared").exists():
            (folder / "shared").symlink_to(shared.resolve())
        shutil.copytree(PROJECT, self.path, ignore=_LEFT_OUT)

    def begin(self, fault: Fault) -> int:
        """Plant it and run its tests, in a process whose number is returned."""
        self._file, self._began = self.path / fault.file, monotonic()
        self._text = self._file.read_text()
        self._write(self._text.replace(fault.old, fault.new))
        return self.run(fault.tests)

    def end(self, fault: Fault, code: int) -> dict[str, object]:
        """Take it out again. code: of the process."""
        self._write(self._text)
        said = self.said()
        failed = _FAILED.findall(said)
        found: dict[str, object] = {"name": fault.name, "caught": code == 1, "by": failed[:1]}
        if code not in (0, 1):
            found["error"] = said[-2000:]
        return found | {"seconds": round(monotonic() - self._began, 1)}

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def run(self, tests: Sequence[str]) -> int:
        """These tests, up to the first that fails, in a process that has `_HEAVY` already. Its number."""
        if process := os.fork():
            return process
        code = 70
        try:
            with self._output.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
            os.chdir(self.path)
            source = str(self.path / "src")
            os.environ["PYTHONPATH"], sys.path[:0] = source, [source]
            options = [
                "-p",
                "no:cacheprovider",
                "-q",
                "-x",
                "--no-header",
                "--tb=line",
                f"--timeout={_TEST_SECONDS}",
            ]
            options += [
                "-W",
                "ignore::pytest.PytestAssertRewriteWarning",
            ]  # Of what has been imported before.
            code = int(pytest.main([*options, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _write(self, text: str) -> None:
        self._file.write_text(text)
        # What is compiled is known by a time in whole seconds and a size: both may be those of what stood
        # there before.
        Path(cache_from_source(str(self._file))).unlink(missing_ok=True)


def planted(faults: Sequence[Fault], folder: Path, jobs: int) -> Iterator[dict[str, object]]:
    """What came of each, as they end; `jobs` at a time, each in a copy of its own."""
    folder.mkdir(exist_ok=True)
    free = [Copy(folder / str(number)) for number in range(min(jobs, len(faults)))]
    busy: dict[int, tuple[Copy, Fault]] = {}
    left = deque(faults)
    while left or busy:
        while left and free:
            fault = left.popleft()
            if flaw := fault.flaw(PROJECT):
                yield {"name": fault.name, "caught": False, "error": flaw}
                continue
            copy = free.pop()
            busy[copy.begin(fault)] = copy, fault
        if busy:
            process, status = os.wait()
            copy, fault = busy.pop(process)
            free.append(copy)
            yield copy.end(fault, os.waitstatus_to_exitcode(status))


def prepare() -> None:
    """Import what most tests import and no fault is in, once for all of them: it would take longer than most
    tests."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # A copy is used for many faults.
    sys.dont_write_bytecode = False
    for name in _HEAVY:
        with suppress(ImportError):
            import_module(name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults in copies of the project, and see which tests find them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time [1]")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    parser.add_argument(
        "--as-they-stand",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the tests without faults first",
    )
    asked = parser.parse_args()
    every = read_table()
    unknown = set(asked.names) - {fault.name for fault in every}
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; --list names all")
    named = {fault.name: fault for fault in every}
    faults = [named[name] for name in dict.fromkeys(asked.names)] or every
    if asked.list:
        for fault in faults:
            print(f"{fault.name:32} {fault.file:44} {' '.join(fault.tests)}")
        return 0
    missed = 0
    prepare()
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        if asked.as_they_stand:
            sound = Copy(Path(folder) / "as-they-stand")
            _, status = os.waitpid(sound.run(sorted({test for fault in faults for test in fault.tests})), 0)
            if status:
                print(sound.said()[-4000:], file=sys.stderr)
                print("the tests do not pass as they stand; they judge nothing", file=sys.stderr)
                return 2
        for found in planted(faults, Path(folder), max(asked.jobs, 1)):
            missed += not found["caught"]
            print(json.dumps(found), flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were caught", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
