"""Models of the Hub run: by the command line, which fetches them from a server of the Hub's protocol, and
from Python; and their KV is found again by what they are, not by where they lie."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forks
import hubs
from hubs import Hub
from penstock import LLM, SamplingParams
from penstock.base.config import SHIPPED_MODEL, Config
from penstock.base.errors import DeviceError
from penstock.bench.doctor import checkup
from penstock.cli import models
from penstock.cli.main import main
from penstock.hub import cache
from penstock.kv.store.blocks import BlockStore
from penstock.weights.checkpoint import identity
from penstock.weights.checkpoint.shape import Shape

SOURCE = Path(__file__).resolve().parents[2] / "src"
NAME = "fable/tiny"
QUICK = """
import sys
from penstock.cli.main import main
from penstock.memory import probe
probe._HOST_BYTES, probe._cache_bytes = 16 << 20, lambda: 0
sys.exit(main())
"""
"""Runs the command; memory is measured as ever, but not for long."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [3 + (7 * at) % 89 for at in range(100)]


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hubs.serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server as new, with the model that comes with penstock, and an empty cache."""
    hubs.begin(server, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    server.add(NAME, SHIPPED)
    return server


SHIPPED = hubs.folder(SHIPPED_MODEL) | {"README.md": b"x", "model.py": b"boom"}


def command(hub: Hub, home: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start penstock as a user does who sets HF_ENDPOINT, with a pipe where a terminal would be."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    environment |= {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_CACHE", None)
    return forks.LoadedPopen(
        [sys.executable, "-c", QUICK, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_named_model_is_fetched_interrupted_and_run(hub: Hub, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a download leaves what came, from which the next run goes on."""
    hub.hold = threading.Event()
    run = "run", NAME, "Once upon a time", "--max-tokens", "4", "--temperature", "0"
    first = command(hub, tmp_path, *run)
    while not sum(partials(tmp_path)):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    time.sleep(0.1)
    hub.hold.set()
    _, said = first.communicate(timeout=100)
    assert first.returncode == 130
    assert "the same command goes on where this download stopped\n" in said
    [have] = partials(tmp_path)
    hub.asked.clear()
    second = command(hub, tmp_path, *run)
    out, said = second.communicate(timeout=100)
    assert (second.returncode, out.endswith("\n")) == (0, True), said
    assert re.match(
        rf"{NAME}: [\d.]+ MiB to fetch, [\d.]+ [GT]iB free; llama, 6\.95M parameters in bfloat16, about", said
    )
    assert [one.range.partition("-")[0] for one in hub.asked if one.path.startswith("/cdn/")] == [
        f"bytes={have}"
    ]
    assert hub.fetched() == {"model.safetensors"}


def partials(home: Path) -> list[int]:
    weights = hubs.sha256(SHIPPED["model.safetensors"])
    return [file.stat().st_size for file in home.rglob(f"{weights}.incomplete")]


