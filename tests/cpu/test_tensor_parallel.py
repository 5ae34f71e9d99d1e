"""A model divided among processes says what it says in one: all families, streamed weights, preemptions, and
an end for every failure."""

import importlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

import adapters
import forks
import tiny
from cpu.test_run_ahead import alike
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import BudgetError, CheckpointError, ConfigError, DeviceError, EngineClosedError
from penstock.cli.main import main
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.parallel.group import Group
from penstock.weights.checkpoint.lora import Adapter
from penstock.weights.streaming.residency import WeightLimits
from servers import until

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 24,
    "block_size": 4,
    "max_sequences": 5,
}
FEW = 10
"""Tokens of most answers."""
GREEDY = SamplingParams(temperature=0, max_tokens=FEW, ignore_eos=True, logprobs=0)
USUAL = ["llama_biases", "qwen2_moe", "glm4_moe", "minimax_m2"]
"""One of each kind; the others' parts are those of tests/cpu/test_sharded.py."""
EVERY = sorted(set(tiny.CASES) - {"llama_dynamic"}) if tiny.THOROUGH else USUAL


def asked(llm: LLM, params: SamplingParams = GREEDY) -> list[Completion]:
    return llm.generate(tiny.prompts(), params)


def as_one(found: Sequence[Completion], name: str) -> None:
    for one, reference in zip(found, tiny.references(name), strict=True):
        assert list(one.tokens) == reference.tokens[:FEW]
        expected = reference.after_prompt[range(FEW), reference.tokens[:FEW]]
        assert one.logprobs is not None
        assert (
            max(abs(mine.logprob - float(other)) for mine, other in zip(one.logprobs, expected, strict=True))
            < 1e-4
        )


def children() -> set[int]:
    forks.ready()
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_say_what_one_does(name: str) -> None:
    before = children()
    with LLM(tiny.checkpoint(name), **SETTINGS, tensor_parallel=2) as llm:
        assert len(children() - before) == 1
        as_one(asked(llm), name)
        again = asked(llm)
        as_one(again, name)
        assert max(one.cached_tokens for one in again) > 0
    assert children() <= before


def test_three_ranks_whose_parts_are_uneven_and_requests_that_push_each_other_out() -> None:
    few = SETTINGS | {"kv_blocks": 16, "max_length": 60}
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=10, top_p=0.9)
    with LLM(tiny.checkpoint("qwen3"), **few, tensor_parallel=3) as llm:
        found = [one.tokens for one in llm.generate(tiny.prompts(), params)]
        assert llm.stats().preemptions > 0
    with LLM(tiny.checkpoint("qwen3"), **few) as llm:
        assert found == [one.tokens for one in llm.generate(tiny.prompts(), params)]


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_feed_forwards_that_ranks_divide_in_whole_units(name: str, tmp_path: Path) -> None:
    """Nine units of 64 rows: five and four."""
    path = tiny.write(replace(tiny.CASES[name], seed=3), tmp_path / "model", intermediate_size=576)
    found = []
    for ranks in (1, 2):
        with LLM(path, **SETTINGS, tensor_parallel=ranks) as llm:
            found.append(asked(llm))
    alike(found[1], found[0], 1e-4)


@pytest.mark.parametrize(
    ("name", "ranks", "disk"),
    [
        *([("llama", 2, True)] if tiny.THOROUGH else []),
        ("qwen2_windows", 2, True),
        ("qwen3", 3, False),  # Whose parts are uneven.
    ],
)
def test_kv_of_several_ranks_in_host_memory_and_on_disk(
    name: str, ranks: int, disk: bool, tmp_path: Path
) -> None:
    """Each holds that of its own heads. Requests are longer than the devices' pages, and come back."""
    rng = random.Random(name)
    prompts = [[rng.randrange(3, 90) for _ in range(count)] for count in (90, 7, 150, 30)]
    settings = SETTINGS | {"max_length": 256, "max_step_tokens": 32, "max_sequences": 3}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    with LLM(tiny.checkpoint(name), **(settings | {"kv_blocks": 200})) as llm:
        wanted = [one.tokens for one in llm.generate(prompts, params)]
    far: dict[str, object] = {"host_kv_memory": "2MiB"}
    if disk:
        far = {"host_kv_memory": "100KiB", "disk_kv_memory": "4MiB", "kv_directory": tmp_path}
    settings |= {"kv_blocks": 26, "check": True, "tensor_parallel": ranks} | far
    before = children()
    with LLM(tiny.checkpoint(name), **settings) as llm:
        carrier = llm.booted.engine._ranks.carrier
        assert carrier is not None
        assert (carrier.disk is not None) == disk
        for _ in range(2):
            found = llm.generate(prompts, params)
            assert [one.tokens for one in found] == wanted
        assert max(one.cached_tokens for one in found) > 0
        assert carrier.copied_bytes > 0
    assert children() <= before
    assert not [path for path in tmp_path.iterdir() if path.is_file()], "what is for long contexts is gone"


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """Ranks with room for adapters."""
    room = {"max_loras": 3, "max_lora_rank": 16}
    with LLM(tiny.checkpoint("llama"), **SETTINGS, **room, tensor_parallel=2) as llm:
        yield llm


