"""Long texts are cut into tokens in a process of their own: the tokens are the same, and whatever happens to
it is told or made good."""

import gc
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from penstock.api.text.tokenizer import LONG, Tokenizer
from penstock.base.errors import PenstockError, RequestError

SHIPPED = Path(__file__).resolve().parent.parent.parent / "src" / "penstock" / "shipped"
LONG_TEXT = ("Once upon a time there was a boat.\n\n Ça, 日本 🚤\t" * LONG)[: LONG + 17]


def aside(path: Path = SHIPPED) -> Tokenizer:
    """One that cuts long texts aside."""
    read = Tokenizer.from_directory(path)
    read.cut_aside()
    return read


def unable(read: Tokenizer) -> Tokenizer:
    """With all that computes tokens taken from this process."""
    read._tokenizer = None  # type: ignore[assignment]
    return read


@pytest.mark.parametrize("special", [True, False])
def test_the_tokens_are_the_same(special: bool) -> None:
    here, there = Tokenizer.from_directory(SHIPPED), unable(aside())
    for text in (LONG_TEXT, "\0" * LONG, "日" * LONG):
        assert there.encode(text, special=special) == here.encode(text, special=special)
        assert there.least_tokens(text) == here.least_tokens(text) > 0


def test_short_texts_are_cut_here() -> None:
    read = aside()
    assert read._aside is not None
    read.encode("a" * (LONG - 1))
    assert not read._aside._idle
    read.encode("a" * LONG)
    assert len(read._aside._idle) == 1


def test_texts_come_whole_to_whom_they_belong() -> None:
    """From many threads at once."""
    here, there = Tokenizer.from_directory(SHIPPED), unable(aside())
    texts = [f"{number} boats. " * (LONG // 8) for number in range(6)]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: there.encode(texts[at])})) for at in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {at: here.encode(text) for at, text in enumerate(texts)}


@pytest.mark.parametrize("change", ["another", "gone"])
def test_another_file_is_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str) -> None:
    """Somebody has changed it since it was read."""
    shutil.copytree(SHIPPED, tmp_path / "model")
    file, read = tmp_path / "model" / "tokenizer.json", aside(tmp_path / "model")
    if change == "gone":
        file.unlink()
    else:
        table = json.loads(file.read_text())
        vocab = table["model"]["vocab"]
        first, second = list(vocab)[300:302]
        vocab[first], vocab[second] = vocab[second], vocab[first]
        file.write_text(json.dumps(table))
    assert read.encode(LONG_TEXT) == Tokenizer.from_directory(SHIPPED).encode(LONG_TEXT)
    assert "tokenizer.json has changed" in caplog.text


def test_what_has_no_tokens_is_refused(tmp_path: Path) -> None:
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none of them"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"model": model}))
    read = aside(tmp_path)
    for _ in range(2):
        with pytest.raises(RequestError, match="has no tokens for this text"):
            unable(read).encode("b" * LONG)
    with pytest.raises(RequestError, match="surrogate U\\+D800 at character 70000"):
        read.encode("a" * 70_000 + "\ud800")


def test_one_that_was_killed_is_told_of_and_replaced() -> None:
    read = unable(aside())
    assert read._aside is not None
    right = read.encode(LONG_TEXT)
    [process] = read._aside._idle
    os.kill(process._process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (process._process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(PenstockError, match="the process that tokenizes long texts has ended") as raised:
        read.encode(LONG_TEXT)
    assert not isinstance(raised.value, RequestError), "the request is not to blame"
    assert read.encode(LONG_TEXT) == right


def test_it_leaves_the_processor_to_others_and_ends_with_its_tokenizer() -> None:
    read = aside()
    read.encode(LONG_TEXT)
    assert read._aside is not None
    [process] = read._aside._idle
    there = process._process
    assert os.getpriority(os.PRIO_PROCESS, there.pid) == 19
    del read, process
    gc.collect()
    assert there.returncode is not None
