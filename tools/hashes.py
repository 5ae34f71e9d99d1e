#!/usr/bin/env python3
"""Keeps hashes.txt: the sha256 of every wheel of the releases that constraints.txt names, without which
tools/install.py installs none.

    python3 tools/hashes.py                        whether both files name the same releases
    python3 tools/hashes.py --update [WHEEL ...]   asks the index that pip is set to, after constraints.txt was changed

WHEEL is a file of such a release that the index does not have, as torch's build for CPUs. It stays listed
until its release changes.
"""

import argparse
import hashlib
import json
import re
import ssl
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, HASHES = ROOT / "constraints.txt", ROOT / "hashes.txt"
UPDATE = "python3 tools/hashes.py --update"
JSON = "application/vnd.pypi.simple.v1+json"
HEAD = f"""\
# The sha256 of every wheel of the releases in constraints.txt, as the package index publishes them: what `make` installs has one of these.
# Written by `{UPDATE}`.
"""
# The index, and the certificates to believe it by, that pip itself would use: from its variables, its files,
# or its default.
SETTINGS = """
import json
from pip._internal.commands import create_command
values = create_command("download").parser.get_default_values()
print(json.dumps([values.index_url, values.cert]))
"""
_PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([A-Za-z0-9.!]+)")
_ENTRY = re.compile(rf"{_PIN.pattern}((?: --hash=sha256:[0-9a-f]{{64}})+)")
_ADDED = re.compile(r"# (\S+\.whl) sha256:([0-9a-f]{64}), which the index does not have", re.MULTILINE)


class HashesError(Exception):
    """What the files say cannot be right, or the index cannot be asked. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Release:
    """added: hashes by name of the wheels that the index does not have; they are among `hashes`."""

    version: str
    hashes: frozenset[str]
    added: Mapping[str, str]


def read_pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Versions by name. Raises HashesError for a line that names no exact version, and for a name that stands
    there twice."""
    pins: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            if not (pin := _PIN.fullmatch(line)):
                raise HashesError(
                    f"{path.name} has the line {line!r}; write name==version, with the name in small "
                    "letters and hyphens"
                )
            if pin[1] in pins:
                raise HashesError(f"{path.name} names {pin[1]} twice; remove one")
            pins[pin[1]] = pin[2]
    return pins


def read_hashes(path: Path = HASHES) -> dict[str, Release]:
    """Releases by name. Raises HashesError for an entry that is not name==version with at least one
    sha256."""
    text = path.read_text(encoding="utf-8")
    added = dict(_ADDED.findall(text))
    releases: dict[str, Release] = {}
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        if line and not line.startswith("#"):
            if not (entry := _ENTRY.fullmatch(line)) or entry[1] in releases:
                raise HashesError(
                    f"{path.name} has an entry that is none, or that is there twice: {line[:80]!r}; try: "
                    f"{UPDATE}"
                )
            name, version, hashes = entry.groups()
            more = {
                file: digest for file, digest in added.items() if _name_and_version(file) == (name, version)
            }
            releases[name] = Release(version, frozenset(re.findall(r"[0-9a-f]{64}", hashes)), more)
    return releases


def differences(pins: Mapping[str, str], releases: Mapping[str, Release]) -> Iterator[str]:
    """What hashes.txt lacks or has too much, for each name that it does not list as constraints.txt does."""
    for name in sorted(pins.keys() | releases.keys()):
        listed = releases[name].version if name in releases else None
        if pins.get(name) != listed:
            yield (
                f"{name}: {pins.get(name, 'nothing')} in constraints.txt, {listed or 'nothing'} in hashes.txt"
            )


def must_agree() -> None:
    """Raises HashesError if the two files do not name the same releases."""
    if found := list(differences(read_pins(), read_hashes())):
        raise HashesError("\n".join([*found, f"after a change of constraints.txt call: {UPDATE}"]))