def test_adapters_are_divided_among_ranks(two: LLM, tmp_path: Path) -> None:
    """And none has one that another finds changed, or does not find."""
    base, read = tiny.checkpoint("llama"), Adapter.read
    some = {
        "a": adapters.write(tmp_path / "a", base, 8, seed=1),
        "b": adapters.write(tmp_path / "b", base, 3, ["q_proj", "o_proj", "down_proj"], seed=2),
    }
    names = ["a", None, "b", "b", "a", None]
    with LLM(base, **SETTINGS, lora_modules=some) as one:
        right = one.generate(tiny.prompts(), GREEDY, lora=names)
    for name, path in some.items():
        two.load_lora_adapter(name, path)
    for mine, other in zip(two.generate(tiny.prompts(), GREEDY, lora=names), right, strict=True):
        assert mine.tokens == other.tokens

    def changed(path: Path, *given: Any) -> Adapter:
        found = read(path, *given)
        adapters.change(path, lora_alpha=17)
        return found

    def moved(path: Path, *given: Any) -> Adapter:
        found = read(path, *given)
        path.rename(tmp_path / "moved")
        return found

    for hostile, message in (
        (changed, "rank 1: the adapter in .*b changed while it was read; load it again"),
        (moved, "rank 1: .*b is no LoRA adapter"),
    ):
        with patch.object(Adapter, "read", hostile), pytest.raises(CheckpointError, match=message):
            two.load_lora_adapter("late", some["b"])
    assert [*two.lora_adapters] == ["a", "b"]
    two.load_lora_adapter("late", some["a"])
    for _ in range(2):
        [late] = two.generate(tiny.prompts()[0], GREEDY, lora="late")
        assert late.tokens == right[0].tokens
        two.sleep()
        two.wake_up()


def test_each_rank_streams_its_own_share(two: LLM, tmp_path: Path) -> None:
    """From a pack of its own, which is made once."""
    whole = two.booted.weights.bytes
    some = Override(limits=WeightLimits(whole // 2, whole // 2))
    with patch("penstock.api.opening.boot", partial(boot, override=some)):
        for _ in range(2):
            with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2, cache=tmp_path) as llm:
                as_one(asked(llm), "llama")
                stats = llm.memory.weights
                assert stats.read > 0
                assert stats.copied > 10 * whole // 2
                assert stats.device + stats.host + stats.disk == whole
    folders = sorted(path.name[-6:] for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["0-of-2", "1-of-2", "native"]


def test_a_rank_that_is_killed_is_an_error_that_says_so_and_leaves_nothing() -> None:
    before = children()
    with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2) as llm:
        [follower] = children() - before
        stream = llm.stream(tiny.prompts()[0], SamplingParams(max_tokens=60, ignore_eos=True))
        next(stream)
        threading.Timer(0.02, lambda: psutil.Process(follower).kill()).start()
        began = time.monotonic()
        with pytest.raises(DeviceError, match=r"rank 1 of 2 was killed by SIGKILL"):
            llm.generate(tiny.prompts() * 100, GREEDY)
        assert time.monotonic() - began < 60
        with pytest.raises(EngineClosedError, match="rank 1 of 2"):
            llm.generate([1, 2], GREEDY)
    assert children() <= before


def test_a_rank_that_fails_while_it_starts_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = (
        "def fail(*what):\n    raise OSError('no such disk')\n\nimport penstock.engine.team as "
        "team\nteam.open_described = fail\n"
    )
    follower = "any('penstock.parallel.seat' in one for one in sys.orig_argv)"
    (tmp_path / "broken.py").write_text(what)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif {follower}:\n    import broken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        "penstock.parallel.crew.subprocess", subprocess
    )  # sitecustomize is for processes that start.
    before = children()
    with pytest.raises(DeviceError, match=r"rank 1 of 2 .*no such disk"):
        LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2)
    until(lambda: children() <= before)  # A compiler that was started meanwhile comes to its end.


