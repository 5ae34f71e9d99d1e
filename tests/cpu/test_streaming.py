"""Models larger than their memory give the same tokens and log-probabilities, bit for bit, or an error; never
a wrong token."""

import gc
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import RopeKind
from penstock.base.errors import CheckpointError, EngineClosedError
from penstock.base.trace import Trace
from penstock.engine import measuring, placing
from penstock.memory.device import peak_of
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import STORE

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 128,
    "block_size": 4,
    "max_step_tokens": 7,
    "max_sequences": 5,
    "kv_blocks": 22,
    "check": True,
}
"""Prompts go in chunks of seven tokens, and blocks are scarce."""
ALL = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
LONGER = SamplingParams(temperature=0.8, seed=3, max_tokens=14, ignore_eos=True, logprobs=-1)
FEW = ["llama_tied", "mixtral"]
FAMILIES = [
    name
    for name, case in tiny.CASES.items()
    if tiny.THOROUGH or name in FEW or (name == case.model_type and name not in ("llama", "mistral"))
]
KINDS = [
    (name, kind)
    for name in FAMILIES
    for kind in ("both", "host", "disk", "least")
    if kind == "both" or name in FEW
]
"""Windows and rope are nothing to weights; llama and mistral have no others than the tied one."""


@pytest.fixture(autouse=True)
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are counted by shape: what is measured of them depends on the memory that the tests before
    have left. Links are not measured again and again either; what streams, and where, is the same."""
    monkeypatch.setattr(measuring, "peak_of", unmeasured)
    monkeypatch.setattr(placing, "copy_rate", lambda *_: 25e9)
    monkeypatch.setattr(placing, "file_read", lambda *_: _Rate(3e9))
    monkeypatch.setattr(placing, "memory_read", lambda *_: 40e9)


def unmeasured(device: torch.device, run: Callable[[], object]) -> int:
    run()
    return 0


@dataclass
class _Rate:
    read: float


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@dataclass(frozen=True)
class Resident:
    """What an engine whose weights all stay on the device gives, and what that takes."""

    completions: tuple[Completion, ...]
    again: tuple[Completion, ...]
    beside: int
    """Bytes beside weights."""
    weights: int
    least: int
    """Bytes without which nothing goes: the largest group, and two experts."""


def rounds(llm: LLM) -> tuple[tuple[Completion, ...], tuple[Completion, ...]]:
    """Prompts of all lengths at once, with everything that can be told of them; then sampled, some of it from
    the prefix cache, with so many blocks that some are sent back."""
    first = tuple(llm.generate(tiny.prompts(), ALL))
    again = tuple(llm.generate(tiny.prompts(), LONGER))
    assert llm.stats().preemptions > 0
    assert any(completion.cached_tokens for completion in again) or llm.spec.rope.kind is RopeKind.DYNAMIC
    return first, again


def open_model(path: Path, **settings: object) -> LLM:
    return LLM(path, **{**SETTINGS, **settings})  # type: ignore[arg-type]


@cache
def resident(name: str) -> Resident:
    with open_model(tiny.checkpoint(name)) as llm:
        first, again = rounds(llm)
        assert not llm.memory.weights.streams
        budget = llm.memory.budget
        sizes = {layout.id: -(-layout.size // 4096) * 4096 for layout in llm.booted.weights._layouts.values()}
    experts = [size for id, size in sizes.items() if id.kind is GroupKind.EXPERT]
    least = max(size for id, size in sizes.items() if id.kind is not GroupKind.EXPERT) + 2 * max(
        experts, default=0
    )
    gc.freeze()  # All these numbers stay, and are no garbage to be gone through.
    return Resident(first, again, budget.activations + budget.kv, budget.weights, least)


def budgets(name: str, kind: str) -> dict[str, int]:
    """Memory so that weights rest on the device and the host, the device and the disk, all three, or stream
    through the smallest rings."""
    whole = resident(name)
    beside, weights = whole.beside, whole.weights
    part = 0.5 if "moe" in name or "mix" in name else 0.35
    device = beside + max(int(0.45 * weights), whole.least)
    match kind:
        case "host":
            return {"device_memory": device, "host_memory": device + 2 * weights}
        case "disk":
            return {"device_memory": beside + int(0.85 * weights)}
        case "both":
            return {"device_memory": device, "host_memory": device + int(part * weights)}
        case _:
            return {
                "device_memory": beside + whole.least,
                "host_memory": beside + whole.least + int(part * weights),
            }


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_what_streams_computes_the_same(name: str, kind: str, packs: Path) -> None:
    whole = resident(name)
    with open_model(tiny.checkpoint(name), cache=packs, **budgets(name, kind)) as llm:
        assert rounds(llm) == (whole.completions, whole.again)
        stats = llm.memory.weights
    assert stats.copied > 5 * whole.weights
    assert (stats.read > 0) == (kind != "host")
    assert stats.device + stats.host + stats.disk == whole.weights
    if kind == "least":
        assert stats.device_ring <= whole.least


@pytest.mark.parametrize("kind", ["host", "disk", "both", "least"])
def test_groups_are_lent_at_the_same_places_in_every_pass(kind: str, packs: Path) -> None:
    """What is recorded of a pass, over places alone, holds for every pass."""
    with open_model(tiny.checkpoint("llama_tied"), cache=packs, **budgets("llama_tied", kind)) as llm:
        weights = llm.booted.weights
        take, taken = weights.take, list[tuple[GroupId, object]]()

        def noted(group: GroupId) -> Mapping[str, Tensor]:
            views = take(group)
            taken.append((group, views))
            return views

        with patch.object(weights, "take", noted):
            for _ in range(2):
                standing = weights.standing()
                llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
                assert any(weights.standing().moves(group) for group, _ in taken)
                assert all(standing.take(group) is views for group, views in taken)
                taken.clear()


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_links_are_measured(name: str, packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(measuring, "peak_of", lambda device, run: 0 * peak_of(device, run))
    with open_model(tiny.checkpoint(name), cache=packs, **budgets(name, "both")) as llm:
        assert tuple(llm.generate(tiny.prompts(), ALL)) == resident(name).completions
        stats = llm.memory.weights
    assert min(stats.link_rate, stats.disk_rate) > 0
    assert (stats.predicted > 0) == (name != "mixtral")  # Nobody knows which experts a router will choose.
    assert name != "mixtral" or stats.binding == "disk"
    assert stats.read > 0


# ---- damage


def packed(name: str, path: Path) -> Pack:
    """A pack of the case, open."""
    with Checkpoint.open(tiny.checkpoint(name)) as checkpoint:
        write_pack(checkpoint, path, "float32")
    return Pack.open(path)


def streamed(path: Path, name: str) -> LLM:
    return open_model(path, **budgets(name, "both"))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_flipped_byte_in_any_group_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    """Wherever the group stays, and whether it is read when the engine starts or as it is needed."""
    with packed(name, tmp_path / "pack") as pack:
        runs = pack.manifest.runs
    store = tmp_path / "pack" / STORE
    for number, run in enumerate(runs):
        if number % (9 if run.id.startswith("expert") else 2):
            continue
        at = run.offset + (run.size * 7 // 9)
        flip(store, at)
        with pytest.raises(CheckpointError) as caught:
            use_everything(tmp_path / "pack", name)
        flip(store, at)
        assert all(
            part in str(caught.value) for part in (str(store), f"group {run.id},", f"at byte {run.offset}")
        ), str(caught.value)
        assert "\n" not in str(caught.value)
    with streamed(tmp_path / "pack", name) as llm:
        assert tuple(llm.generate(tiny.prompts(), ALL)) == resident(name).completions


def use_everything(path: Path, name: str) -> None:
    """An expert is read when it is first needed."""
    with streamed(path, name) as llm:
        for seed in range(50):
            llm.generate(tiny.prompts(), SamplingParams(seed=seed, max_tokens=5))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 0x10]))


def test_a_store_that_is_cut_while_it_streams_ends_the_engine(tmp_path: Path) -> None:
    packed("llama", tmp_path / "pack").close()
    store = tmp_path / "pack" / STORE
    with streamed(tmp_path / "pack", "llama") as llm:
        assert tuple(llm.generate(tiny.prompts(), ALL)) == resident("llama").completions
        with store.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(CheckpointError, match=r"group \S+ at byte \d+") as caught:
            llm.generate(tiny.prompts(), LONGER)
        assert str(store) in str(caught.value)
        with pytest.raises(EngineClosedError):
            llm.generate(tiny.prompts(), LONGER)
    with pytest.raises(CheckpointError, match="cut short"):
        streamed(tmp_path / "pack", "llama")


def test_a_store_of_another_model_is_an_error(tmp_path: Path) -> None:
    """Of the same shape, so that only its bytes tell."""
    packed("llama", tmp_path / "pack").close()
    other = tiny.write(tiny.Case("llama", seed=9), tmp_path / "other")
    with Checkpoint.open(other) as checkpoint:
        write_pack(checkpoint, tmp_path / "foreign", "float32")
    shutil.copy(tmp_path / "foreign" / STORE, tmp_path / "pack" / STORE)
    with (
        pytest.raises(CheckpointError, match=r"group \S+, .* is damaged"),
        streamed(tmp_path / "pack", "llama") as llm,
    ):
        llm.generate(tiny.prompts(), ALL)


def test_a_cached_pack_of_another_model_is_an_error(tmp_path: Path) -> None:
    with open_model(tiny.checkpoint("llama"), cache=tmp_path, **budgets("llama", "both")):
        [mine] = (path for path in tmp_path.iterdir() if path.is_dir())
    other = tiny.write(tiny.Case("llama", seed=9), tmp_path / "other")
    shutil.rmtree(mine)
    with Checkpoint.open(other) as checkpoint:
        write_pack(checkpoint, mine, "float32")
    with pytest.raises(CheckpointError, match="holds a pack of another model"):
        open_model(tiny.checkpoint("llama"), cache=tmp_path, **budgets("llama", "both"))


# ---- what is seen of it


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_a_trace_tells_a_consistent_story(name: str, packs: Path) -> None:
    """One prompt that fits into a step, so that every pass uses every group."""
    trace = Trace()
    with open_model(tiny.checkpoint(name), cache=packs, trace=trace, **budgets(name, "both")) as llm:
        llm.generate([tiny.prompts()[1]], ALL)
        stats = llm.memory.weights
    tracks = defaultdict(list)
    for track, group, begin, end, more in trace._events:
        assert begin <= end
        tracks["read" if track and track.startswith("disk read") else track].append(
            (begin, end, group, more.get("bytes", 0))
        )
    copies, uses, reads = (sorted(tracks[track]) for track in ("host to device", "compute", "read"))
    assert len(uses) > 20
    for before, after in pairwise(copies):
        assert before[1] <= after[0], "two copies at a time"
    for before, after in pairwise(uses):
        assert before[1] <= after[0], "two uses at a time"
    for _, group_uses, group_copies, group_reads in by_group(uses, copies, reads):
        # What is copied ahead is not yet used, and what is read ahead not yet copied.
        assert len(group_uses) <= len(group_copies)
        assert all(copy[1] <= use[0] for use, copy in zip(group_uses, group_copies, strict=False))
        assert all(read[1] <= copy[1] for copy, read in zip(group_copies, group_reads, strict=False))
    assert sum(copy[3] for copy in copies) <= stats.copied
    assert sum(read[3] for read in reads) >= stats.read * 0.9


Span = tuple[float, float, str, object]


def by_group(*tracks: list[Span]) -> Iterator[tuple[str, list[Span], list[Span], list[Span]]]:
    for group in {span[2] for spans in tracks for span in spans}:
        uses, copies, reads = ([span for span in spans if span[2] == group] for spans in tracks)
        yield group, uses, copies, reads


_MEASURE = """
import json, sys, threading, time
import psutil, torch
from penstock import LLM, SamplingParams
from penstock.engine import placing

