"""The command line with a real model behind it: text, JSON, chat, what bad input gets, and how it ends.

The model is written here and knows nothing but which token follows which, so every output is known: letters
go on through the alphabet and end after z, digits and capitals go round for ever, an answer in a chat is
"vwxyz".
"""

import json
import logging
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import MAGIC_NUMBER
from inspect import signature
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Protocol

import click
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

import forks
from penstock.api.llm import LLM, SHIPPED_MODEL
from penstock.base.config import Config
from penstock.base.meter import WeightStats
from penstock.base.setting import settings_of
from penstock.cli import load, progress, prompt
from penstock.cli import main as entry
from penstock.cli.chat_commands import help_text
from penstock.cli.commands.run import command as run_command
from penstock.cli.live import LiveLine
from penstock.cli.main import main
from penstock.cli.progress import byte_progress
from penstock.engine import placing
from penstock.memory import probe
from penstock.step.params import SamplingParams
from terminals import READY, Terminal

SOURCE = Path(__file__).resolve().parents[2] / "src"
CALL = "import sys; from penstock.cli.main import main; sys.exit(main())"
QUICK = (
    "placing._DISK_SECONDS, placing._LINK_SECONDS, probe._HOST_BYTES, probe._cache_bytes = 0.05, 0.02, 16 << "
    "20, lambda: 0"
)
"""Links and disk are measured as ever, but not for long: only a forecast depends on it."""
SPECIAL = ["<s>", "</s>", "<user>", "<bot>"]
END, BOT = 1, 3
VOCAB = len(SPECIAL) + 256
CONTEXT = 4096
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{% if 'forbidden' in m.content %}{{ "
    "raise_exception('not that') }}{% endif %}"
    "[{{ m.content }}]{% elif m.role == 'user' %}<user>{{ m.content }}{% else %}<bot>{{ m.content }}{% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    found = {"cached_tokens": cached, "cached_host_tokens": 0, "cached_disk_tokens": 0}
    made = {"output_tokens": output, "drafted_tokens": 0, "accepted_tokens": 0}
    return {"prompt_tokens": prompt, **found, **made}


def byte(character: str | int) -> int:
    """The token of a byte."""
    return len(SPECIAL) + (ord(character) if isinstance(character, str) else character)


def successors() -> dict[int, int]:
    """What the model says after each token; after all others it ends."""
    after = {byte(letter): byte(letter + 1) for letter in range(ord("a"), ord("z"))}
    for first, last in ("AZ", "09"):
        after |= {byte(code): byte(code + 1) for code in range(ord(first), ord(last))} | {
            byte(last): byte(first)
        }
    after |= {BOT: byte("v"), byte("{"): byte(0xC3), byte(0xC3): byte(0xA9)}  # é
    return after | {byte("~"): byte(0x1B), byte(0x1B): byte("x")}


def write_model(path: Path, *, template: str | None = TEMPLATE, layers: int = 1, inner: int = 8) -> Path:
    """A Llama whose layers add nothing, so that the logits depend on the last token alone. `inner`: width of
    their MLPs."""
    weights = {"model.embed_tokens.weight": torch.eye(VOCAB), "model.norm.weight": torch.ones(VOCAB)}
    head = torch.zeros(VOCAB, VOCAB)
    after = successors()
    for token in range(VOCAB):
        head[after.get(token, END), token] = 3.0
    weights["lm_head.weight"] = head
    shapes = {
        "self_attn.q_proj": (VOCAB, VOCAB),
        "self_attn.k_proj": (26, VOCAB),
        "self_attn.v_proj": (26, VOCAB),
    }
    shapes |= {
        "mlp.gate_proj": (inner, VOCAB),
        "mlp.up_proj": (inner, VOCAB),
        "mlp.down_proj": (VOCAB, inner),
    }
    shapes |= {"self_attn.o_proj": (VOCAB, VOCAB)}
    for layer in range(layers):
        weights |= {
            f"model.layers.{layer}.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(VOCAB)
    path.mkdir()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": VOCAB, "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 10, "num_key_value_heads": 1, "head_dim": 26,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": END,
        "torch_dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # bytes that byte-level tokenizers write as themselves
    others = iter(range(256, 512))
    alphabet = [chr(value if value in shown else next(others)) for value in range(256)]
    vocabulary = {name: token for token, name in enumerate([*SPECIAL, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({} if template is None else {"chat_template": template})
    )
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "successor")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def error(self) -> str:
        """The last line on stderr, of a command that was refused and said so in one line."""
        assert self.code == 2
        assert self.out == ""
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert [line.startswith("penstock: error: ") for line in lines].count(True) == 1
        return lines[-1].removeprefix("penstock: error: ")


class Penstock(Protocol):
    def __call__(self, *arguments: str | Path, stdin: bytes | None = None) -> Result: ...


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """The command in this process. Without `stdin`, stdin is empty."""
    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)

    def call(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin or b""), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


REST = "defghijklmnopqrstuvwxyz"
"""What the model says after abc."""

# -- run
# ------------------------------------------------------------------------------------------------------------


def test_run_continues_the_prompt_and_prints_the_sizing(penstock: Penstock, model: Path) -> None:
    result = penstock("run", model, "abc")
    assert (result.code, result.out) == (0, f"{REST}\n")
    # Whoever comes first compiles, and says so.
    lines = [line for line in result.err.splitlines() if not line.startswith("kernels for this processor: ")]
    assert lines[0].startswith("llama, 1 layer, float32 on CPU")
    assert re.match(r"memory .* weights .*, activations .*, KV .* blocks of 64 tokens", lines[1])
    assert len(lines) == 2


def test_quiet_says_nothing_else_and_verbose_adds_statistics(penstock: Penstock, model: Path) -> None:
    assert penstock("run", model, "abc", "--quiet") == Result(0, f"{REST}\n", "")
    statistics = penstock("run", model, "abc", "--verbose").err.splitlines()[-1]
    assert re.fullmatch(
        r"prompt 3 tokens \(0 cached\), [\d,]+ tokens/s; first token after \d+\.\d+ s; output 24 tokens, "
        r"[\d,]+ tokens/s; ended by stop",
        statistics,
    )


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (["{"], "é\n"),
        (["abc", "--max-tokens", "3"], "def\n"),
        (["9"], "0123456789" * 25 + "012345\n"),
        (["abc", "--stop", "jk", "--stop", "mn"], "defghi\n"),
        (["abc", "--stop", "jk", "--include-stop"], "defghijk\n"),
        (["abc", "--stop-token", str(byte("g"))], "def\n"),
        (["xyz", "--min-tokens", "2", "--max-tokens", "2", "--logit-bias", f"{byte('!')}=30"], "!!\n"),
        (
            [
                "abc",
                "--logit-bias",
                f"{byte('d')}=-100",
                "--logit-bias",
                f"{byte('Z')}=30",
                "--max-tokens",
                "2",
            ],
            "ZA\n",
        ),
        (["y", "--ignore-eos", "--max-tokens", "3"], "z\n"),
        (["abc", "--echo"], f"abc{REST}\n"),
        (["abc", "-n", "2"], f"--- output 1 of 2 ---\n{REST}\n--- output 2 of 2 ---\n{REST}\n"),
        (
            ["abc", "-n", "2", "--echo"],
            f"abc\n--- output 1 of 2 ---\n{REST}\n--- output 2 of 2 ---\n{REST}\n",
        ),
        (["abc", "--chat"], "vwxyz\n"),
        (["abc", "--system", "Be brief.", "--max-tokens", "2"], "vw\n"),
    ],
)
def test_run_writes(penstock: Penstock, model: Path, arguments: list[str], out: str) -> None:
    assert penstock("run", model, *arguments, "--quiet") == Result(0, out, "")


@pytest.mark.parametrize(
    ("form", "more", "told"),
    [
        ("[a-z]+!", [], "the output is cut after 3 tokens, and not complete by the regex"),
        ("[a-z]+!", ["-n", "2"], "2 of 2 outputs are cut after 3 tokens, and not complete by the regex"),
        ("[a-z]+!", ["--json"], "the output is cut after 3 tokens, and not complete by the regex"),
        ("[a-z]+", [], None),
        ("def", [], None),
    ],
)
def test_output_that_is_cut_before_it_is_whole_by_its_structure_is_told(
    penstock: Penstock, model: Path, form: str, more: list[str], told: str | None
) -> None:
    """Also where nothing else is said."""
    result = penstock("run", model, "abc", "--quiet", "--regex", form, "--max-tokens", "3", *more)
    assert (result.code, "def" in result.out) == (0, True)
    assert result.err == (f"penstock: note: {told}; allow more with --max-tokens\n" if told else "")


def test_json_that_is_cut_in_a_chat_is_told(penstock: Penstock, model: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}')
    result = penstock("chat", model, "-q", "--json-schema", schema, "--max-tokens", "4", stdin=b"hi\n")
    assert (
        "penstock: note: the output is cut after 4 tokens, and not complete by the JSON schema" in result.err
    )


@pytest.mark.parametrize("more", [[], ["--max-tokens", "1"]])
def test_who_means_tokens_by_n_is_told_what_it_is(penstock: Penstock, model: Path, more: list[str]) -> None:
    result = penstock("run", model, "z", "-n", "12", *more)
    note = "penstock: note: -n 12 makes 12 outputs; their length is --max-tokens"
    assert (result.code, note in result.err.splitlines()) == (0, not more)


def test_without_max_tokens_a_prompt_near_the_contexts_end_gets_what_is_left(
    penstock: Penstock, model: Path
) -> None:
    assert penstock("run", model, "-q", "--max-length", "20", "012345678901").out == "23456789\n"


@pytest.mark.parametrize("stdin", [b"abc", b"abc\n", b"abc\r\n"])
@pytest.mark.parametrize("arguments", [[], ["-"], ["--file", "-"]])
def test_a_prompt_from_stdin(penstock: Penstock, model: Path, stdin: bytes, arguments: list[str]) -> None:
    assert penstock("run", model, "-q", *arguments, stdin=stdin) == Result(0, f"{REST}\n", "")


def test_a_prompt_from_a_file_loses_one_newline(penstock: Penstock, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("é\n\n")
    record = json.loads(penstock("run", model, "--json", "--file", file).out)
    assert (record["prompt"], record["usage"]["prompt_tokens"]) == ("é\n", 3)


def test_json_is_one_object_with_everything(penstock: Penstock, model: Path) -> None:
    result = penstock("run", model, "xyz", "--json", "--logprobs", "2", "--prompt-logprobs", "0")
    record = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert {name: record[name] for name in ("model", "prompt", "text", "tokens", "finish_reason", "device",
    "dtype")} == {
        "model": str(model), "prompt": "xyz", "text": "", "tokens": [END], "finish_reason": "stop",
        "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    assert record["usage"] == usage(3, 0, 1)
    assert record["timings"].keys() == {
        "boot_s",
        "first_token_s",
        "total_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
    }
    assert record["timings"]["decode_tokens_per_s"] is None
    assert record["timings"]["first_token_s"] > 0
    assert record["budget"]["kv_tokens"] == record["budget"]["blocks"] * 64 == CONTEXT
    [chosen] = record["logprobs"]
    assert (chosen["token"], chosen["rank"], len(chosen["top"])) == (END, 1, 2)
    assert chosen["logprob"] == pytest.approx(0, abs=1e-6)
    assert [entry and (entry["text"], entry["rank"]) for entry in record["prompt_logprobs"]] == [
        None,
        ("y", 1),
        ("z", 1),
    ]


def test_json_has_all_outputs(penstock: Penstock, model: Path) -> None:
    record = json.loads(penstock("run", model, "8", "--json", "-n", "3", "--max-tokens", "2").out)
    assert record["text"] == "90"
    assert [(output["text"], output["finish_reason"]) for output in record["outputs"]] == [
        ("90", "length")
    ] * 3
    assert record["usage"]["output_tokens"] == 6


def test_engine_options_arrive(penstock: Penstock, model: Path) -> None:
    options = [
        "--dtype",
        "bfloat16",
        "--block-size",
        "16",
        "--max-length",
        "64",
        "--device-memory",
        "256MiB",
        "--device",
        "cpu",
    ]
    record = json.loads(penstock("run", model, "abc", "--json", *options).out)
    assert record["text"] == REST
    assert record["dtype"] == "bfloat16"
    assert record["budget"].items() >= {"total": 256 << 20, "block_size": 16, "blocks": 4}.items()
    record = json.loads(
        penstock(
            "run",
            model,
            "abc",
            "--json",
            "--kv-blocks",
            "3",
            "--max-sequences",
            "2",
            "--no-prefix-cache",
            "--check",
        ).out
    )
    assert record["budget"]["blocks"] == 3


@pytest.mark.parametrize("options", [["-n", "70"], ["-n", "5", "--max-step-tokens", "2"]])
def test_more_outputs_than_run_at_once(penstock: Penstock, model: Path, options: list[str]) -> None:
    record = json.loads(
        penstock("run", model, "abc", "--json", "--max-tokens", "2", "--max-length", "8", *options).out
    )
    assert [output["text"] for output in record["outputs"]] == ["de"] * int(options[1])


def test_every_setting_has_a_flag() -> None:
    names = {parameter.name for parameter in run_command.params}
    held = {"json_schema", "regex", "choice", "grammar"}
    assert held <= names
    # A structure is what these make, and shown tokens are for who takes the text apart.
    assert {field.name for field in fields(SamplingParams)} - {
        "structure",
        "shown_tokens",
        "text_token",
    } <= names
    assert {field.name for field in fields(Config)} - {"model"} <= names


def test_every_setting_is_a_keyword_of_llm_with_its_help() -> None:
    shown, explained = signature(LLM).parameters, LLM.__init__.__doc__ or ""
    for one in settings_of(Config):
        usual = str(one.default) if isinstance(one.default, Path) else one.default
        assert one.name == "model" or shown[one.name].default == usual
        assert f"{one.name}: {one.help.split()[0]}" in explained
    assert next(iter(shown)) == "model"
    assert shown["model"].default is None
    assert {"progress", "trace", "loading"} < {*shown}


def test_the_shipped_model_is_where_the_engine_looks_for_it() -> None:
    assert prompt.SHIPPED_MODEL == SHIPPED_MODEL


# -- models larger than memory
# -----------------------------------------------------------------------------------------------

SMALL = ["--dtype", "float32", "--max-step-tokens", "16", "--max-length", "64"]
FROM_DISK = [*SMALL, "--device-memory", "50MB"]
"""Of the 54 MiB of `deep`, whatever the activations take."""


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with 8 layers, each of an attention of 584 KiB and an MLP of 6 MiB."""
    return write_model(tmp_path_factory.mktemp("deep") / "successor", layers=8, inner=2048)


@pytest.fixture(scope="session")
def packed(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "pack"
    assert main(["pack", str(deep), "--out", str(path)]) == 0
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (placing, "_DISK_SECONDS"),
        (placing, "_LINK_SECONDS"),
        (probe, "_HOST_BYTES"),
        (probe, "_cache_bytes"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    exec(QUICK, {"placing": placing, "probe": probe})


def tracks(trace: Path) -> list[str]:
    """Of a trace, those with something in them, from top to bottom."""
    entries = json.loads(trace.read_text())["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    used = {entry["tid"] for entry in entries if entry["ph"] == "X"}
    return [name for thread, name in names.items() if thread in used]


@pytest.mark.usefixtures("quick")
def test_a_model_larger_than_memory_is_packed_once_and_says_the_same(
    penstock: Penstock, deep: Path, tmp_path: Path
) -> None:
    cache, trace = tmp_path / "cache", tmp_path / "trace.json"
    resident = penstock("run", deep, "abc", *SMALL, "--quiet")
    assert resident == Result(0, f"{REST}\n", "")
    first = penstock("run", deep, "abc", *FROM_DISK, "--cache", cache, "--verbose", "--trace", trace)
    [pack] = [path.parent for path in cache.glob("*/manifest.json")]  # Digests may lie beside it.
    assert (first.code, first.out) == (0, resident.out)
    assert re.search(
        rf"^weights of 53\.\d MiB in float32 do not fit .*; packing them once into {pack}$",
        first.err,
        re.MULTILINE,
    )
    *_, statistics, weights, written = first.err.splitlines()
    assert statistics.endswith("ended by stop")
    assert re.match(
        r"weights: device .* · disk .* \| 24 passes in .* \| link .* \| disk .* \| waits: .* bound by ",
        weights,
    )
    assert written == f"{trace}: a trace, to be opened in ui.perfetto.dev"
    shown = tracks(trace)
    assert [name for name in shown if name in ("compute", "host to device")] == ["compute", "host to device"]
    assert "disk read 1" in shown
    before = (pack / "manifest.json").stat()
    second = penstock("run", deep, "abc", *FROM_DISK, "--cache", cache)
    assert (second.code, second.out) == (0, resident.out)
    assert "pack" not in second.err
    assert "trace" not in second.err
    assert (pack / "manifest.json").stat() == before
    assert penstock("run", pack, "abc", *FROM_DISK, "--quiet", "--cache", tmp_path / "other") == resident
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("quick")
def test_json_tells_what_streamed_for_each_answer(penstock: Penstock, packed: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    stdin = b"abc\n7\n"
    result = penstock(
        "chat",
        packed,
        "--raw",
        "--json",
        *FROM_DISK,
        "--max-tokens",
        "3",
        "--trace",
        trace,
        "--quiet",
        stdin=stdin,
    )
    assert result.err == ""
    answers = [answer["weights"] for answer in records(result)]
    assert len(answers) == 2
    for weights in answers:
        assert weights.keys() == {field.name for field in fields(WeightStats)} | {"streams"}
        assert weights["streams"] is True
        assert weights["passes"] == 3
        streamed = 54 * 2**20 - weights["device"]
        assert weights["disk"] == pytest.approx(streamed, rel=0.05)
        for moved in (weights["copied"], weights["read"]):
            assert (
                2 * weights["disk"] <= moved <= 4 * weights["disk"]
            )  # what is fetched for the next pass is counted when it moves
        assert weights["host"] == 0
    assert tracks(trace)[0] == "compute"


@pytest.mark.usefixtures("quick")
def test_what_fits_into_host_memory_needs_no_pack(penstock: Penstock, deep: Path, tmp_path: Path) -> None:
    result = penstock(
        "run", deep, "abc", "--json", *FROM_DISK, "--host-memory", "140MB", "--cache", tmp_path / "cache"
    )
    record = json.loads(result.out)
    assert record["text"] == REST
    weights = record["weights"]
    assert (weights["disk"], weights["read"], weights["binding"] != "disk") == (0, 0, True)
    assert weights["host"] > 0
    assert weights["copied"] >= 23 * weights["host"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("group", ["embedding", "ffn.5"])
def test_a_flipped_bit_in_a_pack_is_found_and_named(
    penstock: Penstock, packed: Path, tmp_path: Path, group: str
) -> None:
    pack = tmp_path / "pack"
    shutil.copytree(packed, pack)
    [run] = [run for run in json.loads((pack / "manifest.json").read_text())["groups"] if run["id"] == group]
    with (pack / "weights.bin").open("r+b") as store:
        store.seek(run["offset"] + 1000)
        byte = store.read(1)[0]
        store.seek(-1, os.SEEK_CUR)
        store.write(bytes([byte ^ 1]))
    message = penstock("run", pack, "abc", *FROM_DISK).error()
    assert message.startswith(f"{pack / 'weights.bin'}: group {group}, ")
    assert f"bytes at byte {run['offset']}, is damaged: " in message


def test_a_trace_of_what_does_not_stream_is_a_file_with_nothing_in_it(
    penstock: Penstock, model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    result = penstock("run", model, "abc", "--json", "--trace", trace)
    assert json.loads(result.out)["weights"] is None
    assert (
        result.err.splitlines()[-1]
        == f"{trace}: a trace with nothing in it: all weights are on the device, nothing streamed"
    )
    assert tracks(trace) == []
    trace.unlink()
    assert penstock("chat", model, "--raw", "--quiet", "--trace", trace, stdin=b"xy\n") == Result(
        0, "z\n", ""
    )
    assert tracks(trace) == []


def test_a_trace_of_kv_that_streams_has_every_copy(penstock: Penstock, model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    far = [
        "--dtype",
        "float32",
        "--block-size",
        "16",
        "--kv-blocks",
        "4",
        "--kv-tile",
        "16",
        "--host-kv-memory",
        "1MiB",
    ]
    prompt = "0123456789" * 10
    result = penstock("run", model, prompt, "--raw", "--max-tokens", "4", "--json", *far, "--trace", trace)
    record = json.loads(result.out)
    assert record["weights"] is None
    assert result.err.splitlines()[-1] == f"{trace}: a trace, to be opened in ui.perfetto.dev"
    assert tracks(trace)[:1] == ["compute"]
    copies = [
        event["args"]["bytes"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if "bytes" in event.get("args", {})
    ]
    assert sum(copies) == record["kv"]["copied"] > 0


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(
    penstock: Penstock, tmp_path: Path, command: str
) -> None:
    trace = tmp_path / "missing" / "trace.json"  # and the model's directory is empty
    result = penstock(
        command, tmp_path, *(["abc"] if command == "run" else []), "--trace", trace, stdin=b"abc\n"
    )
    assert result.error().startswith(
        f"the trace cannot be written to {trace}: there is no directory {trace.parent}; "
    )
    assert len(result.err.splitlines()) == 1


# -- loading
# ------------------------------------------------------------------------------------------------------------


@contextmanager
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """stderr is a terminal. Yields what tells what came there since it was asked last."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")

    def seen() -> str:
        os.write(theirs, b"\x05")
        data = b""
        while not data.endswith(b"\x05"):
            data += os.read(ours, 1 << 16)
        return data[:-1].decode()

    with open(theirs, "w", encoding="utf-8") as stderr, redirect_stderr(stderr):
        yield seen
    os.close(ours)


def test_loading_that_takes_long_has_a_bar_which_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PERIOD", 0.0)
    monkeypatch.setattr(load, "PATIENCE", 0.0)
    with screen(monkeypatch) as seen:
        with load.loading_bar(quiet=False) as tell:
            assert tell is not None
            for what in ("packing", "loading"):
                tell(what, 40, 100)
                tell(what, 30, 100)  # from a thread that was overtaken
                tell(what, 100, 100)
                shown = seen()
                assert what in shown
                assert "40/100 bytes" in shown
                assert "30/100" not in shown
                assert shown.endswith("\x1b[1A\x1b[2K")
                tell(what, 90, 100)
            tell("more", 1, 2)
            assert "more" in seen()
        assert seen().endswith("\x1b[1A\x1b[2K")


def test_bytes_have_a_bar_on_a_terminal_once_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    with screen(monkeypatch) as seen:
        with byte_progress("packing", 100):
            pass
        assert "packing" not in seen()
        with byte_progress("packing", 100) as tell:
            tell(40)
            tell(60)
        assert "packing" in (shown := seen())
        assert "100/100 bytes" in shown
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(progress, "LINES_EVERY", 0.0)
        with byte_progress("packing", 100) as tell:
            tell(40)
        assert "packing: 40 B of 100 B, " in seen()


def test_loading_that_is_quick_or_not_looked_at_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PATIENCE", 3600.0)
    with screen(monkeypatch) as seen:
        with load.loading_bar(quiet=False) as tell:
            assert tell is not None
            tell("loading", 1, 2)
            tell("loading", 2, 2)
        with load.loading_bar(quiet=True) as tell:
            assert tell is None
        monkeypatch.setenv("TERM", "dumb")
        with load.loading_bar(quiet=False) as tell:
            assert tell is None
        assert seen() == ""


# -- bad input
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty; "),
        (["caf\udce9"], "the prompt is not valid UTF-8: byte 0xe9 at offset 3; "),
        (
            ["9" * 5000],
            f"the request has 5000 tokens of prompt, but the context holds {CONTEXT} in all; shorten it",
        ),
        (["abc", "--max-tokens", "5000"], "3 tokens of prompt and 5000 of output"),
        (["abc", "--temperature", "-1"], "temperature -1.0 must be from 0 to 2; 0 is greedy"),
        (["abc", "--temperature", "hot"], "'hot' is not a valid float; see penstock run --help"),
        (["abc", "--top-p", "nan"], "--top-p nan must be above 0"),
        (["abc", "--stop", ""], "at least one character"),
        (["abc", "--logit-bias", "a=1"], "'a=1' is not a token id and a number; write them like 42=-1.5"),
        (
            ["abc", "--stop-token", "1000"],
            "stop_token_ids has token 1000, but the model has only tokens 0 to 259",
        ),
        (["abc", "--device-memory", "16Gx"], "cannot read '16Gx' as a size; write it like 16GiB"),
        (["abc", "--device-memory", "20KB"], "is too small for one group of weights"),
        (["abc", "--kv-blocks", "1", "--max-tokens", "100"], "the KV blocks hold 65"),
        (["abc", "--device", "tpu"], "device 'tpu' is not known; choose auto, cpu, cuda or cuda:N"),
        (["abc", "--dtype", "int3"], "dtype 'int3' is not known; choose one of auto"),
        (["abc", "--block-size", "48"], "--block-size is 48; give a power of two"),
        (["abc", "--max-length", "9999"], "--max-length 9999 is more than the 4096 positions"),
        (["abc", "--logprobs", "2"], "--logprobs is only written with --json; add --json"),
        (["abc", "--prompt-logprobs", "2"], "--prompt-logprobs is only written with --json; add --json"),
        (["abc", "--quiet", "--verbose"], "--quiet and --verbose exclude each other"),
        (["abc", "--system", "x", "--raw"], "--system needs the chat template"),
        (
            ["abc", "--system", "forbidden"],
            "the model's chat template does not take these messages: not that",
        ),
        (
            ["abc", "--file", "x.txt"],
            "a prompt was given as an argument and with --file x.txt; give one of them",
        ),
        (
            ["abc", "def"],
            "there are 3 arguments, but run takes a model and a prompt; put the prompt in quotes",
        ),
        (
            ["--file", "/nowhere/x.txt"],
            "the prompt cannot be read from /nowhere/x.txt: No such file or directory; name a text file",
        ),
        (
            ["abc", "--temperatur", "1"],
            "no such option '--temperatur'; did you mean --temperature?",
        ),
    ],
)
def test_bad_input_gets_one_line(penstock: Penstock, model: Path, arguments: list[str], message: str) -> None:
    assert message in penstock("run", model, *arguments).error()


