"""The benchmark that runs what is claimed of the speed: what it reads, what it leaves out, when it fails."""

import importlib
import json
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import forks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "claims.py"
WORK = "decode --context 16 --output 2 --repeat 1 --device cpu"
CLAIMS = f"""
[[claim]]
name = "quick"
run = "{WORK}"
read = "ms"
most = 60000
seconds = 10
[[claim]]
name = "share"
run = "{WORK}"
read = "roof"
aim = 1000
seconds = 10
[[claim]]
name = "elsewhere"
run = "{WORK}"
read = "roof"
aim = 1000
seconds = 10
cards = ["H200"]
[[claim]]
name = "ratio"
run = "{WORK}"
read = "speedup"
beside = "quick"
aim = 1.0
seconds = 10
[[claim]]
name = "refused"
run = "decode --batch 0"
read = "ms"
seconds = 10
[[claim]]
name = "large"
run = "decode"
read = "ms"
memory = 1000000
seconds = 10
[[claim]]
name = "long"
run = "decode --batch 2"
read = "ms"
seconds = 100000
"""


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("claims")


def test_claims_are_read_from_one_run_and_judged(
    claims: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "claims.toml", tmp_path / "out.json"
    file.write_text(CLAIMS)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--claims", str(file), "--out", str(out)])
    monkeypatch.setenv("PENSTOCK_COMMIT", "0" * 40)
    monkeypatch.setattr(subprocess, "Popen", forks.LoadedPopen)
    assert claims.main() == 1
    printed = capsys.readouterr().out.splitlines()
    rows, found = {line.split()[0]: line for line in printed}, json.loads(out.read_text())
    times = found["quick"]["result"]["ms"]["median"]
    assert found["quick"]["value"] == times
    assert found["share"]["result"] == found["quick"]["result"]  # the same run
    assert found["share"]["value"] == found["quick"]["result"]["of_bound"]
    assert found["ratio"]["value"] == 1.0
    assert "missed" not in rows["quick"] + rows["ratio"]
    assert rows["share"].endswith("missed")
    assert "(≥ 1000)" in rows["elsewhere"]
    assert "missed" not in rows["elsewhere"]
    assert "'--batch'" in rows["refused"]
    assert found["refused"]["value"] is None
    assert "GPU memory" in rows["large"]
    assert "no time" in rows["long"]
    assert printed[-1].endswith("7 claims, 1 missed, 3 without a number")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('read = "roof"', 'read = "speed"'), "reads 'speed'"),
        (('beside = "quick"', 'beside = "refused"'), "no claim before it"),
        (('beside = "quick"', ""), "no claim before it"),
        (('name = "share"', 'name = "quick"'), "two claims of one name"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(
    claims: ModuleType, tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    file = tmp_path / "claims.toml"
    file.write_text(CLAIMS.replace(*change))
    with pytest.raises(SystemExit, match=said):
        claims.read_claims(file, "")


def test_what_is_claimed_can_be_asked_for() -> None:
    """Every run of the file is one that `penstock bench` understands."""
    from click import Context

    from penstock.cli.commands.bench import command

    claims = tomllib.loads(SCRIPT.with_suffix(".toml").read_text())["claim"]
    assert len(claims) > 20
    for claim in claims:
        part, *words = claim["run"].split()
        sub = command.get_command(Context(command), part)
        assert sub is not None, claim["name"]
        asked = sub.make_context(part, [str(ROOT / word) if "/" in word else word for word in words])
        assert asked.params
