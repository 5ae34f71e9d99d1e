"""A terminal for a process, as a person has one: what is typed goes in, what is shown comes out."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

READY = "\x1b[?2004h"
"""What an editor sends when it begins: pasted texts are marked from here on."""


class Terminal:
    """A terminal with the process's three streams in it."""

    def __init__(
        self, start: Callable[..., "subprocess.Popen[bytes]"], *arguments: str | Path, **how: str | bool
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = start(*arguments, **how, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> str:
        """What appeared up to and with `text`, which must come within a minute."""
        end = time.monotonic() + 60
        while text not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} is not in {self.seen!r}"
            self.seen += os.read(self._ours, 4096).decode()
        at = self.seen.index(text) + len(text)
        before, self.seen = self.seen[:at], self.seen[at:]
        return before

    def interrupt(self) -> None:
        """Ctrl-C for a process that waits for input. A signal between its prompt and its waiting would be
        lost until the next key."""
        state = Path(f"/proc/{self.process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    @property
    def descriptor(self) -> int:
        """Its file descriptor."""
        return self._ours

    def close(self) -> None:
        os.close(self._ours)