def test_the_four_commands(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories[NAME].card = {"license": "mit"}
    assert main(["show", NAME]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  licence +mit$", shown, re.MULTILINE)
    assert re.search(r"^  here +not here$", shown, re.MULTILINE)
    assert main(["pull", NAME]) == 0
    pulled = capsys.readouterr()
    snapshot = Path(pulled.out.strip())
    assert (snapshot / "model.safetensors").read_bytes() == SHIPPED["model.safetensors"]
    assert "fetched in" in pulled.err
    assert main(["pull", NAME]) == 0
    assert capsys.readouterr().err == f"{NAME} is whole, and what main is now\n"
    hub.add(NAME, SHIPPED | {"generation_config.json": b"{}"})
    assert main(["pull", NAME]) == 0
    before = snapshot.name[:7]
    assert (
        f"{NAME} was {before} before, which is kept; penstock rm {NAME}@{before} removes it"
        in capsys.readouterr().err
    )
    assert main(["list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "NAME"
    assert [row.split()[0] for row in rows] == [NAME, NAME]
    assert all(row.endswith("whole") for row in rows)
    assert main(["rm", f"{NAME}@{before}"]) == 2
    assert "cannot ask whether to remove" in capsys.readouterr().err
    assert main(["rm", "--yes", f"{NAME}@{before}"]) == 0
    freed = len(SHIPPED["generation_config.json"])
    assert capsys.readouterr().out == f"{NAME}@{before}: removed, {freed} B freed\n"
    assert main(["rm", "--yes", NAME]) == 0
    assert main(["list"]) == 0
    assert capsys.readouterr().out.endswith("no models are there; penstock pull fetches one\n")
    assert main(["rm", "--yes", NAME]) == 2
    assert main(["pull", "not-a-name"]) == 2
    assert main(["pull", "no/where"]) == 2


def test_plan_and_doctor_fetch_the_config_alone(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seen(config: Config, **_: object) -> None:  # Measuring takes ten seconds.
        assert Shape.open(config.model).spec.layers == 8
        raise DeviceError("seen")

    assert main(["plan", NAME, "--machine", "laptop"]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME}: llama, 8 layers, 6.95M parameters")
    assert hub.fetched() == {"config.json"}
    monkeypatch.setattr(checkup, "checkup", seen)
    hub.asked.clear()
    for name in (NAME, f"{NAME}@main"):
        assert main(["doctor", name]) == 2
        assert capsys.readouterr().err == "penstock: error: seen\n"
    assert hub.asked == [], "the config is here"


class Asked:
    """A terminal at which somebody answers a question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
        ours, theirs = pty.openpty()
        self.ours = os.fdopen(ours, "r+b", buffering=0)
        self.theirs = os.fdopen(theirs, "r")
        monkeypatch.setattr(sys, "stdin", self.theirs)
        monkeypatch.setattr(models, "is_terminal", lambda stream: True)
        monkeypatch.setenv("TERM", "dumb")
        self.ours.write(answer.encode())


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("\n", 0)])
def test_on_a_terminal_it_is_asked(
    answer: str, code: int, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Asked(monkeypatch, answer)
    assert main(["pack", NAME]) == code
    said = capsys.readouterr()
    assert "Fetch it from the Hugging Face Hub? [Y/n]" in said.err
    assert ("was not fetched; name another model" in said.err) == bool(code)
    assert Path("tiny.pack").exists() != bool(code), "a pack goes here, not into the cache"
    terminal.ours.close()
    terminal.theirs.close()


def test_download_flags(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", NAME, "--no-download"]) == 2
    assert f"{NAME} is neither here nor whole in the cache" in capsys.readouterr().err
    assert hub.asked == []
    assert main(["chat", NAME, "--block-size", "0"]) == 2, "what is wrong is told first"
    assert hub.asked == []
    terminal = Asked(monkeypatch, "n\n")
    assert main(["pack", NAME, "--download"]) == 0
    terminal.ours.close()
    terminal.theirs.close()
    Path(NAME).parent.mkdir()
    shutil.copytree(next(cache.CachedRepository.all()).path / "snapshots", "copies")
    Path(NAME).symlink_to(next(Path("copies").iterdir()).absolute())
    assert main(["pack", NAME]) == 0
    assert (
        f"{NAME} is the one in this directory; hf.co/{NAME} is the one of the Hub" in capsys.readouterr().err
    )


def test_kv_is_found_again_by_what_the_model_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "RECENT_NS", -(10**18))  # Files count as changed long ago.
    monkeypatch.setattr(BlockStore, "noted", lambda _: b"")

    def cached(model: str | Path) -> int:
        kept = {"kv_directory": tmp_path / "kv", "cache": tmp_path / "cache", "block_size": 16}
        memory = {
            "host_kv_memory": "8MiB",
            "disk_kv_memory": "32MiB",
            "max_length": 256,
        }
        with LLM(model, device="cpu", **kept, **memory) as llm:  # type: ignore[arg-type]
            return llm.generate([PROMPT], GREEDY)[0].cached_disk

    assert cached(NAME) == 0
    assert cached(NAME) == 96, "by its name again"
    assert cached(SHIPPED_MODEL) == 96, "a copy of it elsewhere has the same KV"
    assert len(list((tmp_path / "kv").iterdir())) == 1
    weights = bytearray(SHIPPED["model.safetensors"])
    weights[-1] ^= 1
    hub.add(NAME, SHIPPED | {"model.safetensors": bytes(weights)})
    assert cached(NAME) == 96, "until it is pulled"
    assert main(["pull", NAME]) == 0
    assert cached(NAME) == 0, "another revision, another identity"
    assert cached(NAME) == 96
    commits = cache.CachedRepository.of(NAME).commits()
    assert len(commits) == 2
    assert len(list((tmp_path / "kv").iterdir())) == 2
    hub.asked.clear()
    assert cached(f"{NAME}@{commits[0]}") == cached(f"{NAME}@{commits[1][:10]}") == 96
    assert hub.asked == []
