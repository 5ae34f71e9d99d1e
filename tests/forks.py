"""Processes for tests that begin with torch imported: importing it takes two seconds of a core, more than
most of them do afterwards.

`Popen` is subprocess's, but what runs `python -c` or `python -m` is forked from a process that has imported
what is heavy and nothing of penstock, or, for a `LoadedPopen`, penstock too; there is one for each
environment that an interpreter would look at when it starts. The new process has the file descriptors,
folder, environment, signal mask, session and parent that it would have had. What looks at how a process
starts or at what it imports needs a real one.

It ends as it would have ended: threads are waited for, what is registered for the end is called, and modules
are cleared. But what was imported before the fork is not freed piece by piece, and destructors of C++
libraries are left out; both together took longer than most tests. They are called where another thread still
runs, which they might hurt.

Why it is a child of the caller's: it is forked by a child of that process which ends at once, while the
caller takes in orphans (PR_SET_CHILD_SUBREAPER); it begins only when that has come about.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_HEAVY = (
    "numpy",
    "torch",
    "torch.distributed",
    "tokenizers",
    "safetensors.torch",
    "starlette.applications",
    "uvicorn",
    "jinja2",
    "rich.console",
)
_AT_START = (
    "PYTHON",
    "MALLOC_",
    "LANG",
    "LC_",
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA",
    "TORCH",
    "NCCL",
)
"""What an environment has of these, an interpreter or a library looks at when it starts."""
_OURS: tuple[str, ...] = (
    "penstock.api.llm",
    "penstock.cli.main",
    "penstock.cli.commands.serve",
    "penstock.server.run",
)
_AT_IMPORT = "TRITON_INTERPRET"
"""What Triton looks at when it is imported."""
_PATH = "PYTHONPATH"
"""Of these the one that changes nothing but where modules are looked for, which is seen to in the new
process."""
_PR_SET_CHILD_SUBREAPER = 36
_FAR = 512
"""File descriptors above all that are passed on by their numbers."""


class _Stem:
    """What processes are forked from."""

    def __init__(self, environment: Mapping[str, str], more: Sequence[str]) -> None:
        near, far = socket.socketpair()
        with far:
            # What has more is forked itself, from what has less.
            less = _Real if not more else LoadedPopen if more == FollowerPopen.imported else Popen
            how = ["-c", _AS_A_FILE] if more else [__file__]
            command = [sys.executable, *how, str(far.fileno()), *more]
            self._process = less(command, env=environment, pass_fds=(far.fileno(),), stdin=subprocess.DEVNULL)
        self._line = near

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._line.close()
        self._process.wait()

    def fork(self, order: Mapping[str, object], files: Sequence[int]) -> int:
        """The new process's number."""
        data = json.dumps(order).encode()
        socket.send_fds(self._line, [len(data).to_bytes(8, "little")], files)
        self._line.sendall(data)
        return int.from_bytes(_read(self._line, 8), "little")


_PYTHON = sys.executable
_AS_A_FILE = f"__file__ = {__file__!r}; exec(compile(open(__file__).read(), __file__, 'exec'))"
_stems: dict[tuple[tuple[str, ...], ...], _Stem] = {}
_forking = threading.RLock()
_Real = subprocess.Popen


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Forked if it can be: a list of this Python, `-c` or `-m`, and what is behind that."""

    imported: tuple[str, ...] = ()
    """What it has imported besides."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *more: Any,
    ) -> None:
        (
            _,
            _,
            shell,
            p2cread,
            p2cwrite,
            c2pread,
            c2pwrite,
            errread,
            errwrite,
            _,
            gid,
            gids,
            uid,
            umask,
            session,
            *others,
        ) = more
        words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        plain = (
            not shell
            and executable is None
            and preexec_fn is None
            and close_fds
            and (gid, gids, uid, umask) == (None, None, None, -1)
        )
        if (
            not plain
            or words[:1] != [_PYTHON]
            or words[1:2] not in (["-c"], ["-m"])
            or any(one not in (-1, None) for one in others)
        ):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        environment = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if env is None else env).items()
        }
        standard = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        places = [0, 1, 2, *pass_fds]
        order = {
            "words": words[1:],
            "folder": os.fsdecode(cwd) if cwd is not None else os.getcwd(),
            "environment": environment,
            "places": places,
            "session": bool(session),
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        self.pid = _fork(order, [*standard, *pass_fds], environment, self.imported)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class LoadedPopen(Popen):
    """The same of a process that imports penstock anyway, which takes most of its time."""

    imported = _OURS


class FollowerPopen(LoadedPopen):
    """The same of a process that imports tests' own modules, too, and with them transformers."""

    imported = (*_OURS, "hypothesis", "pytest", "torch.testing", "transformers.modeling_utils")


class CompilerPopen(Popen):
    """The same of a process in which Triton compiles kernels, and does not interpret them."""

    imported = ("compiling", "pretending")


def run(
    command: Sequence[str], popen: type[Popen] = Popen, **more: Any
) -> "subprocess.CompletedProcess[Any]":
    """As subprocess.run with what it captures."""
    with popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    ) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ready() -> None:
    """From now on nothing is there, once a process has gone, that was not there before it came."""
    for environment in (os.environ, {**os.environ, "OMP_NUM_THREADS": "1"}):
        with _forking:
            _stem(environment)
    for popen in (LoadedPopen, FollowerPopen):
        with _forking:
            _stem(os.environ, popen.imported)


