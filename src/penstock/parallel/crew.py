"""Starts and watches the followers of rank 0, in processes of their own.

Each has a control socket and a pipe for its output. One thread here watches all of them.

What ends how:
- A follower that ends or is killed closes its control socket, which the watcher sees at once. One that is
  stopped, or stuck in a call that lets no other thread run, sends no pulse, and is taken for hung after
  `patience` seconds. One that is stuck in its work, but pulses, is noticed by the time limit of the next
  collective.
- The watcher then notes a failure, with the rank, how it ended and what it printed last. It kills all
  followers, and aborts the collectives of this process. So all that wait for a follower get an error: gloo's
  sockets are closed, NCCL is aborted.
- A follower dies with rank 0, however that ends: the kernel kills it when the thread that started it is gone
  (PR_SET_PDEATHSIG). That is the watcher, which lives as long as there are followers. Its next pulse would
  fail too.
- An interrupt from the terminal reaches all processes of its foreground group, and so does a service
  manager's signal to end. Rank 0 decides when to end. Followers are started with SIGINT and SIGTERM blocked,
  and ignore them.

Nothing has a name that could be left behind: shared memory and the store in which ranks find each other are
anonymous files, sockets are pairs, and the loopback sockets of gloo and NCCL go with the processes.
"""

import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import torch

from penstock.base.errors import DeviceError
from penstock.parallel.channel import ChannelWriter
from penstock.parallel.group import Group
from penstock.parallel.seat import JOINED, PULSE, Start, Target
from penstock.parallel.store import SharedStore

_LOG = logging.getLogger("penstock")
PATIENCE = 10.0
"""Seconds without a pulse after which a follower is taken for hung. It also pulses while it computes."""
_START = 120.0
"""Seconds until a new process must send its first pulse. It imports much, perhaps from a slow disk."""
_BOOT = 600.0
"""Seconds between the first follower that comes to the meeting and the last."""
_TAIL = 40
"""Lines of a follower's output that are kept."""
_SHOWN = 3
_DYING = 2.0
"""Most seconds that a process takes to end."""
_VERDICT = 2.0
"""Seconds in which a follower's end is noticed, when a collective with it has failed."""
_PR_SET_PDEATHSIG = 1
_CHILD = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d})  # Before all that takes time.
if os.getppid() != int(sys.argv[2]):  # It was gone before.
    os._exit(1)
