"""`penstock plan`: the table, the JSON and the picture say the same, flags mean what they say, and the page
in docs is of today."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from penstock.arch.formats.recipe import config_in
from penstock.base.config import SHIPPED_MODEL
from penstock.base.cores import cpu_name
from penstock.base.errors import ConfigError
from penstock.base.units import format_rate, format_size
from penstock.cli.commands import plan
from penstock.cli.commands.plan import MACHINES
from penstock.cli.figures import (
    format_count,
    format_pace,
    format_seconds,
    parse_cpu_rates,
    parse_disk,
    parse_operations,
    parse_rate,
)
from penstock.cli.known_costs import SHIPPED
from penstock.cli.main import main
from penstock.cli.plan_report import ASSUMED
from penstock.engine.costs import costs_file, keep_costs, read_costs
from quantised import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "benchmarks" / "shapes"
SMALL = ["--device-memory", "9GiB", "--host-memory", "5GiB"]
"""A machine on which 8B has weights on every tier."""
FAR = ["--machine", "desktop-24", "--context", "131072", "--device-memory", "20GiB"]
"""One on which KV of such a context rests in host memory."""


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    [line] = text_of(capsys, *arguments, "--json").splitlines()
    return json.loads(line)


# ---- the table and the line


@pytest.mark.parametrize(
    "arguments",
    [
        ["8B", *SMALL],
        ["8B", "--machine", "h200", "--batch", "4"],
        ["8B", "--machine", "cpu", "--device-memory", "9GiB"],
        [str(FILES / "Qwen3-30B-A3B"), "--device-memory", "16GiB", "--host-memory", "32GiB"],
        [
            "0.6B",
            "--device-memory",
            "1900MiB",
            "--host-memory",
            "6GiB",
            "--disk-rate",
            "none",
            "--step-tokens",
            "256",
        ],
        ["8B", *FAR],
        ["8B", *FAR, "--tensor-parallel", "2", "--host-memory", "40GiB", "--device-memory", "11GiB"],
    ],
    ids=["three tiers", "resident", "cpu", "experts", "no disk", "far", "ranks"],
)
def test_the_line_has_every_number_of_the_table(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    table, found = text_of(capsys, *arguments), json_of(capsys, *arguments)
    figures = found["setting"]["figures"]
    expected = [
        found["model"],
        str(found["layers"]),
        format_count(found["parameters"]),
        format_size(found["weights"]),
    ]
    expected += [f"{found[name]:,}" for name in ("batch", "context", "step_tokens")] + re.findall(
        r"\S+", found["setting"]["machine"] or ""
    )
    if costs := found["setting"]["costs"]:
        expected += re.findall(r"\S+", f"{costs['device']}, {costs['measured']}.")
    expected += [
        word for figure in figures.values() for word in (figure["source"], format_size(figure["value"]))
    ]
    expected += [format_rate(figure["value"]) for figure in figures.values()] + [
        f"{figures['compute']['value'] / 1e12:.3g}"
    ]
    for tier in found["tiers"]:
        sizes = ("capacity", "weights", "ring", "kv", "activations", "process", "free")
        expected += [format_size(tier[name]) for name in sizes if tier[name] is not None] + [
            str(count) for count in tier["groups"].values()
        ]
    expected += [str(count) for count in found["kinds"].values()]
    if found["ranks"] > 1:
        expected += [str(found["ranks"])]
    if far := found["far"]:
        expected += [format_size(far["host_bytes"]), format_size(far["device_bytes"])]
        expected += [f"{far['host_blocks'] * 32:,}", f"{far['tile_tokens']:,}", f"{far['chunk_tokens']:,}"]
    for kind in ("decode", "prefill"):
        pace = found[kind]
        expected += [format_pace(pace["tokens_per_second"]), format_seconds(pace["seconds"]), pace["binding"]]
        expected += [
            format_size(pace["copied"]),
            format_size(pace["read"]),
            *(f"{share:.0%}" for share in pace["busy"].values()),
        ]
        if experts := pace["experts"]:
            expected += [f"{experts['asked']:,.0f}", f"{experts['come']:,.0f}", f"{experts['hits']:.1%}"]
        expected += [format_pace(gain[kind]) for gain in found["gains"]]
        expected += [f"{gain[kind] / pace['tokens_per_second']:.1%}" for gain in found["gains"]]
    numbers = set(re.findall(r"\d[\d,.]*\d|\d", " ".join(expected)))
    remarks = {"1", "10"}  # of GB more, and per cent faster
    assert [
        number
        for number in re.findall(r"(?<![\w-])\d[\d,.]*\d|(?<![\w-])\d", table)
        if number not in numbers | remarks
    ] == []
    assert all(word in expected for word in re.findall(r"bound by the (\w+)", table))


def test_adapters_take_room(capsys: pytest.CaptureFixture[str]) -> None:
    """For all linear layers of an 8B Llama, in bfloat16."""
    hidden, kv, inner, layers = 4096, 1024, 14336, 32
    of_rank = 2 * layers * (4 * hidden + 2 * (hidden + kv) + 3 * (hidden + inner))

    def activations(*flags: str) -> int:
        tiers = json_of(capsys, "8B", "--machine", "h100", *flags)["tiers"]
        return int(tiers[0]["activations"])

    none = activations()
    assert activations("--max-loras", "0") == none
    assert activations("--max-loras", "8") - none == 8 * 16 * of_rank
    assert activations("--max-loras", "3", "--max-lora-rank", "64") - none == 3 * 64 * of_rank


def test_far_kv_is_printed_with_what_was_decided_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--host-kv-dtype", "fp8", "--attention-policy", "topk:64", "--tensor-parallel", "2"]
    arguments = ["8B", *FAR, *asked, "--host-memory", "60GiB", "--device-memory", "11GiB"]
    table, far = text_of(capsys, *arguments), json_of(capsys, *arguments)["far"]
    assert (far["dtype"], far["policies"]) == ("float8_e4m3fn", ["topk:64", "full"])
    assert far["host_blocks"] * 32 == 131_072
    assert re.search(r"^KV beyond the device\n  .* hold KV in fp8 for 131,072 tokens$", table, re.MULTILINE)
    assert f"tiles of {far['tile_tokens']:,} tokens and chunks of 8,192" in table
    assert "attention policies read less" in table
    assert "of weights in bfloat16 on each of 2 ranks" in table
    assert "What ranks exchange takes time, too, which is left out." in table
    assert json_of(capsys, "8B", *SMALL)["far"] is None


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    table = text_of(capsys, "8B", *SMALL)
    blocks = [block.splitlines() for block in table.strip().split("\n\n")]
    assert [block[0].split()[0] for block in blocks] == ["8B:", "Machine", "Tiers", "Homes", "Pace", "What"]
    assert (
        [line.split()[0] for line in blocks[2][1:]]
        == [line.split()[0] for line in blocks[3][1:]]
        == ["device", "host", "disk"]
    )
    assert re.search(r"^  decode .* the disk$", table, re.MULTILINE)
    assert re.search(r"^  a disk 10 % faster +\+0\.\d+ \(\+10\.0%\)", table, re.MULTILINE)
    assert re.search(r"^  device memory +9\.00 GiB  given$", table, re.MULTILINE)
    assert re.search(r"^  compute .*  assumed$", table, re.MULTILINE)
    assert "`penstock doctor` measures" in table
    resident = text_of(capsys, "8B", "--machine", "h200")
    assert "all weights stay on the device, nothing streams" in resident
    assert "assumed" not in resident


# ---- what is asked for


def test_a_flag_replaces_the_figure_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "--device-memory": ("6GiB", 6 * 2**30),
        "--host-memory": ("20GiB", 20 * 2**30),
        "--link-rate": ("8GB/s", 8e9),
        "--disk-rate": ("1.5GB/s", 1.5e9),
        "--device-read": ("200GB/s", 2e11),
        "--compute": ("12TFLOPS", 12e12),
    }
    before = json_of(capsys, "8B", "--machine", "laptop")
    for flag, (text, value) in flags.items():
        figures = json_of(capsys, "8B", "--machine", "laptop", flag, text)["setting"]["figures"]
        name = flag.removeprefix("--").replace("-", "_")
        assert figures.pop(name) == {"value": value, "source": "given"}
        assert figures == {key: figure for key, figure in before["setting"]["figures"].items() if key != name}


def test_work_and_dtype_count(capsys: pytest.CaptureFixture[str]) -> None:
    one = json_of(capsys, "8B", "--machine", "h200")
    many = json_of(
        capsys,
        "8B",
        "--machine",
        "h200",
        "--batch",
        "8",
        "--context",
        "8192",
        "--step-tokens",
        "1024",
        "--dtype",
        "float32",
    )
    device = [found["tiers"][0] for found in (one, many)]
    assert device[1]["kv"] == 8 * 2 * 2 * device[0]["kv"]
    assert many["weights"] == pytest.approx(2 * one["weights"], rel=1e-4)
    assert many["prefill"]["tokens"] == 1024
    assert many["decode"]["tokens"] == 8
    assert many["decode"]["seconds"] > 2 * one["decode"]["seconds"]


@pytest.mark.parametrize("name", list(MACHINES))
def test_machines_have_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, "0.6B", "--machine", name)
    assert found["setting"]["machine"].startswith(f"{name}: ")
    assert {figure["source"] for figure in found["setting"]["figures"].values()} == {name}
    assert found["decode"]["tokens_per_second"] > 10


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's program on the path, which says what a machine with a 24 GB card would."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'A GPU, 24GB, 24564'\necho 'Another, 8192'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(script.parent), os.environ["PATH"]]))
    return script


def test_what_the_doctor_measured_of_this_machines_gpu_is_found(
    nvidia_smi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = read_costs(Path(plan.__file__).parents[1] / "machines" / "h200.json")
    keep_costs(replace(measured, device="A GPU, 24GB"), costs_file(tmp_path, "A GPU, 24GB", "bfloat16"))
    known, unknown = (
        json_of(capsys, "0.6B", "--cache", str(folder)) for folder in (tmp_path, tmp_path / "empty")
    )
    assert known["setting"]["costs"]["device"] == "A GPU, 24GB"
    assert known["setting"]["figures"]["device_read"] == {"value": measured.device_read, "source": "measured"}
    assert unknown["setting"]["costs"] is None
    assert unknown["setting"]["figures"]["device_read"]["source"] == ASSUMED
    text = text_of(capsys, "0.6B", "--cache", str(tmp_path))
    assert "Steps cost what they did on A GPU, 24GB" in text
    assert "the pace is a bound" in text_of(capsys, "0.6B", "--cache", str(tmp_path / "empty"))
    assert json_of(capsys, "0.6B", "--dtype", "float32", "--cache", str(tmp_path))["setting"]["costs"] is None


def test_by_default_sizes_are_those_of_this_machine(
    nvidia_smi: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json_of(capsys, "0.6B")
    figures = found["setting"]["figures"]
    assert figures["device_memory"] == {"value": 24564 * 2**20 * 9 // 10, "source": "this machine"}
    assert figures["host_memory"]["source"] == "this machine"
    assert 2**26 < figures["host_memory"]["value"] < 2**46
    assert figures["link_rate"] == {"value": MACHINES["desktop-24"].link_rate, "source": "assumed"}
    nvidia_smi.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    without = json_of(capsys, "0.6B", "--cache", str(nvidia_smi.parent / "none"))["setting"]["figures"]
    assert without["host_memory"] == {"value": 0, "source": "assumed"}
    assert without["device_memory"]["source"] == "this machine"
    assert without["compute"]["source"] == without["device_read"]["source"] == "assumed"


def test_what_the_doctor_measured_of_this_machines_cpu_is_found(
    nvidia_smi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By dtype, and whether weights have few bits; else it is that of another CPU, and said to be."""
    nvidia_smi.write_text("#!/bin/sh\nexit 6\n")
    for kind, read in (("bfloat16", 3e9), ("bfloat16-int4", 5e9)):
        known = read_costs(SHIPPED / f"cpu-{kind}.json")
        file = costs_file(tmp_path, cpu_name(), kind)
        keep_costs(replace(known, device="This CPU", device_read=read, disk_rate=7e8), file)
    asked = ["100M", "--dtype", "bfloat16", "--cache"]
    for more, read in (([], 3e9), (["--format", "int4"], 5e9), (["--format", "int8"], 5e9)):
        found = json_of(capsys, *asked, str(tmp_path), *more)["setting"]
        assert found["costs"]["device"] == "This CPU"
        assert found["figures"]["device_read"] == {"value": read, "source": "measured"}
        assert found["figures"]["disk_rate"] == {"value": 7e8, "source": "measured"}
        assert not found["elsewhere"]
    assert "Steps cost what they did on This CPU" in text_of(capsys, *asked, str(tmp_path))
    text = text_of(capsys, *asked, str(tmp_path / "empty"))
    assert "Nobody measured steps here: they are taken to cost what they did on AMD EPYC" in text
    none = json_of(capsys, *asked, str(tmp_path / "empty"))
    assert none["setting"]["figures"]["device_read"]["source"] == ASSUMED


