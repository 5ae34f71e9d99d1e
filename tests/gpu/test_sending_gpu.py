"""Small arrays on their way to a GPU: by a kernel, in order, however late that is and from any thread."""

import threading

import numpy as np
import pytest
import torch

from penstock.memory.sending import read_into, seen_by, send

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.float32, np.float64, np.uint8, np.bool_])
def test_an_array_arrives_as_it_was(kind: type) -> None:
    rng = np.random.default_rng(5)
    for shape in ((), (1,), (3, 5), (7, 64), (1000, 3), (1 << 17,)):
        values = (rng.random(shape) * 200 - 100).astype(kind)
        sent = send(np.asarray(values), DEVICE)
        assert sent.device == DEVICE
        assert sent.shape == shape
        assert sent.cpu().numpy().tobytes() == np.asarray(values).tobytes()


@pytest.mark.parametrize("threads", [1, 4])
def test_nothing_is_written_over_while_kernels_are_late(threads: int) -> None:
    """More is sent than all parts hold, behind a kernel that takes long, on a stream for each thread."""
    failed = list[object]()

    def send_all(number: int) -> None:
        stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            send(np.zeros(4000, np.int64), DEVICE)  # When a kernel is loaded, the device may be waited for.
            torch.cuda._sleep(200_000_000)
            sent = [
                (one, send(np.full(4000 + one % 7, one + number, np.int64), DEVICE)) for one in range(600)
            ]
            failed.extend(one for one, there in sent if not bool((there == one + number).all()))

    every = [threading.Thread(target=send_all, args=(1000 * number,)) for number in range(threads)]
    for one in every:
        one.start()
    for one in every:
        one.join()
    assert not failed


def test_what_is_not_read_yet_is_seen_to_be_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would find it: here nothing is asked."""
    send(np.zeros(4000, np.int64), DEVICE)
    torch.cuda.synchronize()
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: True)
    torch.cuda._sleep(400_000_000)
    sent = [send(np.full(4000, one, np.int64), DEVICE) for one in range(600)]
    assert not all(bool((there == one).all()) for one, there in enumerate(sent))
    torch.cuda.synchronize()


def test_an_array_does_not_wait_for_copies_that_were_queued_before() -> None:
    """For the device only: it comes while they are under way on another stream."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target, copies = torch.empty_like(host, device=DEVICE), torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    send(np.arange(100), DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        for piece, place in zip(host.split(1 << 24), target.split(1 << 24), strict=True):
            place.copy_(piece, non_blocking=True)
        done.record()  # type: ignore[no-untyped-call]
    sent = send(np.arange(100), DEVICE)
    torch.cuda.current_stream(DEVICE).synchronize()
    before = not done.query()  # type: ignore[no-untyped-call]
    assert sent.tolist() == list(range(100))
    assert before


def test_integers_are_read_when_the_kernel_runs() -> None:
    pinned = torch.arange(1000, dtype=torch.int32).pin_memory()
    seen, target = seen_by(DEVICE, pinned), torch.zeros(1000, dtype=torch.int32, device=DEVICE)
    for add in (0, 7):
        pinned += add
        assert seen is not None
        read_into(target[:900], seen, pinned[:900])
        torch.cuda.synchronize()
        assert target[:900].tolist() == pinned[:900].tolist()
        assert not target[900:].any()
