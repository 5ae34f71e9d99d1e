"""KV, packs and whole engines are of one model, to the last bit: what differs in anything never shares
anything."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

import specs
import tiny
from packs import read_group
from penstock import LLM, Completion, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from penstock.arch.formats.recipe import Recipe
from penstock.arch.shards import Shard
from penstock.base.config import Config
from penstock.base.errors import CheckpointError
from penstock.engine.settling import Settled, settle
from penstock.engine.store import root_of
from penstock.kv.store.blocks import BlockStore
from penstock.weights.checkpoint import identity
from penstock.weights.checkpoint import reader as reading
from penstock.weights.checkpoint.identity import Hashing
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import cached_pack
from penstock.weights.pack.directory import PackError
from penstock.weights.pack.manifest import Manifest, parse
from penstock.weights.pack.quantising import QuantisedCheckpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import MANIFEST, piece_digest
from safetensor_files import flip

CPU = torch.device("cpu")
KV: dict[str, object] = {
    "device": "cpu",
    "max_length": 256,
    "host_kv_memory": "8MiB",
    "disk_kv_memory": "32MiB",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [3 + (7 * at) % 89 for at in range(100)]


@pytest.fixture(autouse=True)
def _old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as changed long ago: what can be remembered is, and is found again where it must not be."""
    monkeypatch.setattr(identity, "RECENT_NS", -(10**18))
    monkeypatch.setattr(
        BlockStore, "noted", lambda _: b""
    )  # Else what is computed anew depends on how fast things went before.


def tensor_at(model: Path, name: str) -> tuple[Path, int, int]:
    """The file of a tensor, its first byte there, and its bytes."""
    with Checkpoint.open(model) as checkpoint:
        stored = checkpoint._shards.tensors[name]
        return stored.file.path, stored.entry.offset, stored.entry.size


def copied(case: str, path: Path) -> Path:
    shutil.copytree(tiny.checkpoint(case), path)
    return path


# ---- the root of all keys


def settled(config: Config, model: Checkpoint) -> Settled:
    return settle(config, model, CPU, lambda _: None)


def test_every_fact_is_part_of_the_root(tmp_path: Path) -> None:
    """Leave one out, and two of these are the same."""
    model = copied("llama", tmp_path / "model")
    config = Config(model, **{**KV, "kv_directory": tmp_path, "dtype": "float16"})  # type: ignore[arg-type]
    with Checkpoint.open(model) as checkpoint:
        known = settled(config, checkpoint)
        assert known.far is not None
        assert known.far.store_bytes > 0
        roots = {"": root_of(config, checkpoint, known)}
        assert root_of(config, checkpoint, known) == roots[""]
        for name, value in (
            ("block_size", 128),
            ("host_kv_dtype", "fp8"),
            ("attention_policy", "window:4,64"),
            ("prefill_policy", "window:4,64"),
            ("missed_limit", 0.5),
        ):
            roots[name] = root_of(replace(config, **{name: value}), checkpoint, known)  # type: ignore[arg-type]
        roots["dtype"] = root_of(config, checkpoint, replace(known, dtype="bfloat16"))
        for shard in (Shard(0, 2), Shard(1, 2), Shard(0, 3)):
            roots[str(shard)] = root_of(config, checkpoint, replace(known, shard=shard))
        others = list(specs.neighbours(known.spec))
        for number, other in enumerate(others):
            roots[f"spec {number}: {other}"] = root_of(config, checkpoint, replace(known, spec=other))
    file, first, _ = tensor_at(model, "model.norm.weight")
    flip(file, first)
    with Checkpoint.open(model) as checkpoint:
        roots["weights"] = root_of(config, checkpoint, known)
    assert len(others) > 30
    assert len(set(roots.values())) == len(roots) == len(others) + 11


def test_under_a_policy_what_it_reads_is_part_of_the_root(tmp_path: Path) -> None:
    """By which copy of the keys blocks are chosen, and which blocks are chosen from at all."""
    model = copied("llama", tmp_path / "model")
    config = Config(model, **{**KV, "kv_directory": tmp_path, "prefill_policy": "topk:1"})  # type: ignore[arg-type]
    with Checkpoint.open(model) as checkpoint:
        known = settled(config, checkpoint)
        assert known.far is not None
        roots = [root_of(config, checkpoint, known, blocks=blocks) for blocks in (14, 400)]
        roots.append(root_of(replace(config, sketch_bits=8), checkpoint, known, blocks=14))
        roots.append(
            root_of(config, checkpoint, replace(known, far=replace(known.far, tile_tokens=7)), blocks=14)
        )
        roots.append(
            root_of(config, checkpoint, replace(known, far=replace(known.far, chunk_tokens=7)), blocks=14)
        )
        steps = replace(known.limits, max_step_tokens=known.limits.max_step_tokens + 1)
        roots.append(root_of(config, checkpoint, replace(known, limits=steps), blocks=14))
        assert len(set(roots)) == len(roots)
        exact = replace(config, prefill_policy="full")
        known = settled(exact, checkpoint)
        assert root_of(exact, checkpoint, known, blocks=14) == root_of(exact, checkpoint, known, blocks=400)


