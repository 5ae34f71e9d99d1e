"""docs/settings.md, made from the settings that are declared in the package.

`python tools/settings_table.py --write` writes it anew. A test compares the file with what this makes.
"""

import argparse
import sys
from pathlib import Path

from penstock.base.config import Config
from penstock.base.setting import MOST, WORDS, SettingField, settings_of
from penstock.cli.options import as_flags
from penstock.server.fleet.scale import Scale
from penstock.server.settings import AnswerSettings, Listening, OnDemandSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Each setting is declared once in the package. `tools/settings_table.py` makes this page of the declarations.

A setting has one name in three forms: a flag of the command line (`--device-memory 16GiB`), a key in
`penstock.toml` (`device-memory = "16GiB"`) and a keyword argument of `LLM` (`LLM(device_memory="16GiB")`).
What is on or off is a flag without a value; `--no-` before its name turns off what is on by default.

A size is a number with a unit (16GiB, 800MB), a number of bytes, or a share (80%) of the memory in question.
On the command line and in `penstock.toml` a number of tokens may have a K or an M behind it: 32K is 32,768.
"""
ENGINE = """
## The engine

`LLM`, `penstock run`, `chat`, `serve` and `batch` have all of these; `bench`, `eval` and `doctor` some.

"""
SERVER = """
## The server

`penstock serve` has these beside the ones above. Its `--help` has the rest: names, keys, replicas, logs.

"""
ROWS = "| setting | value | default | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """Return the text of docs/settings.md."""
    kinds = (Listening, AnswerSettings, OnDemandSettings, Scale)
    server = [one for kind in kinds for one in settings_of(kind)]
    tables = [ROWS + "".join(map(row, settings)) for settings in (settings_of(Config), server)]
    return HEAD + ENGINE + tables[0] + SERVER + tables[1]


def row(one: SettingField) -> str:
    """Return a setting's line in the table."""
    name = one.name if one.name == "model" else f"--{one.name.replace('_', '-')}"
    text = " ".join(filter(None, (one.help if one.choices else one.sentence, one.details)))
    return f"| `{name}` | {value(one)} | {as_flags(one.shown_default)} | {as_flags(text)} |\n"


def value(one: SettingField) -> str:
    """Return what a setting may be, in words."""
    if one.choices:
        return ", ".join(f"`{choice}`" for choice in one.choices)
    bounds = " from {:g} to {:g}".format(*one.limits) if one.limits[1] < MOST else ""
    return WORDS[one.kind] + (f" of {one.unit}" if one.unit else "") + bounds


def main() -> int:
    """Compare docs/settings.md with the declarations, or write it. Return 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    return int(PAGE.read_text(encoding="utf-8") != page())


if __name__ == "__main__":
    sys.exit(main())