# What links are worth is measured with buffers of its own, which are gone when the engine has been made.
class Rate:
    read = 3e9

placing.copy_rate, placing.file_read = (lambda *_: 25e9), (lambda *_: Rate)
placing.memory_read = lambda *_: 40e9
torch.set_num_threads(1)
process, budget = psutil.Process(), 70 << 20
torch.randn(64, 64) @ torch.randn(64, 64)
before, most, over = process.memory_info().rss, [0], threading.Event()

def watch():
    while not over.wait(0.002):
        most[0] = max(most[0], process.memory_info().rss)

watching = threading.Thread(target=watch)
watching.start()
limits = {"max_length": 64, "max_step_tokens": 16, "max_sequences": 2}
with LLM(sys.argv[1], device="cpu", dtype="float32", device_memory=budget, **limits) as llm:
    [completion] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    stats = llm.memory.weights
over.set()
watching.join()
print(json.dumps([most[0] - before, stats.disk, stats.read, len(completion.tokens)]))
"""
SLACK = 60 << 20
"""What Python, torch and threads take besides: code that is loaded as it is first run, and each thread's own
stack and heap."""


def test_a_model_three_times_its_budget_stays_within_it(tmp_path: Path) -> None:
    """A fresh process, whose memory is watched from before the engine is made until it is closed, but for
    measuring."""
    model = large(tmp_path / "model")
    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    output = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path / "pack"], check=True, capture_output=True, text=True
    ).stdout
    grown, disk, read, tokens = json.loads(output)
    assert disk > 140 << 20
    assert read >= 3 * disk
    assert tokens == 3
    assert grown < (70 << 20) + SLACK


def large(path: Path) -> Path:
    """A random llama of 220 MB: the tiny one's config, wider and deeper."""
    config = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    config |= {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 14,
        "head_dim": 128,
        "vocab_size": 1024,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (1024, 512),
        "model.norm.weight": (512,),
        "lm_head.weight": (1024, 512),
    }
    for layer in range(19):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (512,) for norm in ("input", "post_attention")}
        shapes |= {
            f"{at}.self_attn.{name}_proj.weight": (size, 512)
            for name, size in (("q", 512), ("k", 256), ("v", 256), ("o", 512))
        }
        shapes |= {f"{at}.mlp.{name}_proj.weight": (2048, 512) for name in ("gate", "up")} | {
            f"{at}.mlp.down_proj.weight": (512, 2048)
        }
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.03 for name, shape in shapes.items()},
        path / "model.safetensors",
    )
    return path