def test_where_nothing_outlives_the_process_nothing_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "Hashing", lambda *_: pytest.fail("the weights were hashed"))
    kept = {"host_kv_memory": "8MiB", "kv_directory": tmp_path, "cache": tmp_path}
    for more in ({}, kept, kept | {"disk_kv_memory": "32MiB", "kv_store": "off"}):
        with LLM(tiny.checkpoint("llama"), device="cpu", max_length=256, beyond_trained=True, **more) as llm:  # type: ignore[arg-type]
            llm.generate(PROMPT, GREEDY)
            assert llm.generate(PROMPT, GREEDY)[0].cached_tokens > 0
    assert not (tmp_path / identity.MEMORY).exists()


# ---- KV on disk


def answers(model: Path, folder: Path, prompt: Sequence[int] = PROMPT, **more: object) -> Completion:
    """What a process says of a prompt that keeps its KV in `folder`."""
    place = {
        "kv_directory": folder / "kv",
        "cache": folder / "cache",
        "beyond_trained": True,
        "block_size": 16,
    }
    with LLM(model, **{**KV, **place, **more}) as llm:  # type: ignore[arg-type]
        [completion] = llm.generate([list(prompt)], GREEDY)
    return completion


def test_float16_and_bfloat16_share_no_kv(tmp_path: Path) -> None:
    """Whose records have one size."""
    model = tiny.checkpoint("llama")
    first = {dtype: answers(model, tmp_path, dtype=dtype) for dtype in ("float16", "bfloat16")}
    assert [found.cached_tokens for found in first.values()] == [0, 0]
    assert len(list((tmp_path / "kv").iterdir())) == 2
    for dtype, found in first.items():
        again = answers(model, tmp_path, dtype=dtype)
        assert again.tokens == found.tokens
        assert again.cached_disk == 96


def test_dense_weights_and_those_of_few_bits_share_no_kv(tmp_path: Path) -> None:
    model = tiny.checkpoint("llama")
    models = [model]
    for recipe in (Recipe.of("int8", 8), Recipe.of("int4", 8), Recipe.of("int4", 16)):
        models.append(tmp_path / f"{recipe.format} by {recipe.group}")
        with Checkpoint.open(model) as checkpoint:
            quantised = QuantisedCheckpoint(checkpoint, recipe, "float32", CPU)
            write_pack(quantised, models[-1], "float32")
    first = [answers(one, tmp_path) for one in models]
    assert [found.cached_tokens for found in first] == [0] * len(models)
    assert len(list((tmp_path / "kv").iterdir())) == len(models)
    for one, found in zip(models, first, strict=True):
        again = answers(one, tmp_path)
        assert (again.tokens, again.cached_disk) == (found.tokens, 96)


def test_what_a_policy_has_left_out_is_not_given_to_who_reads_everything(tmp_path: Path) -> None:
    model, sparse = (
        tiny.checkpoint("llama"),
        {"attention_policy": "window:1,16", "prefill_policy": "window:1,16"},
    )
    answers(model, tmp_path, **sparse)
    assert answers(model, tmp_path).cached_tokens == 0
    assert answers(model, tmp_path, **sparse).cached_disk == 96