def close() -> None:
    """End what others are forked from; they go on."""
    while _stems:
        _stems.popitem()[1].close()


def _fork(
    order: Mapping[str, object], files: Sequence[int], environment: Mapping[str, str], more: tuple[str, ...]
) -> int:
    libc = ctypes.CDLL(None)
    with _forking:
        stem = _stem(environment, more)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            return stem.fork(order, files)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _stem(environment: Mapping[str, str], more: tuple[str, ...] = ()) -> _Stem:
    """What processes of this environment are forked from."""
    looked = {
        name: value for name, value in environment.items() if name.startswith(_AT_START) and name != _PATH
    }
    if more:
        if _AT_IMPORT in environment:
            looked[_AT_IMPORT] = environment[_AT_IMPORT]
        # What penstock needs may lie elsewhere, where this process has found it.
        # So may tests' own modules, which only who compiles has imported.
        tests = os.path.dirname(os.path.abspath(__file__)) if more == CompilerPopen.imported else None
        looked[_PATH] = os.pathsep.join(filter(None, [_ours(environment), os.environ.get(_PATH), tests]))
    kind = (*sorted(looked.items()), more)
    stem = _stems.get(kind)
    if stem is None or not stem.alive:
        rest = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_AT_START) and (name != _AT_IMPORT or not more)
        }
        stem = _stems[kind] = _Stem(rest | looked, more)
    return stem


def _ours(environment: Mapping[str, str]) -> str:
    """The folder in which a process of this environment finds penstock."""
    for folder in filter(None, environment.get(_PATH, "").split(os.pathsep)):
        if os.path.isfile(os.path.join(folder, "penstock", "__init__.py")):
            return os.path.abspath(folder)
    found = find_spec("penstock")
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(os.path.dirname(found.origin))


def _read(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise EOFError("what processes are forked from is gone")
        data += part
    return data


# ---- in the process that the others are forked from


def _serve(line: socket.socket, more: Sequence[str]) -> tuple[str, str]:
    """Returns in each new process, which is what it was ordered to be but for its code: `-c` or `-m`, and
    what is behind it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Of a terminal, for its whole group.
    if not more:
        atexit.register(_leave)  # Before anything else is: it is called last.
    gc.disable()  # Nothing is garbage yet.
    for name in _HEAVY:
        with suppress(ImportError):
            import_module(name)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if finalizer.peek()[1].__module__ == "torch.library":
            finalizer.atexit = False  # It would take operators out of torch, one by one.
    for name in more:
        import_module(name)
    # What modules hold now they give up when the interpreter ends, and it is not freed piece by piece.
    held = [dict(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    gc.collect()
    # As in conftest.py: what is here is there for good, and whoever collects garbage need not go through it.
    gc.freeze()
    gc.enable()
    while True:
        head, files, _, _ = socket.recv_fds(line, 8, 64)
        if not head:
            os._exit(0)
        head += _read(line, 8 - len(head)) if len(head) < 8 else b""
        order = json.loads(_read(line, int.from_bytes(head, "little")))
        told, telling = os.pipe()
        going, go = os.pipe()
        if (between := os.fork()) == 0:
            if (own := os.fork()) != 0:
                os.write(telling, own.to_bytes(8, "little"))
                os._exit(0)
            os.close(go)
            os.read(going, 1)  # Until its parent is the one that it is to have.
            for one in (told, telling, going):
                os.close(one)
            line.close()
            return _become(order, files)
        number = os.read(told, 8)
        os.waitpid(between, 0)
        for one in (told, telling, going, go, *files):
            os.close(one)
        line.sendall(number)


def _leave() -> None:
    """The process ends when the interpreter has, unless another thread runs."""
    if len(os.listdir("/proc/self/task")) == 1:
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.on_exit(libc._exit, None)  # With the code that it exits with.


def _become(order: Mapping[str, Any], files: Sequence[int]) -> tuple[str, str]:
    far = [fcntl.fcntl(file, fcntl.F_DUPFD, _FAR) for file in files]
    os.closerange(3, _FAR)
    for file, place in zip(far, order["places"], strict=True):
        os.dup2(file, place)
    os.closerange(_FAR, _FAR + len(far))
    if order["session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for name, number in (
        ("stdin", 0),
        ("stdout", 1),
        ("stderr", 2),
    ):  # They look at what they are when they are made.
        usual = getattr(sys, name)
        direct = number != 0 and usual.write_through
        raw = os.fdopen(number, "rb" if number == 0 else "wb", 0 if direct else -1, closefd=False)
        lines = not direct and (os.isatty(number) or number == 2)
        ends = None if number == 0 else "\n"
        stream = io.TextIOWrapper(
            raw,
            usual.encoding,
            usual.errors,
            newline=ends,
            line_buffering=lines,
            write_through=usual.write_through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    kind, what, *words = order["words"]
    sys.argv = [kind, *words]
    here = order["folder"] if kind == "-m" else ""
    sys.path[:1] = [here, *filter(None, os.environ.get(_PATH, "").split(os.pathsep))]
    return kind, what


def _run(kind: str, what: str) -> None:
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), vars(module))


if __name__ == "__main__":
    _run(*_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
else:
    atexit.register(close)