def test_a_model_is_a_file_a_directory_or_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    folder = FILES / "Mistral-7B"
    by_folder, by_file = (
        json_of(capsys, str(path), "--machine", "laptop") for path in (folder, folder / "config.json")
    )
    assert by_folder == by_file
    assert by_folder["model"] == "Mistral-7B"
    assert json_of(capsys, "8B", "--machine", "laptop")["parameters"] == 8_030_261_248


@pytest.mark.parametrize("format", ["int4", "int4:128", "int8", "fp8", "mxfp4", "nvfp4", "bf16"])
def test_a_shape_has_the_format_that_is_asked_for(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of a weight: codes and scales, but for embedding and head."""
    dense, few = (json_of(capsys, "8B", "--machine", "h200", *more) for more in ([], ["--format", format]))
    head = 2 * 128256 * 4096
    bits = (few["weights"] - 2 * head) / (dense["weights"] - 2 * head) * 16
    each = {
        "int4": 4.375,
        "int4:128": 4.1875,
        "int8": 8.25,
        "fp8": 8.002,
        "mxfp4": 4.25,
        "nvfp4": 4.5,
        "bf16": 16,
    }
    assert bits == pytest.approx(each[format], rel=2e-3)
    named = "" if format == "bf16" else format.partition(":")[0]
    assert (few["format"], few["dtype"], dense["format"]) == (named, "bfloat16", "")
    said = f"weights in {named} for bfloat16" if named else "weights in bfloat16"
    assert said in text_of(capsys, "8B", "--machine", "h200", "--format", format)


@pytest.mark.parametrize(
    "scheme",
    ["gptq_order", "auto_round", "awq", "packed_8", "fp8_128", "mxfp8", "mxfp4", "nvfp4", "modelopt_nvfp4"],
)
def test_a_config_of_any_quantiser_is_planned(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((FILES / "Mistral-7B" / "config.json").read_text())
    settings = SCHEMES[scheme].config
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    few, dense = (
        json_of(capsys, str(path), "--machine", "laptop") for path in (tmp_path, FILES / "Mistral-7B")
    )
    assert few["format"] in (settings["quant_method"], "auto-round", "gptq")
    assert 0.25 < few["weights"] / dense["weights"] < 0.65


def test_a_config_with_a_format_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the quantiser's settings are in a file beside it."""
    config = json.loads((FILES / "Mistral-7B" / "config.json").read_text())
    settings = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    inside = config | {"quantization_config": {"quant_method": "gptq", **settings}}
    (tmp_path / "config.json").write_text(json.dumps(inside))
    first = json_of(capsys, str(tmp_path), "--machine", "laptop")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert json_of(capsys, str(tmp_path), "--machine", "laptop") == first
    assert first["format"] == "gptq"
    assert (
        first["weights"] < 0.32 * json_of(capsys, str(FILES / "Mistral-7B"), "--machine", "laptop")["weights"]
    )
    assert main(["plan", str(tmp_path), "--machine", "laptop", "--format", "int4"]) == 2
    assert "has a format of few bits already; leave --format out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "nowhere does not exist; give a config.json, a directory with one, or one of the shapes 100M",
        ),
        ([str(ROOT / "docs")], "docs/config.json does not exist"),
        ([str(ROOT / "LICENSE")], "is not JSON"),
        (["8B", "--device-memory", "much"], "cannot read 'much' as a size"),
        (["8B", "--device-memory", "80%"], "is a percentage, which cannot be used here"),
        (["8B", "--link-rate", "quick"], "cannot read 'quick' as a rate; write it like 3GB/s"),
        (["8B", "--link-rate", "0"], "cannot read '0' as a rate"),
        (["8B", "--disk-rate", "3"], "rate '3' is less than 1 MB/s"),
        (["8B", "--compute", "lots"], "cannot read 'lots' as operations a second; write it like 700TFLOPS"),
        (["8B", "--machine", "toaster"], "'toaster' is not one of 'laptop'"),
        (["8B", "--machine", "cpu", "--host-memory", "8GiB"], "--host-memory is for machines with a GPU"),
        (["8B", "--batch", "0"], "--batch"),
        (["8B", "--format", "int3"], "'int3' is none of bf16, int4"),
        (["8B", "--format", "int4:0"], "nor one with a group of 8 to 4096"),
        (["8B", "--format", "int4:4097"], "nor one with a group of 8 to 4096"),
        (["8B", "--format", f"int4:{'9' * 5000}"], "nor one with a group of 8 to 4096"),
        (["8B", "--format", "fp8:64"], "fp8 has blocks of a fixed size"),
        (["8B", "--machine", "laptop", "--batch", "64"], "a batch of 7 or a context of 448 would fit"),
        (["8B", "--machine", "laptop", "--context", "999999"], "131,072 positions"),
        (["8B", "--cpu-rate", "60GB/s"], "--cpu-compute is off; add --cpu-compute auto"),
        (["8B", "--cpu-compute", "on", "--cpu-rate", "60GB/s,50GB/s"], "one each for 1, 2, 4, 8 and 16 rows"),
        (
            ["8B", "--machine", "desktop-24", "--device-memory", "2GiB"],
            "which leaves no room for one group of weights, 1002 MiB, in 2.00 GiB of the device, of which "
            "its driver and kernels take 1.17 GiB; raise --device-memory to ",
        ),
        (["8B", "--machine", "laptop", "--picture", "/nowhere/plan.png"], "its directory does not exist"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert message in streams.err
    assert len(streams.err.splitlines()) == 1


@pytest.mark.parametrize("machine", ["laptop", "cpu"])
def test_a_device_that_is_too_small_is_told_what_it_needs(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", str(SHIPPED_MODEL), "--machine", machine, "--device-memory"]
    assert main([*asked, "1MiB"]) == 2
    said = capsys.readouterr().err
    assert "in 1.00 MiB of the device" in said
    [needed] = re.findall(r"raise --device-memory to ([\d,]+) MiB$", said.rstrip())
    least = int(needed.replace(",", ""))
    assert main([*asked, f"{least}MiB"]) == 0
    assert main([*asked, f"{least - 1}MiB"]) == 2


def test_weights_that_are_not_quantised_have_the_dtype_that_is_named() -> None:
    assert config_in("bf16", {"dtype": "float32"}, "a model")["dtype"] == "bfloat16"
    assert config_in(None, {"dtype": "float32"}, "a model") == {"dtype": "float32"}


def test_what_the_cpu_gains_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By a rate that is given, or those that are kept with what steps cost; else it is said how to know."""
    asked = ["8B", "--machine", "laptop", "--cpu-compute", "auto"]
    assert "left out: give --cpu-rate" in text_of(capsys, *asked)
    file = costs_file(tmp_path, "Some GPU", "bfloat16")
    keep_costs(replace(read_costs(SHIPPED / "h100.json"), cpu_read=parse_cpu_rates("70GB/s")), file)
    for more, source in (
        (["--cpu-rate", "70GB/s,60GB/s,50GB/s,40GB/s,28GB/s"], "given"),
        (["--costs", str(file)], "measured with int4"),
    ):
        table = text_of(capsys, *asked, *more)
        assert re.search(rf"cpu rate +70.0 GB/s, of 16 rows 28.0 GB/s +{source}", table)
        assert re.search(
            r"the CPU computes \d+ feed-forwards, [\d.]+ GiB, in .* without it a step takes", table
        )
        body = json.loads(text_of(capsys, *asked, *more, "--json"))
        assert body["decode"]["cpu"]["alone"] > 1.2 * body["decode"]["seconds"]
        assert "experts" not in body["cpu"]
    assert "no feed-forwards in such steps" in text_of(capsys, *asked, "--cpu-rate", "1GB/s")


def test_gguf_files_of_a_directory_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ba":
        (tmp_path / f"{name}.gguf").touch()
    assert main(["plan", str(tmp_path)]) == 2
    assert f"or a GGUF file by name: {tmp_path / 'a.gguf'}\n" in capsys.readouterr().err


def test_rates_as_people_write_them() -> None:
    assert [parse_rate(text) for text in ("3GB/s", " 3 gb/S ", "3GB", "3000000000")] == [3e9] * 4
    assert parse_rate("1GiB/s") == 2**30
    assert [parse_disk(text) for text in ("none", "None ", "0", "2GB/s")] == [0, 0, 0, 2e9]
    assert [parse_operations(text) for text in ("700TFLOPS", "700 tflop/s", "0.7P", "7e14")] == [
        pytest.approx(7e14)
    ] * 4
    for text in ("0TFLOPS", "-1TFLOPS", "TFLOPS", "5XFLOPS", "1e99", "1", ""):
        with pytest.raises(ConfigError, match="write it like 700TFLOPS"):
            parse_operations(text)


def test_nothing_heavy_is_imported() -> None:
    heavy = ["torch", "numpy", "rich", "PIL", "tokenizers", "safetensors", "transformers"]
    code = (
        "import sys; from penstock.cli.main import main; main(sys.argv[1:]); print([name for name in "
        f"{heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "plan", "8B", *SMALL, "--json"]
    result = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"


# ---- the picture


def row(image: Image.Image, y: int) -> list[tuple[int, ...]]:
    return [image.getpixel((x, y)) for x in range(image.width)]


def near(color: tuple[int, ...], hex: str) -> bool:
    wanted = [int(hex[at : at + 2], 16) for at in (1, 3, 5)]
    return all(abs(a - b) < 12 for a, b in zip(color, wanted, strict=True))


def test_the_picture_is_to_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.png"
    found = json_of(capsys, "8B", *SMALL, "--picture", str(file))
    with Image.open(file) as image:
        image.load()
        assert (image.format, image.size, image.mode) == ("PNG", (1200, 800), "RGB")
        device, host, disk = found["tiers"]
        scale = (1200 - 48 - 148) / device["capacity"]
        for y, tier, color in ((186, device, "#12756b"), (316, host, "#e0982f"), (446, disk, "#76839a")):
            pixels = sum(near(pixel, color) for pixel in row(image, y))
            assert pixels == pytest.approx(tier["weights"] * scale, abs=4)
        # The strip has a cell for each group, coloured by its home.
        strip, width = row(image, 557), (1200 - 96) / len(found["order"])
        for index, cell in enumerate(found["order"]):
            color = {"device": "#12756b", "host": "#e0982f", "disk": "#76839a"}[cell["home"]]
            assert near(strip[round(48 + (index + 0.5) * width)], color)


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ("Llama-3.1-405B", []),
        ("Qwen3-235B-A22B", ["--disk-rate", "none", "--host-memory", "900GiB"]),
        ("Qwen3-0.6B", ["--disk-rate", "none", "--host-memory", "900GiB"]),
    ],
    ids=str,
)
def test_pictures_of_all_sorts(
    shape: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"a model\twith a long name, {shape * 5}"
    folder.mkdir()
    (folder / "config.json").write_bytes((FILES / shape / "config.json").read_bytes())
    file = tmp_path / "plan.png"
    text_of(capsys, str(folder), "--machine", "h200", *more, "--picture", str(file))
    with Image.open(file) as image:
        assert image.size == (1200, 800)
        margins = image.convert("L").crop((1160, 0, 1200, 800)).getextrema()
    assert margins[0] > 240, "something is drawn over the margin"


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "8B", "--machine", "laptop", "--picture", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long" in capsys.readouterr().err


# ---- docs/plans.md


@pytest.fixture
def plan_table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_table", ROOT / "tools" / "plan_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tool_writes_now(plan_table: ModuleType) -> None:
    page = plan_table.page()
    assert (ROOT / "docs" / "plans.md").read_text() == page, "run tools/plan_table.py"
    rows = [line for line in page.splitlines() if re.match(r"\| \w+-.*\(\d", line)]
    assert len(rows) == len(list(FILES.iterdir())) == 12
    assert all(line.count("|") == 2 + len(MACHINES) for line in rows)
