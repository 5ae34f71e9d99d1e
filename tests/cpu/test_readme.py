"""The documents can be followed: every command and every block of Python in README.md runs, and
docs/adding-a-model.md adds a family.

Where README writes MODEL, the checkpoint that comes with the package stands in; where it allows a model
larger than the GPU so much memory, that checkpoint is allowed less than it needs.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
import transformers

import forks
import hubs
import tiny
from parity import GREEDY, WITH_PROMPT, measure
from penstock import LLM, Structure
from penstock.api.llm import SHIPPED_MODEL
from penstock.arch import families
from penstock.arch.families import Family, read_spec
from penstock.base.errors import UnsupportedModelError
from penstock.cli.main import main
from penstock.evals import mix
from penstock.weights.pack.reader import Pack

ROOT = Path(__file__).resolve().parents[2]
README, ADDING = ROOT / "README.md", ROOT / "docs" / "adding-a-model.md"
ENTRY = "import sys; from penstock.cli.main import main; sys.exit(main())"
INSTALLED = ".venv/bin/"
OPERATORS = {"|", "<", ">", ";", "&&"}
"""Of a command that needs a shell."""
"""Where `make` puts commands."""
SERVED = "penstock serve "
BATCH = "requests.jsonl"
KV = "./kv"
"""Where README keeps KV."""
FEW = "./few"
"""Where README keeps weights of few bits."""
HUB = "Qwen/Qwen3-8B", "penstock list"
"""What README's commands for models of the Hub have in them."""
ELSEWHERE = KV, FEW, SERVED, BATCH, *HUB, "curl"
"""What the commands have in them that tests of their own run."""
LARGE, TRACE = "--device-memory 16GiB --host-memory 100GiB", "trace.json"
"""What README writes for a model larger than the GPU."""


