"""A C compiler for tests, which compiles our CPU kernels once in a session of them: they are the same in each
of the dozens of caches that tests begin with, and take six seconds of a core."""

import os
import shlex
import shutil
from pathlib import Path

from penstock.ops.native.compiler import SOURCES, NativeError, find_compiler

_SCRIPT = """#!/bin/sh
out= words= before=
for word; do
    if [ "$before" = -o ]; then out=$word; else words="$words $word"; fi
    before=$word
done
case $words in *{source}*) ;; *) exec {compiler} "$@" ;; esac
kept={folder}/$({{ echo "$words"; cat {sources}; }} | sha256sum | cut -c 1-64).so
exec 9> "$kept.lock" && flock 9 || exit
[ -e "$kept" ] || {{ {compiler} "$@" && cp "$out" "$kept.new" && mv "$kept.new" "$kept"; }} || exit
cp "$kept" "$out"
"""
"""What depends on other sources, or on other words, is kept apart."""


def compiler_in(folder: Path) -> str | None:
    """The command of a compiler that keeps in `folder` what it has made. None where there is no compiler, or
    not what the script needs."""
    try:
        compiler = shlex.join(find_compiler())
    except NativeError:
        return None
    if not all(map(shutil.which, ("sh", "sha256sum", "flock"))):
        return None
    folder.mkdir(exist_ok=True)
    script, own = folder / "cc", folder / f"cc-{os.getpid()}"
    own.write_text(
        _SCRIPT.format(
            source=shlex.quote(str(SOURCES[0])),
            sources=shlex.join(map(str, SOURCES)),
            compiler=compiler,
            folder=shlex.quote(str(folder)),
        )
    )
    own.chmod(0o700)
    own.replace(script)  # Several workers write the same.
    return shlex.quote(str(script))
