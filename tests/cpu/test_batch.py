"""Files of requests: every line is answered once, right, in whatever order and however often the run is
ended."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import forks
from penstock import LLM, SamplingParams
from penstock.api import structures
from penstock.api.driver import EngineDriver
from penstock.base.errors import ConfigError
from penstock.cli.commands import batch as batch_command
from penstock.cli.main import main
from penstock.server.batch import Batch, Tally
from streams import LONG

NAMES = ("shipped",)
FEW = ["--device", "cpu", "--dtype", "float32", "--device-memory", "400MiB", "--max-sequences", "3"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        None, device="cpu", dtype="float32", device_memory="400MiB", max_sequences=3, block_size=16
    ) as llm:
        yield llm


def line(custom_id: str, url: str = TEXT, **body: object) -> str:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": url,
            "body": {"model": "shipped", "temperature": 0} | body,
        }
    )


def requests(count: int) -> dict[str, str]:
    """By their ids. Those that begin alike stand apart."""
    beginnings = ["Once upon a time there was a fox", "The sun was shining", "One rainy morning the owl"]
    asked = {}
    for number in range(count):
        prompt = f"{8 * beginnings[number % 3]} and {number // 3} friends"
        own = {"prompt": prompt} if number % 4 else {"messages": [{"role": "user", "content": prompt}]}
        asked[f"id {number}"] = line(
            f"id {number}", TEXT if number % 4 else CHAT, max_tokens=5 + number % 7, **own
        )
    return asked


def expected(llm: LLM, asked: str) -> str:
    body = json.loads(asked)["body"]
    params = SamplingParams(temperature=0, max_tokens=body["max_tokens"])
    return (
        llm.generate(body["prompt"], params)[0].text
        if "prompt" in body
        else llm.chat(body["messages"], params).text
    )


def answers(path: Path) -> dict[str, dict[str, object]]:
    """Each id once, and whole lines."""
    found: dict[str, dict[str, object]] = {}
    text = path.read_text()
    assert not text or text.endswith("\n")
    for one in text.splitlines():
        answer = json.loads(one)
        assert answer["custom_id"] not in found, "answered twice"
        found[answer["custom_id"]] = answer["response"]
    return found


def said(response: dict[str, object]) -> str:
    assert response["status_code"] == 200
    body = response["body"]
    assert isinstance(body, dict)
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


def test_every_line_is_answered_as_if_it_were_alone(llm: LLM, tmp_path: Path) -> None:
    """And where prompts begin alike, what they share is computed once, though they stand apart in the
    file."""
    source, target, asked = tmp_path / "in", tmp_path / "out", requests(24)
    source.write_text("\n".join(asked.values()) + "\n\n")
    llm.clear_prefix_cache()
    seen: list[Tally] = []
    tally = Batch(source, target).run(llm, NAMES, seen.append)
    assert tally == Tally(24, 24, 0) == seen[-1]
    assert [one.answered for one in seen] == sorted(one.answered for one in seen)
    found = answers(target)
    cached = [one["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found.values()]  # type: ignore[index]
    assert sum(count >= 32 for count in cached) >= 24 - 2 * 3 - 3, (
        "three beginnings of two kinds, and three at once that share the first"
    )
    assert {name: said(one) for name, one in found.items()} == {
        name: expected(llm, one) for name, one in asked.items()
    }
    assert llm.stats().running == llm.stats().waiting == 0


def test_what_cannot_be_served_is_said_in_its_line(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    lines = {
        "a": line("a", prompt="Hello", max_tokens=3),
        "many": line("many", prompt="Hello", max_tokens=10**6),
        "b": line("b", prompt="Hello", max_tokens=-1),
        "c": line("c", "/v1/embeddings", prompt="Hello"),
        "d": line("d", prompt="Hello", stream=True),
        "e": line("e", prompt="Hello", modell="x"),
        "f": line("f", prompt="Hello", max_tokens=3, **{"model": "another"}),
        "line 8": "{nonsense",
        "line 9": '{"url": "/v1/completions", "body": {}}',
        "named": '{"custom_id": "named", "body": {}}',
        "g": line("g", prompt="Hello", max_tokens=3, suffix="there"),
    }
    source.write_text("\n".join([*lines.values(), lines["a"]]))
    assert Batch(source, target).run(llm, NAMES) == Tally(12, 12, 11)
    texts = [json.loads(one) for one in target.read_text().splitlines()]
    bad = {one["custom_id"]: one["response"] for one in texts if one["response"]["status_code"] != 200}
    assert set(bad) == {*lines}, "the second line of that id among them"
    for name, part in {
        "many": "context", "b": "max_tokens -1", "c": "/v1/embeddings", "d": "stream", "e": "modell",
        "f": "'another'", "line 8": "JSON",
        "line 9": "custom_id", "named": "url", "g": "suffix", "a": "another line",
    }.items():  # fmt: skip
        assert part in bad[name]["body"]["error"]["message"], name
    assert sum(one["response"]["status_code"] == 200 for one in texts) == 1


def test_a_structure_for_which_there_is_no_time_is_not_said_to_be_wrong(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(structures, "_MOST_LATE", 0)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", prompt="Hello", max_tokens=3, structured_outputs={"regex": "a+"}))
    Batch(source, target).run(llm, NAMES)
    response = answers(target)["a"]
    assert response["status_code"] == 429
    assert "send the request again in a few seconds" in str(response["body"])


def test_a_run_that_was_ended_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    """By an interrupt after any number of answers, with the last line cut short."""
    source, target, asked = tmp_path / "in", tmp_path / "out", requests(9)
    source.write_text("\n".join([*asked.values(), line("bad", prompt="a", n=0)]))

    def stop_after(count: int) -> None:
        def told(tally: Tally) -> None:
            if tally.answered >= count:
                raise KeyboardInterrupt

        Batch(source, target).run(llm, NAMES, told)

    for count in (1, 3, 3, 4, 8):
        with pytest.raises(KeyboardInterrupt):
            stop_after(count)
        assert llm.stats().running == llm.stats().waiting == 0
        before = target.read_bytes()
        target.write_bytes(before + before[: len(before) // 3].rsplit(b"\n", 1)[-1][:40])
    assert Batch(source, target).run(llm, NAMES) == Tally(10, 10, 1)
    found = answers(target)
    assert found.pop("bad")["status_code"] == 400
    assert {name: said(one) for name, one in found.items()} == {
        name: expected(llm, one) for name, one in asked.items()
    }
    with patch.object(EngineDriver, "advance", side_effect=AssertionError("nothing is left to do")):
        assert Batch(source, target).run(llm, NAMES) == Tally(10, 10, 1)


def test_a_run_that_was_killed_goes_on(llm: LLM, tmp_path: Path) -> None:
    """Twice, as soon as there is an answer more; then the command answers the rest."""
    source, target, asked = tmp_path / "in", tmp_path / "out", requests(12)
    source.write_text("\n".join(asked.values()))
    command = [sys.executable, "-m", "penstock", "batch", str(source), str(target), "--quiet", *FEW]
    seen = 0
    for _ in range(2):
        with forks.LoadedPopen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
            late = time.monotonic() + 3 * LONG
            while (
                not target.exists() or target.read_bytes().count(b"\n") <= seen
            ) and process.poll() is None:
                assert time.monotonic() < late
                time.sleep(1e-3)
            process.kill()
        seen = target.read_bytes().count(b"\n")
    assert main(["batch", str(source), str(target), "--quiet", *FEW]) == 0
    found = answers(target)
    assert {name: said(one) for name, one in found.items()} == {
        name: expected(llm, one) for name, one in asked.items()
    }


def test_the_command_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", prompt="Hello", max_tokens=2) + "\n" + line("b", prompt="a", n=0))
    assert main(["batch", str(source), str(target), *FEW]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert f"2 requests, 1 answered, 1 refused: {target}" in err


def test_answers_go_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(line("a", prompt="Hello", max_tokens=2) + "\n" + line("b", prompt="a", n=0))
    assert main(["batch", "in", "-", *FEW]) == 3
    out, err = capfd.readouterr()
    assert {json.loads(one)["custom_id"] for one in out.splitlines()} == {"a", "b"}
    assert "2 requests, 1 answered, 1 refused: stdout" in err
    assert os.listdir() == ["in"]


def test_answers_of_an_earlier_run_stay_where_stdout_goes(tmp_path: Path) -> None:
    """They are not read: a shell adds to them, or has emptied the file."""
    (tmp_path / "in").write_text(line("a", prompt="Hello", max_tokens=2))
    (tmp_path / "out").write_text("a word\n")
    command = [sys.executable, "-m", "penstock", "batch", str(tmp_path / "in"), "-", "--quiet", *FEW]
    for count in (1, 2):
        with (tmp_path / "out").open("ab") as out:
            assert subprocess.run(command, stdout=out, check=False).returncode == 0
        first, *rest = (tmp_path / "out").read_text().splitlines()
        assert first == "a word"
        assert [json.loads(one)["custom_id"] for one in rest] == ["a"] * count
    with open("/dev/full", "wb") as out:
        full = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert (full.returncode, full.stderr.count("\n")) == (2, 1)
    assert "the output cannot be written: No space left on device" in full.stderr


def test_a_line_refused_for_its_models_name_is_asked_again_once_the_model_has_it(
    llm: LLM, tmp_path: Path
) -> None:
    """Its refusals go then, also those of later lines with its id, and nothing else does. What there was no
    time for is asked again in any case."""
    source, target = tmp_path / "in", tmp_path / "out"
    other = line("b", prompt="Hello", max_tokens=3, model="other")
    lines = [line("a", prompt="Hello", max_tokens=3), other, other, line("c", prompt="Hello", n=0)]
    source.write_text("\n".join(lines))
    assert Batch(source, target).run(llm, NAMES) == Tally(4, 4, 3)
    before = target.read_bytes()
    target.chmod(0o640)
    assert Batch(source, target).left(NAMES) == Tally(4, 4, 3), "the model is called as before"
    assert Batch(source, target).left() is None, "its name is not known"
    assert Batch(source, target).run(llm, NAMES) == Tally(4, 4, 3)
    assert target.read_bytes() == before
    both = (*NAMES, "other")
    assert Batch(source, target).left(both) is None
    assert Batch(source, target).run(llm, both) == Tally(4, 4, 2)
    assert Batch(source, target).left() == Batch(source, target).left(both) == Tally(4, 4, 2)
    statuses = [(one["custom_id"], one["response"]["status_code"]) for one in read_lines(target)]
    assert sorted(statuses) == [("a", 200), ("b", 200), ("b", 400), ("c", 400)]
    assert statuses.index(("b", 200)) < statuses.index(("b", 400))
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [source, target]

    busy = json.dumps({"custom_id": "d", "response": {"status_code": 429, "body": {}}, "error": None})
    target.write_text(f"{target.read_text()}{busy}\n")
    source.write_text("\n".join([*lines, line("d", prompt="Hello", max_tokens=3)]))
    assert Batch(source, target).left(NAMES) is None
    assert Batch(source, target).run(llm, NAMES) == Tally(5, 5, 2)
    assert [one["response"]["status_code"] for one in read_lines(target) if one["custom_id"] == "d"] == [200]


def test_lines_that_are_gone_do_not_count_and_nothing_is_loaded_where_nothing_is_left(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    lines = [line(name, prompt="Hello", max_tokens=2) for name in "abc"]
    source.write_text("\n".join([*lines, line("d", prompt="a", n=0)]))
    assert Batch(source, target).run(llm, NAMES) == Tally(4, 4, 1)
    source.write_text(lines[1])
    unnamed = line("f", prompt="Hello", model="other")
    with patch.object(batch_command, "loaded", side_effect=AssertionError("nothing is left to do")):
        # Neither is it looked for: this model is not here.
        assert main(["batch", str(source), str(target), "--model", "no/such", "--no-download"]) == 0
        assert f"1 request, 1 answered, 0 refused: {target}" in capsys.readouterr().err
        # Nor is it loaded where it has still not the name that was asked for.
        refused = {"status_code": 400, "body": {"error": {"param": "model"}}}
        with target.open("a") as file:
            file.write(json.dumps({"custom_id": "f", "response": refused, "error": None}) + "\n")
        source.write_text("\n".join([lines[1], unnamed]))
        assert main(["batch", str(source), str(target), "--name", "another"]) == 3
        assert f"2 requests, 1 answered, 1 refused: {target}" in capsys.readouterr().err
    source.write_text(json.dumps({"custom_id": "f", "url": TEXT, "body": {"prompt": "Hello"}}))
    assert Batch(source, target).left(NAMES) is None, "it asks for no name any more"
    source.write_text("\n".join([lines[1], line("e", prompt="Hello", max_tokens=2)]))
    assert Batch(source, target).run(llm, NAMES) == Tally(2, 2, 0)
    assert len(read_lines(target)) == 6, "what was answered once is kept"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("gone", "out", "gone cannot be read: it does not exist"),
        (".", "out", ". cannot be read: it is a directory"),
        ("in", ".", ". cannot be written: it is a directory"),
        ("in", "gone/out", "gone/out cannot be written: gone is no directory that can be written"),
        ("in", "in/out", "in/out cannot be written: in is no directory that can be written"),
        ("empty", "out", "empty has no requests; write one to a line"),
    ],
)
def test_files_are_looked_at_before_a_model_is(
    source: str,
    target: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model is none: it is not reached."""
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(line("a", prompt="Hello"))
    Path("empty").write_text("")
    assert main(["batch", source, target, "--model", "nothing"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing to read", "no answers", "a folder"])
def test_files_that_cannot_be_used_are_refused(llm: LLM, tmp_path: Path, what: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    if what == "nothing to read":
        message = "in cannot be read: .*; give a file with one JSON request on each line"
    elif what == "no answers":
        source.write_text(line("a", prompt="Hello"))
        target.write_text('{"precious": "data"}\n')
        message = "out has a line that is no answer of a batch; name another file"
    else:
        target.mkdir()
        message = "out cannot be written: .*; name another file"
    with pytest.raises(ConfigError, match=message):
        Batch(source, target).run(llm, NAMES)
    if what == "no answers":
        assert target.read_text() == '{"precious": "data"}\n'


@pytest.mark.parametrize(
    "precious",
    [
        b'{"precious": "data"}',
        b"a word",
        bytes(range(40, 50)),
        b'{"id": "batch_req-1", "custom_id": "a"}',
        line("a", prompt="Hello").encode(),
        line("a", prompt="Hello").encode() + b"\n",
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(precious: bytes, tmp_path: Path) -> None:
    """Also where its only line has no end, as JSON is written, and where it holds requests."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", prompt="Hello"))
    target.write_bytes(precious)
    with pytest.raises(ConfigError, match="out has a line that is no answer of a batch; name another file"):
        Batch(source, target)
    assert target.read_bytes() == precious


@contextmanager
def room(size: int) -> Iterator[None]:
    """Files may have so many bytes, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_keeps_what_was_answered_and_is_named(llm: LLM, tmp_path: Path) -> None:
    asked = requests(6)
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("\n".join(asked.values()))
    Batch(source, whole).run(llm, NAMES)
    every, sizes = answers(whole), [len(one) + 1 for one in whole.read_bytes().splitlines()]
    kept = 0
    for most in (sum(sizes[:2]) + 40, sum(sizes[:4]) + 1):
        with room(most), pytest.raises(ConfigError) as refused:
            Batch(source, target).run(llm, NAMES)
        found = answers(target)  # Whole lines.
        assert len(found) > kept
        kept = len(found)
        assert str(refused.value) == (
            f"{target} cannot be written: File too large; {kept} answers of 6 are kept there; free some "
            "space, and run it again, which goes on behind them"
        )
    before = target.read_bytes()
    assert Batch(source, target).run(llm, NAMES) == Tally(6, 6, 0)
    assert target.read_bytes().startswith(before)
    texts = [
        {name: one["body"]["choices"] for name, one in some.items()}  # type: ignore[index]
        for some in (answers(target), every)
    ]
    assert texts[0] == texts[1]


def test_a_device_that_is_full_is_named_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", prompt="Hi", max_tokens=1))
    (tmp_path / "out.jsonl").symlink_to("/dev/full")
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--quiet", *FEW]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/out.jsonl cannot be written: No space left on device; 0 answers of 1 are kept" in said


def test_a_file_may_begin_with_a_byte_order_mark(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text(line("a", prompt="Hello", max_tokens=1), encoding="utf-8-sig")
    assert Batch(source, tmp_path / "out").run(llm, NAMES) == Tally(1, 1, 0)


def test_lines_of_one_id_of_which_one_is_no_request_are_each_answered(llm: LLM, tmp_path: Path) -> None:
    good, ill = line("a", prompt="Hello", max_tokens=1), '{"custom_id": "a", "body": {}}'
    for lines in ([good, ill], [ill, good]):
        source, target = tmp_path / "in", tmp_path / "out"
        target.unlink(missing_ok=True)
        source.write_text("\n".join(lines))
        for _ in range(2):  # What was answered is not asked again.
            assert Batch(source, target).run(llm, NAMES) == Tally(2, 2, 1)
            told = [json.loads(one)["response"]["status_code"] for one in target.read_text().splitlines()]
            assert told == [200 if one is good else 400 for one in lines]


def test_answers_go_to_another_file_than_that_of_requests(tmp_path: Path) -> None:
    source, same = tmp_path / "in", tmp_path / "same"
    source.write_text(line("a", prompt="Hello"))
    same.symlink_to(source)
    for target in (source, same):
        with pytest.raises(ConfigError, match="is the file of requests, too; name another one"):
            Batch(source, target)
    assert source.read_text() == line("a", prompt="Hello")


def test_an_answer_that_was_cut_anywhere_is_made_again(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    asked = [line("a", prompt="Hello", max_tokens=2), line("b", prompt="Hi", max_tokens=2)]
    source.write_text("\n".join(asked))
    Batch(source, target).run(llm, NAMES)
    whole = target.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (1, 5, 17, 40, first - 1, first, first + 1, len(whole) - 1):
        target.write_bytes(whole[:end])
        batch = Batch(source, target)
        assert target.read_bytes() == (whole[:first] if end >= first else b"")
        assert batch.run(llm, NAMES) == Tally(2, 2, 0)


@pytest.mark.parametrize("first", ["served", "refused", "no request"])
def test_of_lines_with_one_id_none_is_lost_wherever_the_run_ends(
    llm: LLM, tmp_path: Path, first: str
) -> None:
    """The first is answered, and the others are refused behind it: after each line a run is ended, and the
    next goes on."""
    source, target = tmp_path / "in", tmp_path / "out"
    right = line("same", prompt="Hello", max_tokens=3)
    lines = {
        "served": [right, line("b", prompt="Once", max_tokens=2), right, right],
        "refused": [line("same", prompt="a", n=0), line("b", prompt="Once", max_tokens=2), right, right],
        "no request": [
            "{nonsense",
            line("line 1", prompt="Hello", max_tokens=3),
            line("line 4", prompt="a"),
            "{",
        ],
    }[first]
    source.write_text("\n".join(lines))
    whole = Batch(source, target).run(llm, NAMES)
    expected = [(one["custom_id"], one["response"]["status_code"]) for one in read_lines(target)]
    assert whole.answered == len(expected) == 4
    by_id = {name: [status for one, status in expected if one == name] for name, _ in expected}
    assert (
        by_id
        == {
            "served": {"same": [200, 400, 400], "b": [200]},
            "refused": {"same": [400, 400, 400], "b": [200]},
            "no request": {"line 1": [400, 200], "line 4": [200, 400]},
        }[first]
    )

    for cut in range(4):
        target.write_text("".join(f"{json.dumps(one)}\n" for one in read_lines(target)[:cut]))
        assert Batch(source, target).run(llm, NAMES) == whole
        again = [(one["custom_id"], one["response"]["status_code"]) for one in read_lines(target)]
        assert sorted(again) == sorted(expected)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]