def blocks(document: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert document.read_text().count("\n```") == 2 * len(found), "a fence is not closed"
    return found


def of_language(document: Path, language: str) -> list[str]:
    return [text for kind, text in blocks(document) if kind == language]


def commands(document: Path) -> list[str]:
    """Every line of the shell blocks, with the remark behind it."""
    return [
        line
        for text in of_language(document, "sh")
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def filled(text: str) -> str:
    return re.sub(r"\bMODEL\b", str(SHIPPED_MODEL), text)


def beginning(folder: Path, characters: int) -> Path:
    """A README.md in the folder that is the beginning of this one, which takes less time to read and leaves
    nothing else out."""
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(README.read_text(encoding="utf-8")[:characters], encoding="utf-8")
    return folder


def run_here(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock` with these arguments does its work; nothing is on its stdin. An answer may be blank, since
    it is drawn, and other processors draw other ones: so its tokens are looked for, not its letters."""
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b""), encoding="utf-8"))
    capsys.readouterr()
    answers = arguments[0] == "run" and "--json" not in arguments
    added = (
        ["--verbose", *([] if {"--seed", "--temperature"} & set(arguments) else ["--seed", "1"])]
        if answers
        else []
    )
    code = main(arguments + added)
    out, err = capsys.readouterr()
    assert code == 0, err
    if answers:
        assert re.search(r"; output [1-9][\d,]* tokens", err), err
    else:
        assert out.strip()


def run_in_shell(command: str, folder: Path) -> str:
    return in_shell(command, folder).stdout


def in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The same for a command that needs a shell or a process of its own; `penstock` is first on its path, and
    `folder` its home."""
    script = folder / "penstock"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(ENTRY)} "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    words = shlex.split(command)
    if words[0] == "penstock" and not OPERATORS & set(words):
        plain = forks.run(
            [sys.executable, "-c", ENTRY, *words[1:]],
            forks.LoadedPopen,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        assert plain.returncode == 0, plain.stderr
        return plain
    shell = ["bash", "-euo", "pipefail", "-c", command]
    result = subprocess.run(
        shell,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


def run_streamed(command: str, folder: Path) -> None:
    """Run a command for a model larger than the GPU as README says it runs: some of the model streams from a
    pack in the cache, and the output is that of a run in which all of it stays on the device."""
    command = filled(command).replace(TRACE, str(folder / TRACE))
    assert command.count(LARGE) == 1
    everything = "--device cpu --dtype float32 --max-length 128 --temperature 0 --max-tokens 32"
    resident = in_shell(command.replace(LARGE, everything), folder)
    cache = folder / ".cache" / "penstock"
    assert {path.name for path in cache.glob("*")} <= {"native"}  # Kernels, where there is a compiler.
    # Weights are 27 MiB, the KV of 128 tokens 1: some 14 MiB stay on the device, and 4 is what one piece
    # needs on its way from the disk.
    [activations] = re.findall(r"activations ([\d.]+) MiB", resident.stderr)
    device = round(float(activations)) + 16
    streamed = in_shell(
        command.replace(LARGE, f"{everything} --device-memory {device}MiB --host-memory {device + 4}MiB"),
        folder,
    )
    assert streamed.stdout == resident.stdout
    assert len(streamed.stdout.split()) > 10
    assert re.search(
        r"^weights: device [1-9].*, disk [1-9].*; a pass copies [1-9]", streamed.stderr, re.MULTILINE
    ), streamed.stderr
    [pack] = (path for path in cache.iterdir() if path.is_dir() and path.name != "native")
    with Pack.open(pack) as opened:
        opened.verify()
    if TRACE in command:
        events = json.loads((folder / TRACE).read_text())["traceEvents"]
        named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"compute", "host to device"} <= named
        assert any(name.startswith("disk read") for name in named)


def what_make_runs(command: str) -> list[list[str]]:
    """The commands of a make target, without running them."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    words = shlex.split(command)
    result = subprocess.run(
        [words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines() if INSTALLED in line]


def needed_memory(command: str) -> int | None:
    """GB of a GPU that the remark behind a command asks for."""
    remark = re.search(r"# needs a GPU with (\d+) GB$", command)
    return int(remark[1]) if remark else None


def test_a_prefix_is_found_in_the_next_run_as_readme_says(tmp_path: Path) -> None:
    """Its commands, one after another: the first run computes the prompt, the second finds it on disk.

    In float32: the second computes the rest in other chunks, and bfloat16 then decides otherwise between
    words that are equally likely.
    """
    asked = str(beginning(tmp_path, 4_500) / "README.md")
    lines = [
        filled(line).replace(KV, str(tmp_path / "kv")).replace("README.md", asked)
        for line in commands(README)
        if KV in line
    ]
    first, second, listed, verified = [
        in_shell(f"{line} --dtype float32" if " run " in line else line, tmp_path) for line in lines
    ]
    assert "(0 cached)" in first.stderr
    assert (found := re.search(r"\(([\d,]+) cached, \1 from disk\)", second.stderr)), second.stderr
    assert int(found[1].replace(",", "")) > 1000
    assert second.stdout == first.stdout
    assert re.search(r"\bfloat32\b", listed.stdout)
    assert re.search(r"(\d+) of \1 records are as they were written", verified.stdout)


def test_a_model_is_quantised_as_readme_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(beginning(tmp_path, 4_000))
    monkeypatch.setattr(mix, "SEQUENCES", 8)  # Which mix that finds is seen in test_quantising.py.
    pack, *others = [filled(line) for line in commands(README) if FEW in line]
    for line in (pack, *others):
        run_here(shlex.split(line)[1:], capsys, monkeypatch)
    assert {shlex.split(line)[1] for line in others} == {"run", "eval"}
    with Pack.open(tmp_path / FEW) as opened:
        opened.verify()


def test_the_server_answers_as_readme_says(tmp_path: Path) -> None:
    """At a port that is free, and asked by Python for what curl asks."""
    pytest.importorskip("uvicorn")
    serve, ask = [filled(line) for line in commands(README) if SERVED in line or line.startswith("curl")]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
    }
    words = [
        sys.executable,
        "-c",
        ENTRY,
        *shlex.split(serve.replace("--port 8000", "--port 0 --device-memory 1GiB"))[1:],
    ]
    with forks.LoadedPopen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = next(line for line in server.stderr if line.startswith("serving my-model at "))
            address = said.split()[-1]
            [_, url, _, body] = shlex.split(ask)
            sent = Request(
                url.replace("http://127.0.0.1:8000", address),
                body.encode(),
                {"Content-Type": "application/json"},
            )
            with urlopen(sent, timeout=60) as answered:
                answer = json.load(answered)
            assert answer["model"] == "my-model"
            assert answer["choices"][0]["message"]["role"] == "assistant"
            assert answer["usage"]["completion_tokens"] > 0
        finally:
            server.terminate()
        assert server.wait(60) == 0


def test_a_batch_is_answered_as_readme_says(tmp_path: Path) -> None:
    lines = [filled(line) for line in commands(README) if BATCH in line]
    assert len(lines) == 2
    in_shell(f"cd {shlex.quote(str(tmp_path))}; {lines[0]}; {lines[1]} --device-memory 1GiB", tmp_path)
    [answer] = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200


def test_a_model_of_the_hub_is_used_as_readme_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for line in commands(README) if any(one in line for one in HUB)]
    assert [shlex.split(line)[1] for line in lines] == ["show", "run", "pull", "list", "rm"]
    with hubs.serving() as hub:
        hubs.begin(hub, tmp_path, monkeypatch)
        hub.add(HUB[0], hubs.folder(SHIPPED_MODEL))
        for line in lines:
            run_here(shlex.split(line, comments=True)[1:], capsys, monkeypatch)
    assert "model.safetensors" in hub.fetched()
    assert not list((tmp_path / "hub").glob("models--*"))


@pytest.mark.parametrize(
    "command",
    [
        line
        for line in commands(README)
        if not any(one in line for one in (KV, FEW, SERVED, BATCH, *HUB, "curl"))
    ],
)
def test_every_command_runs(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    if memory := needed_memory(command):
        there = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        if there < memory * 10**9:
            pytest.skip(f"needs a GPU with {memory} GB; there are {there / 1e9:.0f}")
    words = shlex.split(filled(command), comments=True)
    if words[0] == "make":
        steps = what_make_runs(command)
        assert steps
        for step in steps:
            told = shlex.join(["penstock", *step[1:]]).replace("'", '"')
            if step[0] == f"{INSTALLED}penstock" and "|" not in step and told not in commands(README):
                run_here(step[1:], capsys, monkeypatch)
    elif words[0] == "source":
        assert words == ["source", f"{INSTALLED}activate"]
        assert re.search(r"^VENV := \.venv$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif OPERATORS & set(words):
        assert run_in_shell(filled(command), tmp_path).strip()
    elif LARGE in command:
        if f"{command} --trace {TRACE}" not in commands(
            README
        ):  # What is traced is the same, and more is looked at.
            run_streamed(command, tmp_path)
    else:
        assert words[0] == "penstock", f"README has a command that nothing here can run: {command}"
        if "README.md" in words:  # More than 64 blocks where no more is to be on the device.
            monkeypatch.chdir(beginning(tmp_path, 10_000 if "--kv-blocks" in words else 4_000))
        run_here(words[1:], capsys, monkeypatch)


def test_demo_and_test_do_what_the_readme_says(tmp_path: Path) -> None:
    demo, tests = what_make_runs("make demo"), what_make_runs("make test ARGS='-k scheduler'")
    story, needle = (step for step in demo if f"{INSTALLED}penstock" in step)
    assert story == [f"{INSTALLED}penstock", "run", "Once upon a time"]
    hide, find = (
        shlex.join(needle).replace("'|'", "|").replace(f"{INSTALLED}penstock", "penstock").split(" | ")
    )
    hide = hide.replace(f"{INSTALLED}python", shlex.quote(sys.executable))
    assert "--tokens 8000 " in f"{hide} "
    hide = hide.replace("--tokens 8000", "--tokens 2000")  # It takes a quarter of the time, and is as hard.
    found = in_shell(f"{hide} | {find} --temperature 0", tmp_path)
    answer = re.search(r"the right answer is: (.+)$", found.stderr, re.MULTILINE)
    assert answer, found.stderr
    assert found.stdout.strip() == answer[1].strip()
    assert [f"{INSTALLED}python", "-m", "pytest"] == tests[-1][1:4]
    assert tests[-1][-2:] == ["-k", "scheduler"]


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    assert {language for language, _ in blocks(README)} == {"sh", "python", "text"}
    assert len(commands(README)) >= 10
    assert commands(ADDING)


@pytest.mark.parametrize("number", range(len(of_language(README, "python"))))
def test_every_python_block_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(filled(of_language(README, "python")[number]), str(README), "exec"), {})
    out = capsys.readouterr().out
    assert len(out.split()) > 10


def test_every_kind_of_structure_is_named() -> None:
    made = {name for name, one in vars(Structure).items() if isinstance(one, staticmethod)}
    assert {"regex", "lark"} < made
    assert set(re.findall(r"`Structure\.(\w+)\(\w*\)`", README.read_text(encoding="utf-8"))) == made


def test_the_sample_of_what_is_printed_has_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers differ by machine; the words around them must be those of today."""
    [sample] = of_language(README, "text")
    for _ in range(2):  # The first may have kernels compiled, and says so.
        capsys.readouterr()
        assert main(["run", "x", "--device", "cpu", "--max-tokens", "1", "--threads", "2"]) == 0
    size = r"[\d,.]+ (B|[KMGT]iB)|[\d,]+|b?float\d+"
    assert re.sub(size, "N", capsys.readouterr().err) == re.sub(size, "N", sample)


# -- docs/adding-a-model.md
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> dict[str, tiny.Case]:
    """The page followed: its function and its line in arch/families.py, its cases for tests/tiny.py, which
    come back."""
    function, line, cases = of_language(ADDING, "python")
    module = dict(vars(families))
    exec(compile(function, str(ADDING), "exec"), module)
    entries: dict[str, Family] = eval(f"{{{line}}}", module)
    for name, family in entries.items():
        assert name not in families.FAMILIES, f"{name} is in the package; the page should add another family"
        monkeypatch.setitem(families.FAMILIES, name, family)
    result: dict[str, tiny.Case] = eval(f"{{{cases}}}", dict(vars(tiny)))
    assert {case.model_type for case in result.values()} == set(entries)
    return result


def test_the_page_adds_a_family_that_was_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type"):
        read_spec({"model_type": "seed_oss"})


def test_the_added_family_computes_what_transformers_does(
    added: dict[str, tiny.Case], tmp_path: Path
) -> None:
    prompts = tiny.prompts()
    for name, case in added.items():
        path = tiny.write(case, tmp_path / name)
        model = tiny.load(path)
        references = [tiny.decode(model, prompt) for prompt in prompts]
        longest = references[-1]
        with torch.inference_mode():
            changed = (
                tiny.load(path, **case.without)(torch.tensor([longest.prompt]))
                .logits[0]
                .double()
                .log_softmax(-1)
            )
        assert tiny.distance(changed, longest.logprobs[: len(longest.prompt)]) > 0.01
        for params, settings in (
            (WITH_PROMPT, {}),
            (GREEDY, {"block_size": 4, "max_step_tokens": 7, "max_sequences": 5, "kv_blocks": 30}),
        ):
            with LLM(path, device="cpu", dtype="float32", max_length=128, check=True, **settings) as llm:
                found = measure(llm.generate(prompts, params), references)
            assert found.exact, found
            assert found.clear_tokens >= len(prompts) * tiny.OUTPUT // 2


def test_what_the_added_family_leaves_out_means_what_transformers_means(added: dict[str, tiny.Case]) -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 512,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
    }
    theirs = transformers.AutoConfig.for_model("seed_oss", **sizes)
    written = json.loads(theirs.to_json_string(use_diff=False))
    ours = read_spec({"model_type": "seed_oss", **sizes})
    assert ours == read_spec(written)
    expected = {
        "kv_heads": theirs.num_key_value_heads,
        "head_dim": theirs.head_dim,
        "max_length": theirs.max_position_embeddings,
        "norm_eps": theirs.rms_norm_eps,
        "qkv_bias": theirs.attention_bias,
        "out_bias": theirs.attention_out_bias,
        "mlp_bias": theirs.mlp_bias,
        "tied_embeddings": theirs.tie_word_embeddings,
    }
    [layer] = set(ours.stack)
    found = dataclasses.asdict(ours) | dataclasses.asdict(layer.mixer) | {"mlp_bias": layer.feed_forward.bias}
    assert {name: value for name, value in found.items() if name in expected} == expected


def test_the_page_names_a_command_that_make_knows() -> None:
    for command in commands(ADDING):
        assert what_make_runs(command)[-1][-2:] == ["-k", "seed_oss"]