def written(releases: Mapping[str, Release]) -> str:
    """hashes.txt: a constraints file as pip reads it."""
    lines = [HEAD]
    for name, release in sorted(releases.items()):
        lines += [
            f"# {file} sha256:{digest}, which the index does not have\n"
            for file, digest in sorted(release.added.items())
        ]
        lines.append(
            " \\\n    ".join(
                [f"{name}=={release.version}", *(f"--hash=sha256:{one}" for one in sorted(release.hashes))]
            )
            + "\n"
        )
    return "".join(lines)


def update(wheels: Iterable[Path]) -> None:
    """Write hashes.txt anew for what constraints.txt names today, and say which entries have changed."""
    pins, before = read_pins(), read_hashes() if HASHES.exists() else {}
    added: dict[str, dict[str, str]] = {
        name: dict(old.added) for name, old in before.items() if pins.get(name) == old.version
    }
    for wheel in wheels:
        name, version = _name_and_version(wheel.name)
        if pins.get(name) != version:
            raise HashesError(
                f"{wheel.name} is of {name} {version}, of which constraints.txt has "
                f"{pins.get(name, 'nothing')}"
            )
        with wheel.open("rb") as file:
            added.setdefault(name, {})[wheel.name] = hashlib.file_digest(file, "sha256").hexdigest()
    index, certificates = json.loads(
        subprocess.run([sys.executable, "-c", SETTINGS], check=True, capture_output=True, text=True).stdout
    )
    context = ssl.create_default_context(cafile=certificates)

    def asked(pin: tuple[str, str]) -> Release:
        name, version = pin
        published = _published(f"{index.rstrip('/')}/{name}/", context)
        more = added.get(name, {})
        return Release(version, frozenset([*wheels_of(published, name, version), *more.values()]), more)

    with ThreadPoolExecutor(8) as threads:
        releases = dict(zip(pins, threads.map(asked, pins.items()), strict=True))
    HASHES.write_text(written(releases), encoding="utf-8")
    for name in sorted(before.keys() | releases.keys()):
        old, new = before.get(name), releases.get(name)
        if old and new and old.version == new.version and not old.hashes <= new.hashes:
            print(
                f"{name} {new.version}: {len(old.hashes - new.hashes)} hashes are gone though the version "
                "is the same: find out why"
            )
        elif old != new:
            print(
                f"{name}: {old.version if old else 'new'} -> "
                f"{f'{new.version}, {len(new.hashes)} hashes' if new else 'gone'}"
            )


def wheels_of(published: Mapping[str, object], name: str, version: str) -> list[str]:
    """The sha256 of every wheel of a release, from an index's description of all releases. Raises HashesError
    if there is none."""
    files = published.get("files")
    assert isinstance(files, list)
    mine = [
        file
        for file in files
        if file["filename"].endswith(".whl") and _wheel(file["filename"]) == (name, version)
    ]
    hashes = [file["hashes"].get("sha256", "") for file in mine]
    if not hashes or not all(hashes):
        fault = "a wheel without a sha256" if hashes else "no wheel"
        raise HashesError(f"the index has {fault} of {name}=={version}; choose another version")
    return hashes


def _published(url: str, context: ssl.SSLContext) -> dict[str, object]:
    try:
        with urlopen(Request(url, headers={"Accept": JSON}), timeout=60, context=context) as answer:
            result: dict[str, object] = json.load(answer)
    except (URLError, ValueError) as fault:
        raise HashesError(f"{url} does not answer with JSON as package indexes do: {fault}") from None
    return result


def _wheel(file: str) -> tuple[str, str]:
    name, version = file.split("-")[:2]
    return re.sub(r"[-_.]+", "-", name).lower(), version


def _name_and_version(file: str) -> tuple[str, str]:
    """Of a wheel; what a local build puts behind the version is left out."""
    name, version = _wheel(file)
    return name, version.partition("+")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true")
    parser.add_argument("wheels", metavar="WHEEL", nargs="*", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.update:
            update(arguments.wheels)
        must_agree()
    except (HashesError, OSError) as fault:
        sys.exit(str(fault))


if __name__ == "__main__":
    main()