@pytest.mark.parametrize("asked", [["run", "abc"], ["chat"], ["chat", "--raw"], ["eval", "needle"]])
def test_text_for_a_model_without_a_tokenizer_is_refused_before_weights_are_loaded(
    penstock: Penstock, packed: Path, tmp_path: Path, asked: list[str]
) -> None:
    bare = shutil.copytree(packed, tmp_path / "pack", ignore=shutil.ignore_patterns("tokenizer*"))
    at = 2 if asked[0] == "eval" else 1
    result = penstock(*asked[:at], bare, *asked[at:], stdin=b"abc\n")
    assert result.error().startswith(
        f"{bare} has no tokenizer.json, which text needs; add the file, or give "
    )
    assert len(result.err.splitlines()) == 1


def test_stdin_and_files_that_are_not_utf8_or_empty(penstock: Penstock, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes("naïve".encode("latin1"))
    assert (
        "the prompt on stdin is not valid UTF-8: byte 0xff at offset 2"
        in penstock("run", model, stdin=b"ab\xff").error()
    )
    assert (
        f"the prompt in {file} is not valid UTF-8: byte 0xef at offset 2"
        in penstock("run", model, "--file", file).error()
    )
    assert "the prompt is empty" in penstock("run", model, "-", stdin=b"\n").error()


def test_models_that_are_not_there_or_damaged(penstock: Penstock, tmp_path: Path) -> None:
    assert (
        "model 'Once' does not exist; give a directory with a config.json, or a model of the Hugging Face "
        "Hub as owner/name; put the prompt in quotes" in penstock("run", "Once", "upon").error()
    )
    assert "has no config.json; give a model's directory" in penstock("run", tmp_path, "abc").error()
    broken = write_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert f"{weights} is cut short or damaged" in penstock("run", broken, "abc").error()
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    assert "gpt_neox" in penstock("run", broken, "abc").error()
    plain = write_model(tmp_path / "plain", template=None)
    assert "this model has no chat template" in penstock("run", plain, "abc", "--chat").error()
    assert "this model has no chat template" in penstock("chat", plain).error()


def test_tracebacks_are_for_those_who_ask(
    penstock: Penstock, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--debug", "run", model, ""], ["run", model, "", "--debug"]):
        result = penstock(*arguments)
        assert result.code == 2
        assert result.err.startswith("Traceback")
        assert result.err.splitlines()[-1].startswith("penstock: error: the prompt is empty")
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert penstock("run", model, "").err.startswith("Traceback")


def test_a_fault_of_our_own_is_one_line_too(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(entry.COMMANDS, "ghost", "Is not there.")
    result = penstock("ghost")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "penstock: internal error: ModuleNotFoundError: No module named 'penstock.cli.commands.ghost'; run "
        "with --debug, and report the traceback\n"
    )


def test_a_module_that_is_cut_short_is_no_ctrl_c(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Python leaves one that it compiled while the disk filled."""
    (tmp_path / "penstock_cut.pyc").write_bytes(MAGIC_NUMBER + bytes(12) + b"\xe3")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(entry, "import_module", lambda name: import_module("penstock_cut"))
    result = penstock("run", "hi")
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(
        r"penstock: internal error: EOFError: .*; run with --debug, and report the traceback\n", result.err
    )


# -- chat
# ------------------------------------------------------------------------------------------------------------


def records(result: Result) -> list[dict[str, object]]:
    assert result.code == 0
    return [json.loads(line) for line in result.out.splitlines()]


def test_chat_answers_every_line_and_remembers(penstock: Penstock, model: Path) -> None:
    first, second = records(penstock("chat", model, "--json", "--block-size", "1", stdin=b"hi\r\n\nyo"))
    assert (first["prompt"], first["text"], first["finish_reason"]) == ("hi", "vwxyz", "stop")
    assert first["usage"] == usage(5, 0, 6)
    assert second["prompt"] == "yo"
    assert second["usage"] == usage(14, 10, 6)


def test_chat_commands(penstock: Penstock, model: Path) -> None:
    lines = b"/system\nhi\n/reset\n/system Be kind.\nhi\n/system\n//hi\n/help\n/exit\nnever\n"
    result = penstock("chat", model, "--json", "--quiet", stdin=lines)
    answers = records(result)
    assert [answer["prompt"] for answer in answers] == ["hi", "hi", "/hi"]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [5, 5 + 10, 15 + 5 + 5]
    remarks = [
        "there is no system message",
        "a new conversation begins",
        "the system message is set",
        "Be kind.",
        *help_text().splitlines(),
    ]
    assert result.err.splitlines() == remarks


def test_chat_without_a_template_writes_one_text_by_turns(penstock: Penstock, model: Path) -> None:
    result = penstock("chat", model, "--raw", "--quiet", "--max-tokens", "3", stdin=b"abc\n7\n")
    assert result == Result(0, "def\n890\n", "")
    _, second = records(penstock("chat", model, "--raw", "--json", "--max-tokens", "3", stdin=b"abc\n7\n"))
    assert second["usage"]["prompt_tokens"] == len("abcdef\n7")
    assert "--system needs the chat template" in penstock("chat", model, "--raw", "--system", "x").error()


def test_a_conversation_longer_than_the_context(penstock: Penstock, model: Path) -> None:
    result = penstock(
        "chat", model, "--raw", "--quiet", "--max-length", "16", stdin=b"4567\n/reset\nxy\n5\n6\n"
    )
    assert result.code == 2
    assert result.out == "890123456789\nz\n67890123456\n"
    full = "the context is full with 16 tokens; /reset begins a new conversation"
    refused = (
        "penstock: error: the conversation would have 18 tokens, but the context holds 16 with an answer; "
        "/reset begins a new one"
    )
    assert result.err.splitlines() == [full, "a new conversation begins", full, refused]
    assert (
        "shorten the message"
        in penstock("chat", model, "--quiet", "--max-length", "16", stdin=b"a" * 20).error()
    )


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"a\xff\n", "line 1 of stdin is not valid UTF-8: byte 0xff at offset 1"),
        (b"/xyzzy\n", "/xyzzy is no command of the chat; /help lists them"),
        (b"/system forbidden\n", "does not take these messages: not that"),
    ],
)
def test_a_bad_line_ends_a_piped_chat(penstock: Penstock, model: Path, stdin: bytes, message: str) -> None:
    assert message in penstock("chat", model, "--quiet", stdin=stdin).error()


# -- real processes
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts the command as a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def call(
        *arguments: str | Path, term: str = "dumb", quick: bool = False, **streams: int
    ) -> "subprocess.Popen[bytes]":
        code = (
            f"from penstock.engine import placing; from penstock.memory import probe; {QUICK}; {CALL}"
            if quick
            else CALL
        )
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TERM": term}
        environment.pop("PENSTOCK_DEBUG", None)
        started.append(
            forks.LoadedPopen([sys.executable, "-c", code, *map(str, arguments)], env=environment, **streams)
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def test_a_closed_pipe_ends_it_quietly(start: Callable[..., "subprocess.Popen[bytes]"], model: Path) -> None:
    process = start(
        "run", model, "9", "--quiet", "--max-tokens", "4000", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(1) == b"0"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


IMPORTS = """
import os, signal, sys

class Finder:
    def find_spec(name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
from penstock.cli.live import LiveLine
from penstock.cli.main import main
code = main(["bench", "decode", "--context", "8", "--output", "1"])
print(code, "torch" in sys.modules)
"""


def test_ctrl_c_while_torch_is_imported_comes_behind_it() -> None:
    """Parts of it swallow an interrupt, or do not survive it."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("130 True\n", "\n")


def test_ctrl_c_ends_a_run_without_a_traceback(
    start: Callable[..., "subprocess.Popen[bytes]"], model: Path
) -> None:
    process = start(
        "run", model, "9", "--quiet", "--max-tokens", "4000", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(3) == b"012"  # long before the end: it streams
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert len(rest) < 3900
    assert process.stderr.read() == b"\n"
    assert process.wait() == 130


def test_a_terminal_shows_prompt_text_and_statistics(
    start: Callable[..., "subprocess.Popen[bytes]"], model: Path
) -> None:
    terminal = Terminal(start, "run", model, "~", "--max-tokens", "3")
    shown = terminal.until("ended by length")
    terminal.close()
    assert (
        "\x1b[1m~\x1b[0m\u241bxy\r\n" in shown
    )  # the prompt bold; the model's escape character as a picture
    assert "memory" in shown
    assert "output 3 tokens" in shown
    assert terminal.process.wait() == 0


@pytest.mark.parametrize("command", ["run", "chat"])
def test_what_is_remarked_while_an_answer_is_written_comes_behind_it(
    command: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Both(StringIO):
        def isatty(self) -> bool:
            return True

    def remarked(line: LiveLine, text: str, **how: bool) -> None:
        logging.getLogger("penstock").info("the processor is busy")
        plain(line, text, **how)

    both, plain = Both(), LiveLine.write
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(LiveLine, "write", remarked)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"abc\n"), encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    asked = ["run", str(model), "abc"] if command == "run" else ["chat", str(model), "--raw"]
    assert main([*asked, "--max-tokens", "4"]) == 0
    lines = [click.unstyle(line) for line in both.getvalue().splitlines()]
    assert ("abcdefg" if command == "run" else "defg") in lines
    assert lines.count("the processor is busy") >= 4


def test_without_an_own_number_of_tokens_a_cut_is_told_on_a_terminal(
    start: Callable[..., "subprocess.Popen[bytes]"], model: Path
) -> None:
    terminal = Terminal(start, "run", model, "9", term="xterm")
    assert "ended by length" in terminal.until("cut at the usual length; allow more with --max-tokens")
    terminal.close()


def test_ctrl_c_stops_an_answer_and_then_the_chat(
    start: Callable[..., "subprocess.Popen[bytes]"], model: Path
) -> None:
    terminal = Terminal(start, "chat", model, "--raw")
    terminal.until("> ")
    terminal.type("9\n")
    terminal.until("0123")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("> ")
    terminal.type("/nope\n")
    terminal.until("penstock: error: /nope is no command of the chat")
    terminal.until("> ")
    terminal.type("abc\n")
    terminal.until(REST)
    terminal.until("> ")
    terminal.interrupt()
    terminal.until("Ctrl-C again or Ctrl-D leaves")
    terminal.until("> ")
    terminal.interrupt()
    assert terminal.process.wait() == 130
    terminal.close()


@contextmanager
def slowed(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """It runs a tenth of the time: what is told of a prompt that takes long is then told of any, however fast
    the machine."""
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.005) and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            over.wait(0.045)
            process.send_signal(signal.SIGCONT)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()


def test_ctrl_c_stops_a_long_prompt_and_what_was_computed_of_it_is_free(
    start: Callable[..., "subprocess.Popen[bytes]"], model: Path, tmp_path: Path
) -> None:
    """What is asked next takes all blocks there are."""
    room = [
        "--dtype",
        "float32",
        "--max-step-tokens",
        "2",
        "--block-size",
        "32",
        "--kv-blocks",
        "124",
        "--max-length",
        "3900",
    ]
    terminal = Terminal(start, "chat", model, "--raw", "-v", *room, term="xterm")
    for _ in range(2):
        terminal.until(READY)
        terminal.type("z" * 3799 + "w")
        terminal.until("w")
        with slowed(terminal.process):
            terminal.type("\n")
            terminal.until(" of 3,800 tokens, ")
            terminal.process.send_signal(signal.SIGINT)
            shown = terminal.until("; no token in ")
        assert "stopped; the message and its answer are left out of the conversation" in shown
    terminal.until(READY)
    terminal.type("w\n")
    terminal.until("xyz")
    terminal.until(READY)
    terminal.type("/exit\n")
    assert terminal.process.wait() == 0
    terminal.close()


def test_ctrl_c_ends_a_run_in_the_midst_of_its_prompt(
    start: Callable[..., "subprocess.Popen[bytes]"], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("9" * 3800)
    terminal = Terminal(
        start,
        "run",
        model,
        "--file",
        file,
        "-v",
        "--dtype",
        "float32",
        "--max-step-tokens",
        "2",
        term="xterm",
    )
    terminal.until("memory ")
    with slowed(terminal.process):
        terminal.until(" of 3,800 tokens, ")
        terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait() == 130
    terminal.close()


LONG = [
    "--dtype",
    "float32",
    "--max-step-tokens",
    "16",
    "--max-length",
    "2048",
    "--kv-blocks",
    "64",
    "--device-memory",
    "50MB",
]


def test_ctrl_c_ends_a_run_that_streams_and_the_trace_is_written(
    start: Callable[..., "subprocess.Popen[bytes]"], packed: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(
        "run", packed, "9", "--quiet", "--max-tokens", "2000", *LONG, "--trace", trace, quick=True, **streams
    )
    assert process.stdout.read(3) == b"012"
    process.send_signal(signal.SIGINT)
    assert len(process.stdout.read()) < 1900
    assert process.stderr.read() == b"\n"
    assert process.wait() == 130
    assert {"compute", "host to device", "disk read 1"} <= set(tracks(trace))


def test_a_chat_that_streams_has_a_line_while_it_answers(
    start: Callable[..., "subprocess.Popen[bytes]"], packed: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    terminal = Terminal(start, "chat", packed, "--raw", *LONG, "--trace", trace, term="xterm", quick=True)
    terminal.until(READY)
    terminal.type("9\n")
    terminal.until("\x1b[1;23r")  # the bottom row is taken
    terminal.until("| pass ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("\x1b[r")  # and given back
    terminal.until(READY)
    assert not trace.exists()
    terminal.type("/exit\n")
    terminal.until("to be opened in ui.perfetto.dev")
    assert terminal.process.wait() == 0
    terminal.close()
    assert tracks(trace)[0] == "compute"