FAILING = """
import os, time
from penstock.engine import boot
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.runner import Runner

def follow(seat, *given, where):
    meet, met = seat.group, []

    def group(device):
        met.append(meet(device))
        return met[0]

    def wait_for_others():
        late = time.monotonic() + 30
        while not met[0].over.item():
            if time.monotonic() > late:
                print("tidied up while its device waits for others", flush=True)
                os._exit(3)
            time.sleep(1e-3)

    def fail(part, *_):
        weights = part if where == "loading" else part.target.weights
        weights._streams[0].run(wait_for_others)
        raise OSError("no such disk")

    seat.group = group
    if where == "loading":
        WeightStream.load = fail
    else:
        Runner.begin = fail
    boot.follow(seat, *given)
"""
"""A follower that fails while something on its device waits for other ranks, as a sum does on a GPU: here on
the stream of its copies, which is waited for when weights are closed. Rank 0 is in a collective then, or
comes to one."""


@pytest.mark.parametrize("where", ["loading", "serving"])
def test_a_rank_that_fails_waits_for_nobody_on_its_device(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it ends, and rank 0, which waits for it, is told why."""
    before = children()
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("failing")
    monkeypatch.setitem(
        sys.modules, "failing", failing := sys.modules.pop("failing")
    )  # Gone behind the test.

    def say() -> None:
        with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2) as llm:
            assert where == "serving"
            asked(llm)

    with (
        patch("penstock.engine.boot.follow", partial(failing.follow, where=where)),
        pytest.raises(
            DeviceError,
            match=r"^rank 1 of 2 ended with exit code 1: .*OSError: no such disk; the other ranks were "
            r"ended too$",
        ),
    ):
        say()
    assert children() <= before


def test_a_sum_that_failed_at_the_start_is_an_error_there_and_nobody_waits_for_others() -> None:
    """Not in the first request."""
    groups: list[Group] = []

    def check(group: Group) -> None:
        groups.append(group)
        raise DeviceError("a sum is incomplete")

    with patch.object(Group, "check", check), pytest.raises(DeviceError):
        LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2)
    assert groups
    assert groups[0].over.item() == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel": 2, "host_kv_memory": 0, "disk_kv_memory": "1MiB"},
            "disk_kv_memory needs host_kv_memory",
        ),
        ({"tensor_parallel": 2, "host_kv_memory": 2000}, "less than a block"),
        ({"tensor_parallel": 0}, "tensor_parallel 0 must be a whole number above zero"),
        ({"tensor_parallel": 64}, "tensor_parallel=64 is more than"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(settings: dict[str, object], message: str) -> None:
    before = children()
    with pytest.raises((BudgetError, ConfigError, DeviceError), match=message):
        LLM(tiny.checkpoint("llama"), **(SETTINGS | settings))
    assert children() <= before


@pytest.mark.parametrize("ends", ["well", "ill"])
def test_ranks_share_the_threads_of_a_cpu_and_give_them_back(ends: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        if ends == "ill":
            with pytest.raises(BudgetError):
                LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2, kv_blocks=10**9)
        else:
            with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2):
                assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_command_line_divides_too(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--max-tokens", "6", "--temperature", "0", "--device", "cpu", "--dtype", "float32", "--quiet"]
    said = []
    for ranks in ("1", "2"):
        assert main(["run", "Once upon a time", *given, "--tensor-parallel", ranks]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_processes_that_torchrun_starts_are_the_ranks(tmp_path: Path) -> None:
    """With what it tells each; tests/cpu/test_ranks.py has it start some."""
    program = tmp_path / "program.py"
    program.write_text(
        "from penstock import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    with LLM(device='cpu', dtype='float32', tensor_parallel=2) as llm:\n"
        "        print(llm.generate('Once upon a time', SamplingParams(temperature=0, "
        "max_tokens=6))[0].text)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"]
    first, second = (
        forks.Popen(
            command,
            env=os.environ | told | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    with first, second:
        try:
            said = [process.communicate(timeout=100) for process in (first, second)]
        finally:
            first.kill()
            second.kill()
    assert (first.returncode, second.returncode) == (0, 0), said
    with LLM(device="cpu", dtype="float32") as llm:
        [expected] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=6))
    assert [out for out, _ in said] == [f"{expected.text}\n", ""]
