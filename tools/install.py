#!/usr/bin/env python3
"""Installs penstock and what it needs into the environment of the Python that runs this: wheels alone, each
with a hash in hashes.txt.

    .venv/bin/python tools/install.py [--editable | --without-project] [EXTRA ...]
    python3 tools/install.py --pip .venv/bin/python     only pip, into an environment that has none

pip holds every file against hashes.txt before it is unpacked, those that others pull in included. Only pip
26.1 and later take hashes from constraints, so the pip that hashes.txt lists comes first, held against its
hash by the one that is there. The project has no hash: it is built from here, by a backend that was installed
in this way, without the network. What is installed already stays.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hashes import CONSTRAINTS, HASHES, ROOT, UPDATE, HashesError, Release, must_agree, read_hashes, written

CHECKED = ("install", "--require-hashes", "--only-binary", ":all:")
PROJECT = ("install", "--no-index", "--no-deps", "--no-build-isolation")
BACKEND = ("editables",)
"""What hatchling asks for besides itself, to make an environment see a project where it is."""
BUILT = "torch"
"""What has builds besides the index's, of which pip would take none as long as it sees one of the index's
that it knows the hash of."""
ADVICE = f"""
What is said above is pip's. If it names hashes, a file is not one that hashes.txt lists, and this step has installed nothing.
- If a version in constraints.txt was changed on purpose: {UPDATE}
- If it wants a version to be pinned, some package asks for one that constraints.txt does not name yet: add it there, and do the same.
- If it is a build of torch that you have chosen yourself, install it first, and do this again: what is there is not asked for its hash.
    {sys.executable} -m pip install --no-deps FILE
- Otherwise the file is not what was published: find out where it comes from before you do anything else."""


def needs(extras: Iterable[str]) -> list[str]:
    """The requirements of the project, of these extras and of the backend that builds it. Raises HashesError
    for an unknown extra."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    optional: dict[str, list[str]] = project.get("optional-dependencies", {})
    found: dict[str, None] = dict.fromkeys(
        [*project["dependencies"], *document["build-system"]["requires"], *BACKEND]
    )
    waiting = list(extras)
    for extra in waiting:
        if extra not in optional:
            raise HashesError(
                f"there is no extra {extra!r} in pyproject.toml; there are {', '.join(sorted(optional))}"
            )
        for requirement in optional[extra]:
            name, _, more = requirement.removesuffix("]").partition("[")
            if name == project["name"]:
                waiting += [one for one in more.split(",") if one not in waiting]
            else:
                found[requirement] = None
    return list(found)


def run_pip(pip: Sequence[str], *arguments: str, **variables: str) -> None:
    """Ends the program, with advice, if pip fails."""
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | variables
    if status := subprocess.run([*pip, *arguments], cwd=ROOT, env=environment, check=False).returncode:
        print(ADVICE, file=sys.stderr)
        sys.exit(status)


def install_pip(pip: Sequence[str], release: Release) -> None:
    """The listed pip, by one that may be too old to take hashes from constraints: from a file of requirements
    every one takes them."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "pip.txt"
        listed.write_text(written({"pip": release}), encoding="utf-8")
        run_pip(pip, *CHECKED, "--requirement", str(listed))


def installed(name: str) -> str | None:
    """The version that is there, without what a local build puts behind it."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def is_at_hand(pip: Sequence[str]) -> bool:
    """Whether a build of torch lies where pip looks besides the index (`find-links`), whatever its hash."""
    command = [*pip, "install", "--dry-run", "--no-index", "--no-deps", "--only-binary", ":all:", BUILT]
    environment = os.environ | {"PIP_CONSTRAINT": CONSTRAINTS.name}
    return (
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode == 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--editable", action="store_true")
    how.add_argument("--without-project", action="store_true")
    parser.add_argument("--pip", metavar="PYTHON")
    parser.add_argument("extras", metavar="EXTRA", nargs="*")
    arguments = parser.parse_args()
    try:
        must_agree()
        wanted = needs(arguments.extras)
    except (HashesError, OSError) as fault:
        sys.exit(str(fault))
    releases = read_hashes()
    if arguments.pip:
        install_pip([sys.executable, "-m", "pip", "--python", arguments.pip], releases["pip"])
        return
    pip = [sys.executable, "-I", "-m", "pip"]
    if not (there := installed("pip")):
        sys.exit(
            f"there is no pip for {sys.executable}; try, with a Python that has one: python3 "
            f"tools/install.py --pip {sys.executable}"
        )
    if there != releases["pip"].version:
        install_pip(pip, releases["pip"])
    if installed(BUILT) != releases[BUILT].version and is_at_hand(pip):
        run_pip(pip, *CHECKED, "--no-index", "--no-deps", BUILT, PIP_CONSTRAINT=HASHES.name)
    run_pip(pip, *CHECKED, *wanted, PIP_CONSTRAINT=HASHES.name)
    if not arguments.without_project:
        run_pip(pip, *PROJECT, *(["--editable"] if arguments.editable else []), ".")


if __name__ == "__main__":
    main()
