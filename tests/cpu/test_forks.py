"""A process that was forked from one with torch is what it would be if it had been started, but for the time
that it takes."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forks
import penstock

TELLS = """
import json, os, signal, sys
files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
def look(stream):
    how = stream.encoding, stream.errors, stream.line_buffering, stream.write_through
    return *how, stream.isatty(), stream.fileno()
print(json.dumps({
    "kind": sys.argv[0], "main": __name__, "module": sys.modules["__main__"].__dict__ is globals(),
    "folder": os.getcwd(), "first": sys.path[0], "found": [path for path in sys.path if "elsewhere" in path],
    "said": os.environ["SAID"], "names": sorted(os.environ), "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [look(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "read": sys.stdin.read(), "files": len(files), "sent": os.read(int(sys.argv[1]), 9).decode(),
}))
print("and", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("session", [False, True])
def test_it_is_what_it_would_be_if_it_were_started(session: bool, tmp_path: Path) -> None:
    def told(popen: Callable[..., "subprocess.Popen[str]"]) -> tuple[dict[str, Any], str, int]:
        reading, writing = os.pipe()
        os.write(writing, b"over here")
        os.close(writing)
        environment = os.environ | {"PYTHONPATH": "/elsewhere", "SAID": "a word"}
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            process = popen(
                [sys.executable, "-c", TELLS, str(reading)], cwd=tmp_path, env=environment,
                pass_fds=(reading,), start_new_session=session,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            os.close(reading)
        out, err = process.communicate("something to read")
        return json.loads(out), err, process.returncode

    started = told(subprocess.Popen)
    assert told(forks.Popen) == told(forks.LoadedPopen) == told(forks.FollowerPopen) == started
    assert started[0]["parent"] == os.getpid()


ENDS = """
import atexit, sys, threading, time

class Told:
    def __del__(self):
        print("freed", type(sys).__name__)

told = Told()
atexit.register(print, "called")
threading.Thread(target=lambda: (time.sleep(0.05), print("waited for"))).start()
threading.Thread(target=time.sleep, args=(float(sys.argv[1]),), daemon=True).start()
print("flushed", end=" ")
sys.exit(3)
"""


@pytest.mark.parametrize("seconds", ["0", "1000"])
def test_it_ends_as_it_would_if_it_were_started(seconds: str) -> None:
    """Also where a thread goes on."""

    def ended(popen: Callable[..., "subprocess.Popen[str]"]) -> tuple[str, str, int]:
        process = popen(
            [sys.executable, "-c", ENDS, seconds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return *process.communicate(), process.returncode

    started = ended(subprocess.Popen)
    assert started == ("flushed waited for\ncalled\nfreed module\n", "", 3)
    for popen in (forks.Popen, forks.LoadedPopen, forks.FollowerPopen):
        assert ended(popen) == started


def test_it_may_be_forked_on_any_thread_and_killed() -> None:
    found: list[int] = []

    def fork() -> None:
        process = forks.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        process.send_signal(signal.SIGKILL)
        found.append(process.wait())

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [-signal.SIGKILL] * 4


def test_torch_is_there_and_nothing_of_the_package() -> None:
    code = (
        "import sys; print('torch' in sys.modules, [name for name in sys.modules if "
        "name.startswith('penstock')])"
    )
    assert forks.run([sys.executable, "-c", code], text=True).stdout == "True []\n"


def test_the_package_is_there_that_would_be_imported(tmp_path: Path) -> None:
    code = (
        "import sys; print('penstock.server.run' in sys.modules); import penstock; print(penstock.__file__)"
    )
    told = forks.run([sys.executable, "-c", code], forks.LoadedPopen, text=True)
    assert told.stdout == f"True\n{penstock.__file__}\n"
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").touch()
    for path in (f"/elsewhere:{tmp_path}", f"{tmp_path}:{Path(penstock.__file__).parents[1]}"):
        assert forks._ours({"PYTHONPATH": path}) == str(tmp_path)


def test_what_it_cannot_be_is_started() -> None:
    done = forks.run(["sh", "-c", "echo $0"], text=True)
    assert (done.stdout, done.returncode) == ("sh\n", 0)
    done = forks.run([sys.executable, "-I", "-c", "import sys; print(sys.flags.isolated)"], text=True)
    assert done.stdout == "1\n"