def test_one_bit_in_any_tensor_and_no_kv_is_shared(tmp_path: Path) -> None:
    """The store of each is another; nothing is found there, and what is said is what a fresh run says."""
    model = copied("llama_tied", tmp_path / "model")
    with Checkpoint.open(model) as checkpoint:
        names = sorted(checkpoint._shards.tensors)
    answers(model, tmp_path)
    for count, name in enumerate(names, start=1):
        file, first, size = tensor_at(model, name)
        flip(file, first + size // 2)
        if count % 4:  # An engine for every fourth; for all of them, the name of the store.
            config = Config(
                model, **{**KV, "kv_directory": tmp_path, "beyond_trained": True, "block_size": 16}
            )  # type: ignore[arg-type]
            with Checkpoint.open(model, tmp_path / "cache") as checkpoint:
                root = root_of(config, checkpoint, settled(config, checkpoint))
            assert f"{root.hex()}" not in " ".join(path.name for path in (tmp_path / "kv").iterdir())
        else:
            assert answers(model, tmp_path).cached_tokens == 0
        flip(file, first + size // 2)
    assert answers(model, tmp_path).cached_disk == 96


# ---- packs


def test_one_bit_in_any_tensor_is_another_pack(tmp_path: Path) -> None:
    model = copied("llama", tmp_path / "model")
    with Checkpoint.open(model) as checkpoint:
        names = sorted(checkpoint._shards.tensors)

    def pack() -> Pack:
        with Checkpoint.open(model, tmp_path / "cache") as checkpoint:
            return cached_pack(checkpoint, "float32", tmp_path / "cache", None, lambda _: None)

    seen = set[tuple[str, bytes]]()
    with pack() as found:
        seen.add((found.path.name, found.fingerprint()))
        size = found.manifest.runs[1].size
    for name in names:
        file, first, size = tensor_at(model, name)
        flip(file, first + size - 1, 3)
        with pack() as found, Checkpoint.open(model) as checkpoint:
            seen.add((found.path.name, found.fingerprint()))
            for layout in found.layouts:
                into, expected = (torch.empty(layout.size, dtype=torch.uint8) for _ in range(2))
                read_group(found, layout.id, into, check=True)
                checkpoint.read_piece(layout, 0, expected)
                assert torch.equal(into, expected)
        flip(file, first + size - 1, 3)
    paths, prints = zip(*seen, strict=True)
    assert len(set(paths)) == len(set(prints)) == len(names) + 1


def test_a_pack_is_what_its_manifest_proves(tmp_path: Path) -> None:
    """Who edits a pack and seals its manifest anew does not take over the identity of what was packed."""
    with Checkpoint.open(tiny.checkpoint("llama")) as checkpoint:
        write_pack(checkpoint, tmp_path / "one", "float32")
        write_pack(checkpoint, tmp_path / "two", "float32", store=tmp_path / "elsewhere")
        write_pack(checkpoint, tmp_path / "half", "bfloat16")
    with (
        Pack.open(tmp_path / "one") as one,
        Pack.open(tmp_path / "two") as two,
        Pack.open(tmp_path / "half") as half,
    ):
        assert one.fingerprint() == two.fingerprint() != half.fingerprint()
        before, run = one.fingerprint(), one.manifest.runs[2]
    flip(tmp_path / "one" / "weights.bin", run.offset + 100)
    data = (tmp_path / "one" / "weights.bin").read_bytes()[run.offset : run.end]
    old = parse((tmp_path / "one" / MANIFEST).read_bytes(), "manifest")
    runs = tuple(
        replace(each, digests=piece_digest(data)) if each.id == run.id else each for each in old.runs
    )
    edited = Manifest(old.fingerprint, old.config, old.dtype, old.store, old.files, runs)
    (tmp_path / "one" / MANIFEST).write_bytes(edited.text())
    with Pack.open(tmp_path / "one") as one:
        one.verify()
        assert one.manifest.fingerprint == old.fingerprint
        assert one.fingerprint() != before
        seen = {one.fingerprint()}
        others = list(specs.neighbours(one.spec))
        for other in others:
            one.spec = other
            seen.add(one.fingerprint())
    assert len(seen) == len(others) + 1


def test_a_pack_of_a_model_whose_tokenizer_was_edited(tmp_path: Path) -> None:
    """The cached pack serves the model's own; `penstock pack` does not pass for done what holds the old
    one."""
    model = tmp_path / "model"
    shutil.copytree(SHIPPED_MODEL, model)
    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
        assert not write_pack(checkpoint, tmp_path / "pack", "float32")
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        before = (model / name).read_text(encoding="utf-8")
        (model / name).write_text(json.dumps(json.loads(before) | {"added": 1}), encoding="utf-8")
        with Checkpoint.open(model) as checkpoint, pytest.raises(PackError, match=f"another {name}"):
            write_pack(checkpoint, tmp_path / "pack", "float32")
        (model / name).write_text(before, encoding="utf-8")
    with Checkpoint.open(model) as checkpoint:
        assert not write_pack(checkpoint, tmp_path / "pack", "float32")


def test_the_shipped_model_with_some_rows_edited(tmp_path: Path) -> None:
    """As who patches the rows of a few special tokens does it: same names, same sizes. In memory, and
    streamed from disk. In float32: in bfloat16 a prompt whose KV was found has other roundings than one that
    was computed in other pieces, and nearly equal tokens change places."""
    first, other = tmp_path / "first" / "model", tmp_path / "other" / "model"
    for path in (first, other):
        shutil.copytree(SHIPPED_MODEL, path)
    with Checkpoint.open(first) as checkpoint:
        spec = checkpoint.spec
        embedding = checkpoint._shards.tensors["model.embed_tokens.weight"].entry
    file = other / "model.safetensors"
    width = embedding.size // spec.vocab_size
    with file.open("r+b") as opened:
        for row in range(300, 307):
            opened.seek(embedding.offset + row * width)
            line = bytearray(opened.read(width))
            sign = width // spec.hidden_size
            line[sign - 1 :: sign] = bytes(byte ^ 0x80 for byte in line[sign - 1 :: sign])
            opened.seek(embedding.offset + row * width)
            opened.write(line)
    prompt = [*range(295, 315)] * 6
    small = {"kv_blocks": 24, "max_step_tokens": 64, "max_sequences": 2, "dtype": "float32"}
    alone = {"prefix_cache": False, "host_kv_memory": 0, "disk_kv_memory": None, **small}
    right = {path: answers(path, tmp_path / "alone", prompt, **alone).tokens for path in (first, other)}
    with LLM(first, device="cpu", max_length=256, block_size=16, **small) as llm:  # type: ignore[arg-type]
        budget = llm.memory.budget
    streamed = {"device_memory": budget.activations + budget.kv + int(0.85 * budget.weights), **alone}
    for more in ({}, streamed):
        for path in (first, other, first):
            assert answers(path, tmp_path, prompt, **more).tokens == right[path], (more, path)
    packs = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(packs) == 2
    assert len(list((tmp_path / "kv").iterdir())) == 2


# ---- what is served is what was hashed


@pytest.mark.parametrize("when", ["while it is loaded", "after it was hashed"])
def test_a_model_that_changes_while_it_starts(tmp_path: Path, when: str) -> None:
    model = copied("llama", tmp_path / "model")
    file, first, _ = tensor_at(model, "model.layers.1.mlp.up_proj.weight")
    real, wait = Checkpoint.read_piece, Hashing.result
    done: list[int] = []

    def change() -> None:
        if not done:
            done.append(1)
            flip(file, first)

    def read_piece(self: Checkpoint, *given: object) -> None:
        real(self, *given)  # type: ignore[arg-type]
        change()

    def result(self: Hashing, *given: Any) -> identity.Digests:
        found = wait(self, *given)
        change()
        return found

    place = (
        (Checkpoint, "read_piece", read_piece)
        if when == "while it is loaded"
        else (Hashing, "result", result)
    )
    with patch.object(*place), pytest.raises(CheckpointError, match="changed while it was read"):
        answers(model, tmp_path)
    assert not (tmp_path / "kv").exists() or not any((tmp_path / "kv").iterdir())
    assert answers(model, tmp_path).cached_tokens == 0


def test_weights_are_hashed_while_they_are_loaded(tmp_path: Path) -> None:
    """Their files are looked at before the first byte is loaded, and nobody waits for the digests before the
    last one is."""
    told: list[str] = []

    def noted(owner: type, name: str) -> Any:
        real = getattr(owner, name)

        def call(self: object, *given: object) -> object:
            told.append(name)
            return real(self, *given)

        return patch.object(owner, name, call)

    with noted(Checkpoint, "identify"), noted(Checkpoint, "read_piece"), noted(Hashing, "result"):
        answers(tiny.checkpoint("llama"), tmp_path)
    assert told[0] == "identify"
    assert told.index("result") > max(at for at, name in enumerate(told) if name == "read_piece")


def test_a_store_that_is_written_while_it_is_served_is_checked_again(tmp_path: Path) -> None:
    from penstock.weights.streaming.source import PackSource

    with Checkpoint.open(tiny.checkpoint("llama")) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    source = PackSource(Pack.open(tmp_path / "pack"))
    layout, run = source.pack.layouts[2], source.pack.manifest.runs[2]
    into = torch.empty(run.length, dtype=torch.uint8)
    source.read(layout, 0, into, True)
    source.read(layout, 0, into, False)
    flip(tmp_path / "pack" / "weights.bin", run.offset)
    with pytest.raises(CheckpointError, match="is damaged"):
        source.read(layout, 0, into, False)
    source.close()


# ---- graphs, kernels and whatever else an engine makes: in one process


def test_two_models_of_one_shape_beside_each_other(tmp_path: Path) -> None:
    """Neither says a word of the other's: what is kept in a process is kept by shape, and holds no
    weights."""
    one, other = copied("llama", tmp_path / "one"), copied("llama", tmp_path / "other")
    file, first, size = tensor_at(other, "model.embed_tokens.weight")
    for at in range(first, first + size, 4):
        flip(file, at + 3, 7)  # The sign of each.
    settings = {"device": "cpu", "max_length": 256, "beyond_trained": True}
    with LLM(one, **settings) as llm, LLM(other, **settings) as beside:  # type: ignore[arg-type]
        together = [each.generate([PROMPT], GREEDY)[0].tokens for each in (llm, beside, llm, beside)]
    alone = []
    for path in (one, other):
        with LLM(path, **settings) as llm:  # type: ignore[arg-type]
            alone.append(llm.generate([PROMPT], GREEDY)[0].tokens)
    assert together == alone * 2
    assert alone[0] != alone[1]
