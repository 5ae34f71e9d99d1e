"""Messages come whole and in order to every reader, of any size; nobody waits for one that is gone; every
wait and order is needed."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from zlib import crc32

import psutil
import pytest

from penstock.base.errors import DeviceError
from penstock.parallel.channel import ChannelReader as Reader
from penstock.parallel.channel import ChannelWriter as Writer
from penstock.parallel.channel import Closed
from streams import BRIEF, LONG, within

PARTS, BYTES = 3, 512
READ = """
import socket, sys, time, zlib
from penstock.parallel.channel import ChannelReader as Reader, Closed
reader = Reader(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
slow = float(sys.argv[5])
while True:
    try:
        message = reader.receive()
    except Closed as fault:
        sys.exit(str(fault))
    print(len(message), zlib.crc32(message), flush=True)
    time.sleep(slow)
"""


@contextmanager
def reading(writer: Writer, slow: float = 0.0) -> Iterator[list["subprocess.Popen[str]"]]:
    """A process for each reader, which prints what it has read and then sleeps for `slow` seconds."""
    readers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                READ,
                *map(str, (writer.memory, end.fileno(), PARTS, BYTES, slow * number)),
            ],
            pass_fds=(writer.memory, end.fileno()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, end in enumerate(writer.ends)
    ]
    writer.handed_over()
    try:
        yield readers
    finally:
        for process in readers:
            process.kill()
            process.communicate()


@contextmanager
def world(writers: type[Writer] = Writer, readers: type[Reader] = Reader) -> Iterator[tuple[Writer, Reader]]:
    """Both ends in one process."""
    writer = writers(1, PARTS, BYTES, patience=LONG)
    (end,) = writer.ends
    reader = readers(os.dup(writer.memory), socket.socket(fileno=os.dup(end.fileno())), PARTS, BYTES)
    writer.handed_over()
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()


def some(seed: int, count: int) -> list[bytes]:
    """Messages of no byte to several rings, and of each size beside a part's and a ring's."""
    rng = random.Random(seed)
    sizes = [
        0,
        1,
        *(one + by for one in (BYTES, 2 * BYTES, PARTS * BYTES, 7 * BYTES) for by in (-1, 0, 1)),
        20_000,
    ]
    return [
        rng.randbytes(size) for size in (*sizes, *(rng.choice((5, 300, 700, 4000)) for _ in range(count)))
    ]


def test_every_reader_gets_all_messages_as_they_were_in_order() -> None:
    """Though one is slower than the others."""
    writer = Writer(3, PARTS, BYTES)
    messages = some(1, 100)
    with reading(writer, slow=1e-3) as readers:
        for message in messages:
            writer.send(message)
        for process in readers:
            assert process.stdout is not None
            for message in messages:
                assert process.stdout.readline().split() == [str(len(message)), str(crc32(message))]
        writer.close()
        for process in readers:
            _, error = process.communicate(timeout=LONG)
            assert error.startswith("the writer of a channel is gone")


def test_a_reader_that_waits_sleeps() -> None:
    writer = Writer(1, PARTS, BYTES)
    with reading(writer) as (process,):
        assert process.stdout is not None
        writer.send(b"first")
        process.stdout.readline()
        watched = psutil.Process(process.pid)
        late = time.monotonic() + LONG
        while watched.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < late
        before = watched.cpu_times()
        time.sleep(0.3)
        assert watched.cpu_times() == before
        writer.send(b"second")
        assert process.stdout.readline().split() == ["6", str(crc32(b"second"))]
    writer.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_reader_that_dies_is_noticed(waits: bool) -> None:
    """By a writer that waits for a place, and by one that only sends."""
    writer = Writer(2, PARTS, BYTES)
    with reading(writer) as readers:
        if waits:
            readers[1].send_signal(signal.SIGSTOP)
            killing = threading.Timer(5 * BRIEF, readers[1].kill)
            killing.start()
        else:
            readers[1].kill()
            readers[1].wait()

        def send() -> None:
            with pytest.raises(Closed, match="reader 1 of a channel is gone"):
                writer.send(bytes(20 * BYTES))

        assert within(LONG, send)
    writer.close()


def test_a_reader_that_goes_without_an_answer_is_noticed() -> None:
    """It had read all that there was."""

    class Fallen(Reader):
        def _answer(self) -> None:
            self._line.close()

    with world(Writer, Fallen) as (writer, reader):
        writer.send(b"one")
        assert reader.receive() == b"one"
        with pytest.raises(Closed, match="reader 0 of a channel is gone"):
            writer.send(bytes(PARTS * BYTES))


def test_a_reader_that_hangs_is_noticed() -> None:
    writer = Writer(2, PARTS, BYTES, patience=5 * BRIEF)
    with reading(writer) as readers:
        readers[0].send_signal(signal.SIGSTOP)
        with pytest.raises(
            DeviceError, match=r"reader 0 of a channel between ranks has taken nothing for 0\.1 s"
        ):
            writer.send(bytes(20 * BYTES))
    writer.close()


def test_a_notice_that_is_missing_is_an_error_and_not_another_message() -> None:
    with world() as (writer, reader):
        writer.send(b"one")
        writer._sent += 1
        writer.send(b"two")
        assert reader.receive() == b"one"
        with pytest.raises(DeviceError, match="brought part 2 where part 1 comes next"):
            reader.receive()


def test_closing_twice_does_nothing_and_nothing_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    writer = Writer(2, PARTS, BYTES)
    writer.close()
    writer.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if "penstock" in name]


# ---- what is waited for, and in which order


GATE = threading.Event()
"""Shut in a test, before what it is about."""


class SlowWriter(Writer):
    """Is held before it writes a part."""

    def _fill(self, part: memoryview) -> None:
        assert GATE.wait(LONG)
        super()._fill(part)


class SlowReader(Reader):
    """Is held before it copies a part."""

    def _copy(self, length: int) -> bytes:
        assert GATE.wait(LONG)
        return super()._copy(length)


def through(writers: type[Writer], readers: type[Reader], mutant: bool = False) -> tuple[bool, bool]:
    """Whether a message of more than a ring was through while the gate was shut, and whether it was right in
    the end. mutant: the gate is shut until a part has been taken, or one has been written over, which both
    should be held from."""
    GATE.clear()
    message, got = random.Random(2).randbytes(2 * PARTS * BYTES), []
    with world(writers, readers) as (writer, reader):
        sending = threading.Thread(target=writer.send, args=(message,))
        taking = threading.Thread(target=lambda: got.append(reader.receive()))
        sending.start()
        taking.start()
        late = time.monotonic() + LONG
        while mutant and not (reader._next or writer._sent > PARTS):
            assert time.monotonic() < late, "everybody waits"
            time.sleep(1e-4)
        sending.join(0 if mutant else 5 * BRIEF)
        passed = not sending.is_alive()
        GATE.set()
        sending.join(LONG)
        taking.join(LONG)
        assert not sending.is_alive()
    taking.join(LONG)
    return passed, got == [message]


@pytest.mark.parametrize(
    ("writers", "readers"), [(SlowWriter, Reader), (Writer, SlowReader), (SlowWriter, SlowReader)]
)
def test_whoever_is_held_is_waited_for(writers: type[Writer], readers: type[Reader]) -> None:
    assert through(writers, readers) == (False, True)


class EarlyNotice(SlowWriter):
    """Tells of a part before it writes it."""

    def _fill(self, part: memoryview) -> None:
        self.part = part

    def _notify(self, length: int, last: bool) -> None:
        super()._notify(length, last)
        super()._fill(self.part)


class Heedless(Writer):
    """Waits for nobody."""

    def _await_place(self) -> None:
        pass


class Hasty(SlowReader):
    """Answers before it copies."""

    def _copy(self, length: int) -> bytes:
        super()._answer()
        return super()._copy(length)

    def _answer(self) -> None:
        pass


@pytest.mark.parametrize(
    ("writers", "readers"), [(EarlyNotice, Reader), (Heedless, SlowReader), (Writer, Hasty)]
)
def test_each_wait_and_order_is_needed(writers: type[Writer], readers: type[Reader]) -> None:
    with suppress(Closed):
        _, right = through(writers, readers, mutant=True)
        assert not right