sys.path[:] = sys.argv[3:]
from penstock.parallel.seat import follow
follow(int(sys.argv[1]))
"""


@dataclass(slots=True)
class _Child:
    """Holds a follower, as its watcher sees it.

    output: descriptor of a pipe with its output.
    seen: time of its last pulse, by time.monotonic().
    """

    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    output: int
    seen: float
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))
    partial: bytes = b""
    begun: bool = False
    joined: bool = False
    gone: bool = False

    def read(self) -> bool:
        """Read its output. Return False at the end."""
        try:
            text = os.read(self.output, 1 << 16)
        except OSError:
            return False
        *lines, self.partial = (self.partial + text).split(b"\n")
        for line in lines if text else [self.partial]:
            if shown := line.decode(errors="replace").rstrip():
                self.lines.append(shown)
                _LOG.info("rank %d: %s", self.rank, shown)
        return bool(text)

    def ending(self) -> str:
        """Return how it ended, and its last output, in one line."""
        code = self.process.returncode
        if code is None:
            return "does not end, though it was killed"
        how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        said = " | ".join(line.strip() for line in list(self.lines)[-_SHOWN:])
        return f"{how}: {said}" if said else how


class StartedCrew:
    """Holds a crew of processes that were started here. Its thread does everything with them.

    Other threads read `failure` and ask it to end.
    """

    local = 0

    def __init__(self, ranks: int, patience: float, timeout: float) -> None:
        self.ranks = ranks
        self.failure: DeviceError | None = None
        self._patience, self._timeout = patience, timeout
        # If one of these is closed, the next file that is opened gets its number, and followers replace it.
        for standard in (0, 1, 2):
            try:
                os.fstat(standard)
            except OSError:
                os.open(os.devnull, os.O_RDWR)
        self._store = os.memfd_create("penstock store")
        self._writer = ChannelWriter(ranks - 1)
        self._near, self._far = socket.socketpair()
        """Both ends of the socket that wakes the watcher to end."""
        self._children: list[_Child] = []
        self._group: Group | None = None
        self._grace: float | None = None
        """Seconds that followers have to end, or None before they must."""
        self._ready, self._over = False, False
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, target: Target, args: tuple[object, ...]) -> None:
        """Start the followers, and the thread that watches them."""
        self._thread = threading.Thread(
            target=self._watch, args=(target, args), name="penstock watcher", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._over = True
            raise
        while not (self._ready or self._over):
            time.sleep(1e-3)
        if self._fault is not None:
            raise DeviceError(
                f"a process of another rank, of {self.ranks} ranks, cannot be started: "
                f"{self._fault}; check free memory and the limit of processes (ulimit -u)"
            ) from self._fault

    def group(self, device: torch.device) -> Group:
        """Meet all ranks, and return their group."""
        late: float | None = None
        while not all(child.joined for child in self._children):
            if self.failure is not None:
                raise self.failure
            if late is None and any(child.joined for child in self._children):
                late = time.monotonic() + _BOOT
            if late is not None and time.monotonic() > late:
                missing = [child.rank for child in self._children if not child.joined]
                raise DeviceError(
                    f"ranks {missing} did not start within {_BOOT:g} s of the first; look at their logs, "
                    "and restart all ranks"
                )
            time.sleep(5e-3)
        meeting = Future[Group]()
        threading.Thread(
            target=self._meet, args=(device, meeting), name="penstock meeting", daemon=True
        ).start()
        # The meeting would wait for a rank that is gone until its time limit, or for ever.
        while not meeting.done() and self.failure is None:
            time.sleep(1e-3)
        try:
            self._group = meeting.result(_VERDICT)
        except TimeoutError:
            raise self.verdict(
                DeviceError("the ranks cannot connect to each other; check MASTER_ADDR and MASTER_PORT")
            ) from None
        except DeviceError as fault:
            raise self.verdict(fault) from fault
        return self._group

    def _meet(self, device: torch.device, meeting: "Future[Group]") -> None:
        """Meet on a thread of its own, which is abandoned if a rank is gone.

        Why this is safe: the group made here is handed over whole, by the future, or not at all. Then it is
        garbage once its waiting ends. Until then it holds only its own sockets, and the store's file by a
        descriptor of its own.
        """
        try:
            shared = SharedStore(self._store, self.ranks)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                meeting.set_result(
                    Group(shared.store, 0, self.ranks, device, timeout=self._timeout, shared=shared)
                )
        except BaseException as fault:
            meeting.set_exception(fault)

    def send(self, message: bytes) -> None:
        """Send a message to all followers."""
        self._writer.send(message)

    def verdict(self, fault: BaseException) -> BaseException:
        """Return the cause of a fault here: a follower's failure, if there is one, else the fault itself."""
        until = time.monotonic() + _VERDICT
        while self.failure is None and time.monotonic() < until:
            time.sleep(5e-3)
        return self.failure or fault

    def close(self, grace: float = 0.0) -> None:
        """End the crew. Call it again if it was interrupted."""
        if self._grace is None:
            self._grace = grace
        with suppress(OSError):
            self._near.send(b"!")
        while self._thread is not None and not self._over:
            time.sleep(1e-3)
        self._writer.close()
        self._near.close()
        self._far.close()
        store, self._store = self._store, -1
        if store >= 0:
            os.close(store)

    # ---- on the watcher's thread

    def _watch(self, target: Target, args: tuple[object, ...]) -> None:
        try:
            # Processes that are started here inherit the blocked signals, from their first instruction on.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            for rank in range(1, self.ranks):
                self._spawn(rank, target, args)
            self._writer.handed_over()
            self._ready = True
            self._look_after()
        except BaseException as fault:
            self._fault = fault
            self.failure = self.failure or DeviceError(
                f"the thread that watches the other ranks failed: {fault!r}; restart all ranks, "
                "and report this line"
            )
            self._kill()
        finally:
            for child in self._children:
                child.control.close()
                os.close(child.output)
            self._over = True

    def _spawn(self, rank: int, target: Target, args: tuple[object, ...]) -> None:
        near, far = socket.socketpair()
        output, printed = os.pipe()
        line = self._writer.ends[rank - 1].fileno()
        start = pickle.dumps(
            Start(rank, self.ranks, self._writer.memory, line, self._store, self._timeout, target, args)
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(far.fileno()), str(os.getpid()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(far.fileno(), self._writer.memory, line, self._store),
            )
        except BaseException:
            near.close()
            os.close(output)
            raise
        finally:
            far.close()
            os.close(printed)
        self._children.append(_Child(rank, process, near, output, time.monotonic()))
        with suppress(OSError):  # If it has ended already, the watcher notices that later.
            near.sendall(len(start).to_bytes(8, "little") + start)

    def _look_after(self) -> None:
        with selectors.DefaultSelector() as eyes:
            eyes.register(self._far, selectors.EVENT_READ)
            for child in self._children:
                eyes.register(child.control, selectors.EVENT_READ, child)
                eyes.register(child.output, selectors.EVENT_READ, child)
            looked = time.monotonic()
            while True:
                for key, _ in eyes.select(PULSE):
                    child = key.data
                    if child is None:
                        self._far.recv(64)
                    elif key.fileobj is child.control:
                        self._hear(child)
                    elif not child.read():
                        eyes.unregister(child.output)
                if self._grace is not None:
                    break
                now = time.monotonic()
                if now - looked > 4 * PULSE:  # This process was stopped, and perhaps all others with it.
                    for child in self._children:
                        child.seen = now
                looked = now
                if self._judge(now):
                    return
        self._end()

    def _hear(self, child: _Child) -> None:
        try:
            signs = child.control.recv(4096)
        except OSError:
            signs = b""
        child.gone = not signs
        child.begun = True
        child.joined = child.joined or JOINED in signs
        child.seen = time.monotonic()

    def _judge(self, now: float) -> bool:
        """Tell whether a follower has ended the run. If so, kill all."""
        gone = [child for child in self._children if child.gone]
        hung = [
            child
            for child in self._children
            if now - child.seen > (self._patience if child.begun else _START)
        ]
        if not gone and not hung:
            return False
        if gone:
            for child in gone:
                _reap(child)
            # One that was killed is the cause: others fail with an error of their own because of it.
            first = min(gone, key=lambda child: (child.process.returncode or 0) >= 0)
            why = f"rank {first.rank} of {self.ranks} {first.ending()}"
        else:
            why = (
                f"rank {hung[0].rank} of {self.ranks} (process {hung[0].process.pid}) has given no sign for "
                f"{now - hung[0].seen:.0f} s"
            )
        self._kill()
        self.failure = DeviceError(f"{why}; the other ranks were ended too")
        if self._group is not None:
            self._group.abort()
        return True

    def _end(self) -> None:
        """Wait until followers end by themselves, and kill them when their time is over."""
        late = time.monotonic() + (self._grace or 0.0)
        while any(child.process.poll() is None for child in self._children) and time.monotonic() < late:
            for child in self._children:  # A child with a full pipe would wait for ever.
                os.set_blocking(child.output, False)
                child.read()
            time.sleep(5e-3)
        self._kill()
        for child in self._children:
            if self._grace and child.process.returncode:
                _LOG.warning("rank %d did not end by itself: it %s", child.rank, child.ending())

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            _reap(child)


def _reap(child: _Child) -> None:
    """Wait for the end of a dead or dying process, and read the rest of its output."""
    for _ in range(2):
        try:
            child.process.wait(_DYING)
            break
        except subprocess.TimeoutExpired:  # It has closed its socket without ending.
            child.process.kill()
    os.set_blocking(child.output, False)
    while child.read():
        pass


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
