"""Compiles the C source of our CPU kernels for the processor at hand, once, and loads it.

The library is kept in a directory below the cache, under a name that is a digest of the source, the compiler
and the processor. What is loaded is run: so the directory and the file must be the user's own, and of nobody
else's writing, and the file must be whole. It ends in the digest of what is before it.

Why this is safe with several processes: each writes a file of its own, and renames it when it is whole.
"""

import ctypes
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

FOLDER = "native"
"""The directory of compiled kernels below the cache."""
SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        "service.c",
        "experts.c",
        "pool.c",
        "dots.c",
        "tiles.c",
        "layers.c",
        "attention.c",
        "pointwise.c",
        "blocks.c",
        "dense.c",
        "few_bits.c",
        "gumbel.c",
    )
)
"""The source, and what it includes."""
_FLAGS = ["-O3", "-shared", "-fPIC", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"]
_TARGETS: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])
"""Flags that say which processor to compile for, the best first: compilers know the first, the second, or
neither."""
_LIBRARIES = ["-lm", "-lpthread"]
_DIGEST_BYTES = 32
_SECONDS = 300
"""Seconds after which a compiler has failed."""


class NativeError(Exception):
    """Says why there are no CPU kernels. Plain torch then computes, and no caller sees this."""


def load(
    cache: Path, flags: tuple[str, ...] = (), say: Callable[[str], object] = lambda line: None
) -> ctypes.CDLL:
    """Return the library, compiled first if it is not in `cache`. Raises NativeError.

    flags: more flags for the compiler, behind ours.
    say: is given a line before it is compiled, which takes some seconds.
    """
    compiler = find_compiler()
    folder = _own_folder(cache)
    path = folder / f"{_name(compiler, flags)}.so"
    if not _is_whole(path):
        say(f"kernels for this processor: being compiled, once, into {folder}")
        _compile(compiler, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as fault:
        raise NativeError(f"{path} cannot be loaded: {fault}") from fault


def find_compiler() -> list[str]:
    """Return the command of the machine's C compiler: $CC, the one that Python was built with, cc, gcc or
    clang. Raises NativeError if there is none."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command) if command else []
        if words and shutil.which(words[0]):
            return words
    raise NativeError("there is no C compiler (cc, gcc or clang)")


def _name(compiler: list[str], flags: tuple[str, ...]) -> str:
    """Return a digest of all that the library depends on."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as fault:
        raise NativeError(f"the C compiler {shlex.join(compiler)} does not run: {fault}") from fault
    known = blake2b(digest_size=16)
    for part in (
        *(file.read_bytes() for file in SOURCES),
        version.stdout,
        _processor(),
        repr((compiler, _FLAGS, flags, _LIBRARIES)).encode(),
    ):
        known.update(len(part).to_bytes(8, "little") + part)
    return known.hexdigest()


def _processor() -> bytes:
    """Return what tells processors apart: instructions that one has are not on another with the same
    cache."""
    kept = {b"model name", b"flags", b"Features", b"CPU part"}
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    found = {line for line in lines if line.split(b":")[0].strip() in kept}
    return platform.machine().encode() + b"\n".join(sorted(found))


def _own_folder(cache: Path) -> Path:
    """Return the directory of libraries, made if there is none. Raises NativeError for one that others can
    write."""
    folder = cache / FOLDER
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        there = folder.lstat()
    except OSError as fault:
        raise NativeError(f"{folder} cannot be made: {fault.strerror}") from fault
    if not stat.S_ISDIR(there.st_mode) or not _is_own(there):
        raise NativeError(f"{folder} must be a directory that is yours alone (mode 0700); remove it")
    return folder


def _is_own(there: os.stat_result) -> bool:
    return there.st_uid == os.geteuid() and not there.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _is_whole(path: Path) -> bool:
    """Tell whether a library is there, the user's own, and all of it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(file, "rb") as opened:
        there = os.fstat(file)
        if not stat.S_ISREG(there.st_mode) or not _is_own(there):
            return False
        data = opened.read()
    return _digest(data[:-_DIGEST_BYTES]) == data[-_DIGEST_BYTES:]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES, person=b"penstock-native").digest()


def _compile(compiler: list[str], flags: tuple[str, ...], path: Path) -> None:
    """Compile the source into a file of its own, and rename that. Raises NativeError."""
    said = ""
    try:
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            for target in _TARGETS:
                command = [
                    *compiler, *_FLAGS, *target, *flags, "-o", str(made), str(SOURCES[0]), *_LIBRARIES,
                ]  # fmt: skip
                done = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_SECONDS
                )
                if done.returncode == 0:
                    with made.open("r+b") as file:
                        digest = _digest(file.read())
                        file.write(digest)
                        os.fchmod(file.fileno(), 0o600)
                    made.replace(path)
                    return
                said = said or (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    except (OSError, subprocess.SubprocessError) as fault:
        said = str(fault)
    raise NativeError(f"the C compiler {shlex.join(compiler)} fails: {said}")
