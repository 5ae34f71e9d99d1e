"""GGUF files as models: the numbers that blocks stand for, and the tokens of the models that they are."""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

import forks
import gguf_bytes
import gguf_files
import native_ways
import tiny
from gguf_files import WIDE, Made, Writing, source
from members import pass_of
from penstock.api.llm import LLM
from penstock.arch.formats.format import matrix
from penstock.arch.formats.gguf import BLOCK_TYPES, FORMATS, ByType, Unpacked
from penstock.arch.formats.gguf_blocks import QUANTISED, RESTING, TYPES
from penstock.arch.formats.recipe import Recipe, name_of
from penstock.arch.layout import GroupKind, group_layouts
from penstock.arch.rope import inverse_frequencies
from penstock.arch.spec import RopeKind, RopeSpec
from penstock.base.errors import CheckpointError, PenstockError
from penstock.cli.commands.plan import open_model
from penstock.memory.disk import DiskFile
from penstock.ops.embedding import look_up
from penstock.ops.kernels import plain_torch
from penstock.ops.matrix import Matrix
from penstock.ops.native import blocks as native
from penstock.ops.native import layers
from penstock.ops.native.few_bits import find_library
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.gguf import HeadRows
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.gguf.tokenizer import read_gguf_tokenizer
from penstock.weights.pack.manifest import seal
from penstock.weights.pack.quantising import QuantisedCheckpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import STORE
from penstock.weights.streaming.source import RandomSource
from penstock.weights.streaming.stream import group_views

GREEDY = SamplingParams(temperature=0, max_tokens=6)
NATIVE = [kind for kind in QUANTISED if FORMATS[kind].native == "blocks"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
EDGES = np.array([0, 65504, -65504, 6e-8, -6e-8, 1, -1, 0.1], "<f2")


def blocks(kind: str, count: int = 512) -> np.ndarray:
    """Any blocks, with scales that are the least, the largest, negative and zero."""
    seed, block = np.random.default_rng(3), QUANTISED[kind]
    drawn = seed.integers(0, 256, (count, block.size), dtype=np.uint8)
    drawn[:8, max((0, *block.halves)) + 2 : 12] = 255
    drawn[8:16, max((0, *block.halves)) + 2 : 12] = 0
    for number, at in enumerate(block.halves):
        scales = seed.standard_normal(count).astype("<f2")
        scales[: 64 : number + 1] = np.resize(EDGES, len(scales[: 64 : number + 1]))
        drawn[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        drawn[:, 0] = np.resize(np.arange(253), count)
    return drawn


def resting(kind: str, rows: np.ndarray, *, cut: range | None = None) -> Matrix:
    """The matrix whose rows have these bytes, as it rests, or some columns of it."""
    block = QUANTISED[kind]
    height, width = len(rows), rows.shape[1] // block.size * block.values
    sources = [matrix("model.layers.0.mlp.down_proj.weight", height, width, columns=cut)]
    format, parts = FORMATS[kind].cut(sources), {}
    for stored in format.stored("float32", sources):
        assert stored.repack is not None
        part = stored.repack([torch.from_numpy(rows)] * len(stored.sources)).contiguous()
        assert (tuple(part.shape), part.dtype) == (stored.shape, getattr(torch, stored.dtype))
        parts[stored.name] = part
    return Matrix(format, (height, width if cut is None else len(cut)), parts)


def same_bits(mine: torch.Tensor, theirs: np.ndarray) -> bool:
    """Whether numbers have the same bits, but for the sign of zeros: that library has no negative one of four
    bits."""
    mine, theirs = mine + 0.0, theirs + 0.0
    return bool(np.array_equal(mine.contiguous().numpy().view(np.int32), theirs.view(np.int32)))


@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_are_those_of_the_library(kind: str) -> None:
    block = QUANTISED[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (block.values, block.size)
    rows = blocks(kind).reshape(64, -1)
    theirs = dequantize(rows, gguf.GGMLQuantizationType[kind])
    whole = resting(kind, rows).dequantised(torch.empty(0))
    assert same_bits(whole, theirs)
    for cut in (range(0, 128), range(40, 200), range(224, theirs.shape[1])):
        assert same_bits(resting(kind, rows, cut=cut).dequantised(torch.empty(0)), theirs[:, cut].copy())
    some = resting(kind, rows).dequantised(torch.empty(0), slice(3, 9))
    assert torch.equal(some, whole[3:9])


def test_types_have_the_numbers_of_the_library() -> None:
    """Kernels count the types that rest in blocks in this order."""
    kinds = ["Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
    assert list(BLOCK_TYPES) == kinds
    assert all(gguf.GGMLQuantizationType(number).name == one.name for number, one in TYPES.items())


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("kernels", [False, True])
def test_rows_of_an_embedding_are_those_of_the_dense_one(kind: str, kernels: bool) -> None:
    """To the bit, in any order and of any rank, as they were where embeddings rested dense."""
    rows = gguf_files.draw(kind, 96, 512, 0.1, np.random.default_rng(0))
    name, tokens = "model.embed_tokens.weight", torch.tensor([7, 0, 31, 7, 95, 30, 1, 50, 31, 94])
    format = ByType(types=((kind, (name.removesuffix(".weight"),)),)).of(name)
    assert format == FORMATS[kind]
    for part in (range(96), range(31, 96)):
        sources = [matrix(name, 96, 512, rows=part)]
        cut, mine = format.cut(sources), tokens.clamp(part.start, part.stop - 1) - part.start
        parts = {one.name: one.repack([torch.from_numpy(rows)] * len(one.sources)).contiguous()  # type: ignore[misc]
                 for one in cut.stored("float32", sources)}  # fmt: skip
        weight = Matrix(cut, (len(part), 512), parts)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            (dense,) = Unpacked(inner=format).cut(sources).stored(str(dtype).removeprefix("torch."), sources)
            assert dense.repack is not None
            with plain_torch(not kernels):
                found, few = look_up(mine, weight, dtype), look_up(mine[2:6], weight, dtype)
            want = dense.repack([torch.from_numpy(rows)])[mine]
            assert torch.equal(found, want)
            assert torch.equal(few, want[2:6])


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_embeddings_rest_in_their_blocks(name: str, tmp_path: Path) -> None:
    made = gguf_files.write(source(name), tmp_path, Writing(mixed))
    with Checkpoint.open(made.file) as checkpoint:
        embedding = group_layouts(checkpoint.spec, checkpoint.names, "bfloat16")[0]
        resting, (height, width) = RESTING["Q6_K"], embedding.matrices[0].shape
        assert embedding.matrices[0].format.kernels == "blocks"
        assert embedding.fields[0].size == height * resting.row_bytes(-(-width // resting.unit))
    resident = pass_of(made.file, 0)
    assert all(map(torch.equal, resident, pass_of(made.file, 0, part=0.4)))
    for ranks in (0, 2):
        mine, theirs = pass_of(made.file, ranks, kernels=False), pass_of(made.dense, ranks, kernels=False)
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("kind", ["Q6_K", "MXFP4", "Q4_0"])
def test_embeddings_are_unpacked(kind: str) -> None:
    rows = gguf_files.draw(kind, 2050, 512, 0.1, np.random.default_rng(0))
    sources = [matrix("model.embed_tokens.weight", 2050, 512, rows=range(1, 2049))]
    (stored,) = Unpacked(inner=FORMATS[kind]).cut(sources).stored("bfloat16", sources)
    assert stored.repack is not None
    theirs = torch.from_numpy(dequantize(rows, gguf.GGMLQuantizationType[kind])[1:2049])
    assert torch.equal(stored.repack([torch.from_numpy(rows)]), theirs.bfloat16())


@pytest.mark.parametrize("kind", NATIVE)
def test_blocks_beyond_float16_are_refused(kind: str) -> None:
    """By the numbers that they stand for: a large scale alone is none."""
    rows = gguf_files.draw(kind, 4, 512, 0.1, np.random.default_rng(0))
    block, sources = QUANTISED[kind], [matrix("model.layers.0.mlp.down_proj.weight", 4, 512)]
    for large in (20, 60000):
        every = rows.reshape(-1, block.size).copy()
        for at in block.halves:
            every[:, at : at + 2] = np.array([large], "<f2").view(np.uint8)
        every = every.reshape(rows.shape)
        beyond = bool(np.abs(dequantize(every, gguf.GGMLQuantizationType[kind])).max() > 65504)
        assert beyond or large == 20
        for dtype in ("float16", "bfloat16", "float32"):
            (stored,) = FORMATS[kind].cut(sources).stored(dtype, sources)
            assert stored.repack is not None
            if beyond and dtype == "float16":
                with pytest.raises(CheckpointError, match=r"down_proj.* numbers of float16 end at 65,504"):
                    stored.repack([torch.from_numpy(every)])
            else:
                stored.repack([torch.from_numpy(every)])


def outputs(path: Path, **settings: object) -> list[object]:
    with LLM(path, device="cpu", dtype="float32", max_length=64, **settings) as llm:  # type: ignore[arg-type]
        return [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts()[1:4], GREEDY)]


def mixed(name: str) -> str:
    """A mix of types, as most files have."""
    if name.startswith(("token_embd", "output.")):
        return "Q6_K"
    return "Q6_K" if "attn_v" in name or "ffn_down" in name else "F16" if "blk.1.attn_k" in name else "Q4_K"


def expect_same(made: Made) -> None:
    """Tokens and log-probabilities are those of the dense model."""
    same = outputs(made.dense)
    assert outputs(made.file, kernels=False) == same
    for (mine, its), (theirs, known) in zip(outputs(made.file), same, strict=True):
        assert mine == theirs
        assert its == pytest.approx(known, abs=1e-4)


APART = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""Whose blocks are made of what other types' are; or whole models have them below."""


@pytest.mark.parametrize(
    "kind", [kind for kind in ("F32", "F16", "BF16", *QUANTISED) if tiny.THOROUGH or kind not in APART]
)
def test_tokens_of_types(kind: str, tmp_path: Path) -> None:
    expect_same(gguf_files.write(source("llama_biases"), tmp_path, Writing(kind)))


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_all_layers_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step in one call has the bits of one in two calls a layer."""
    file, passed = gguf_files.write(source(name), tmp_path, Writing("Q4_1")).file, list[int]()
    once = layers.pass_layers
    monkeypatch.setattr(layers, "pass_layers", lambda *given: (passed.append(1), once(*given))[1])
    at_once = outputs(file)
    assert passed or find_library()
    monkeypatch.setattr(layers, "stack", lambda *_: None)
    del passed[:]
    assert outputs(file) == at_once
    assert not passed


FAMILIES = (
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe_dense_layer",
    *(("llama_tied", "qwen3_moe_normalised") if tiny.THOROUGH else ()),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_families(name: str, tmp_path: Path) -> None:
    expect_same(gguf_files.write(source(name), tmp_path, Writing(mixed)))


@pytest.mark.parametrize("writing", [Writing(mixed, split=4), Writing("Q8_0", fused=True),
                                     Writing("Q4_K", alignment=256)],
                         ids=["split", "fused", "aligned"])  # fmt: skip
def test_tokens_of_layouts(writing: Writing, tmp_path: Path) -> None:
    expect_same(gguf_files.write(source("llama"), tmp_path, writing))


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    expect_same(gguf_files.write(source("mixtral"), tmp_path, Writing("Q4_K", apart=True)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in ("Q8_0", "Q4_1")),
        *(("mixtral", kind) for kind in ("Q4_K", "MXFP4")),
        *(("llama", kind) for kind in ("Q4_K", "MXFP4") if tiny.THOROUGH),
    ],
)
def test_streamed_and_ranks(name: str, kind: str, tmp_path: Path) -> None:
    # A rank's columns begin inside of a block: 384 of 768, and 128 of 256.
    made = gguf_files.write(source(name), tmp_path, Writing(kind))
    resident = pass_of(made.file, 0, kernels=False)
    streamed = pass_of(made.file, 0, part=0.4, kernels=False)
    assert all(torch.equal(*both) for both in zip(resident, streamed, strict=True))
    for ranks, mine in ((0, resident), (2, pass_of(made.file, 2, kernels=False))):
        theirs = pass_of(made.dense, ranks, kernels=False)
        assert all(torch.equal(*both) for both in zip(mine, theirs, strict=True))


def test_experts_of_several_types(tmp_path: Path) -> None:
    """Layers differ in types, and so in size: slots are of the largest, plans add up by tensor."""

    def of(name: str) -> str:
        return mixed(name) if "blk.0" in name else "Q5_K" if "ffn_down" in name else "Q2_K"

    made = gguf_files.write(source("mixtral"), tmp_path, Writing(of))
    with Checkpoint.open(made.file) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        sizes = {one.size for one in layouts if one.id.kind is GroupKind.EXPERT}
        _, spec, names = open_model(str(made.file))
        assert group_layouts(spec, names, "float32") == layouts
    assert len(sizes) == 2
    want = pass_of(made.dense, 0, kernels=False)
    for part in (0.3, 0.5, 0.8):
        assert all(map(torch.equal, pass_of(made.file, 0, part=part, kernels=False), want))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe_normalised"])
def test_packs(name: str, tmp_path: Path) -> None:
    made = gguf_files.write(source(name), tmp_path, Writing(mixed))
    with Checkpoint.open(made.file) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
        assert not write_pack(checkpoint, tmp_path / "pack", "float32")
        print_ = checkpoint.fingerprint()
    with Checkpoint.open(made.file) as again:
        assert again.fingerprint() == print_
    assert outputs(tmp_path / "pack", kernels=False) == outputs(made.dense)


def test_packs_of_another_order_are_refused(tmp_path: Path) -> None:
    """Packs once had blocks as in the file, in as many bytes: only the name of the part tells them apart."""
    made = gguf_files.write(source("llama"), tmp_path, Writing("Q4_K"))
    with Checkpoint.open(made.file) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    path = tmp_path / "pack" / "manifest.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    fields = [field for group in body["groups"] for field in group["fields"]]
    assert any(field["name"].endswith(".repacked") for field in fields)
    for field in fields:
        field["name"] = field["name"].replace(".repacked", ".blocks")
    path.write_bytes(seal(body))
    with pytest.raises(CheckpointError, match="pack the model again"), Pack.open(tmp_path / "pack"):
        pass


def test_threads_make_a_field_once(tmp_path: Path) -> None:
    """Those that want other pieces of it wait for the one that makes it, and make it anew if that failed."""
    made = gguf_files.write(source("llama"), tmp_path, Writing("Q6_K"))
    with Checkpoint.open(made.file) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        layout = next(one for one in layouts if one.matrices and one.fields[-1].repack is not None)
        field, calls = layout.fields[-1], list[int]()

        def slowly(wholes: Sequence[torch.Tensor | None]) -> torch.Tensor:
            calls.append(1)
            time.sleep(0.1)
            if len(calls) == 1:
                raise CheckpointError("once")
            assert field.repack is not None
            return field.repack(wholes)

        slow = replace(layout, fields=(replace(field, repack=slowly),))
        pieces = [torch.empty(field.size, dtype=torch.uint8) for _ in range(4)]

        def read(piece: torch.Tensor) -> bool:
            try:
                checkpoint.read_piece(slow, field.offset, piece)
            except CheckpointError:
                return False
            return True

        with ThreadPoolExecutor(4) as threads:
            assert sorted(threads.map(read, pieces)) == [False, True, True, True]
        assert len(calls) == 2
        assert not checkpoint._one_at_a_time
        alone = torch.empty(field.size, dtype=torch.uint8)
        checkpoint.read_piece(layout, field.offset, alone)
        assert sum(torch.equal(piece, alone) for piece in pieces) >= 3


def test_packs_have_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    """Also its templates, and its sampling."""
    more = {"tokenizer.chat_template": "{{ messages }}", "general.sampling.top_k": 7}
    values = gguf_bytes.LLAMA | gguf_bytes.TOKENS | more
    path = gguf_bytes.write(tmp_path / "m.gguf", values, gguf_bytes.tensors())
    with Checkpoint.open(path) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
        with Pack.open(tmp_path / "pack") as opened:
            assert opened.generation == checkpoint.generation
            assert opened.generation.top_k == 7
    made = read_gguf_tokenizer(path)
    assert made is not None
    beside = {name: (tmp_path / "pack" / name).read_text() for name in TOKENIZER_FILES}
    assert beside["tokenizer.json"] == made.tokenizer
    assert json.loads(beside["tokenizer_config.json"]) == made.config
    assert made.config["chat_template"]


def test_a_file_is_quantised_as_a_directory_is(tmp_path: Path) -> None:
    made = gguf_files.write(source("llama"), tmp_path, Writing("F16"))
    packs = {made.file: tmp_path / "of file", made.dense: tmp_path / "of directory"}
    for model, pack in packs.items():
        with Checkpoint.open(model) as checkpoint:
            few = QuantisedCheckpoint(checkpoint, Recipe.of("int4", 32), "float32", torch.device("cpu"))
            write_pack(few, pack, "float32")
        with Pack.open(pack) as opened:
            assert name_of(opened.spec.format) == "int4"
    first, second = ((pack / STORE).read_bytes() for pack in packs.values())
    assert first == second


def test_files_of_other_metadata_are_other_models(tmp_path: Path) -> None:
    prints = set[bytes]()
    for base in (10000.0, 500000.0):
        writing = Writing("Q8_0", {"llama.rope.freq_base": base})
        made = gguf_files.write(source("llama"), tmp_path / str(base), writing)
        with Checkpoint.open(made.file) as checkpoint:
            prints.add(checkpoint.fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if tiny.THOROUGH or kind not in APART])
def test_random_weights_are_numbers(kind: str, tmp_path: Path) -> None:
    made = gguf_files.write(source("llama"), tmp_path, Writing(kind))
    shape = Shape.open(made.file)
    for layout in group_layouts(shape.spec, shape.names, "float32"):
        whole = torch.empty(layout.size, dtype=torch.uint8)
        RandomSource("float32").read(layout, 0, whole, False)
        for one in group_views(layout, whole).matrices.values():
            numbers = one.dequantised(torch.empty(0))
            assert numbers.isfinite().all()
            assert 1e-6 < numbers.abs().mean() < 10


@pytest.mark.parametrize("kind", NATIVE)
def test_kernels_of_cpus(kind: str) -> None:
    if find_library():
        pytest.skip("no C compiler")
    rows = blocks(kind).reshape(64, -1)
    for cut in (None, range(40, 200)):
        weight = resting(kind, rows, cut=cut)
        plain = weight.dequantised(torch.empty(0))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            made = torch.empty(30, weight.shape[1], dtype=dtype)
            native.dequantise(weight, slice(20, 50), made)
            assert torch.equal(made, plain[20:50].to(dtype))
    drawn = gguf_files.draw(kind, 70, 1024, 0.1, np.random.default_rng(1))
    for cut in (None, range(300, 900)):
        weight = resting(kind, drawn, cut=cut)
        plain = weight.dequantised(torch.empty(0)).double()
        for count in (1, 3, 16):
            x, bias = torch.randn(count, plain.shape[1]), torch.randn(70)
            assert native.suits(x, weight)
            product = native.few_rows(x, weight, bias)
            exact = x.double() @ plain.t() + bias
            torch.testing.assert_close(product.double(), exact, atol=2e-5, rtol=1e-5)
            assert torch.equal(native.few_rows(x[:1], weight, bias), product[:1])
            onto = torch.ones(count, 100)[:, :70]
            native.few_rows(x, weight, out=onto, adds=True)
            torch.testing.assert_close(onto.double(), exact - bias + 1, atol=2e-5, rtol=1e-5)
    assert not native.suits(torch.randn(17, 1024), weight)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native-blocks")


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("way", ["no_avx512", "portable"])
def test_kernels_of_other_cpus(way: str, kind: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_ways.use(way, kept, monkeypatch)
    test_kernels_of_cpus(kind)


def test_sums_do_not_depend_on_threads() -> None:
    if find_library():
        pytest.skip("no C compiler")
    weight = resting("Q4_K", gguf_files.draw("Q4_K", 3000, 512, 0.1, np.random.default_rng(1)))
    x, before = torch.randn(3, 512), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = native.few_rows(x, weight)
        torch.set_num_threads(3)
        assert torch.equal(native.few_rows(x, weight), alone)
    finally:
        torch.set_num_threads(before)


def test_heads_are_read_from_any_byte(tmp_path: Path) -> None:
    """Pieces of a group begin and end within heads, and within rows."""
    begin, row, dim, heads = 5, 6, 4, 3
    rows = np.random.default_rng(8).integers(0, 256, (heads * dim, row), dtype=np.uint8)
    path = tmp_path / "rows"
    path.write_bytes(bytes(begin) + gguf_files.turned(rows, dim).tobytes())
    with DiskFile(path) as file:
        reader = HeadRows(file, begin, row, dim)
        for start, stop in ((0, rows.size), (7, 9), (20, 50), (25, 72), (48, 49)):
            read = bytearray(stop - start)
            reader.read_into(memoryview(read), begin + start)
            assert read == rows.tobytes()[start:stop], (start, stop)


def test_rope_of_llama_3(tmp_path: Path) -> None:
    """Files have the divisors that Llama 3.1's scaling leads to, and not its numbers."""
    checkpoint = source("llama_llama3")
    rope = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]
    plain = RopeSpec(rope["rope_theta"], WIDE["head_dim"])
    scaled = replace(plain, kind=RopeKind.LLAMA3, factor=8.0, original_length=64)
    divisors = np.array(inverse_frequencies(plain)) / np.array(inverse_frequencies(scaled))
    more = {"rope_freqs.weight": divisors.astype(np.float32)}
    made = gguf_files.write(checkpoint, tmp_path, Writing("Q8_0", tensors=more))
    expect_same(made)
    with Checkpoint.open(made.file) as opened:
        assert opened.spec.rope == replace(scaled, low_freq_factor=1.0, high_freq_factor=4.0)


def matrices(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        checkpoint.verify(layouts)
        for layout in layouts:
            checkpoint.read_piece(layout, 0, torch.empty(layout.size, dtype=torch.uint8))


def broken(path: Path) -> str:
    """What is said of a file that is read whole."""
    with pytest.raises(PenstockError) as caught:
        matrices(path)
    said = str(caught.value)
    assert str(path) in said
    assert len(said) < 400
    assert "\n" not in said
    return said


def changed(name: str, **to: object) -> list[gguf_bytes.Tensor]:
    return [replace(one, **to) if one.name == name else one for one in gguf_bytes.tensors()]  # type: ignore[arg-type]


SMALL, More = gguf_bytes.tensors(), gguf_bytes.Tensor
STRANGE: list[tuple[list[gguf_bytes.Tensor], str]] = [
    (SMALL[:-1], "lacks tensor blk.0.ffn_down.weight that its metadata calls for"),
    ([*SMALL, More("blk.0.attn_sinks.weight", (2,), 0, bytes(8))], "holds tensor 'blk.0.att"),
    ([*SMALL, More("blk.0.ffn_gate_exps.weight", (8,), 0, bytes(32))], "holds tensor 'blk.0.ffn"),
    (changed("blk.0.attn_q.weight", extents=(8, 4), data=bytes(128)), "blk.0.attn_q.weight has shape [4, 8]"),
    (changed("blk.0.attn_k.weight", extents=(8, 6), data=bytes(192)), "has 6 rows, which are no heads"),
    (changed("output_norm.weight", extents=(32,), kind=8, data=bytes(34)), "is [32] of Q8_0; supported: F32"),
    (changed("blk.0.ffn_up.weight", extents=(64, 16), kind=8, data=bytes(1088)),
     "tensor blk.0.ffn_up.weight has shape [16, 68]; its metadata calls for [16, 34]"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "said"), STRANGE)
def test_tensors_that_do_not_fit(tensors: list[gguf_bytes.Tensor], said: str, tmp_path: Path) -> None:
    assert said in broken(gguf_bytes.write(tmp_path / "m.gguf", gguf_bytes.LLAMA, tensors))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "Q6_K", "MXFP4", "Q4_1"])
@pytest.mark.parametrize("tensor", ["blk.1.ffn_down.weight", "token_embd.weight"])
def test_scales_that_are_no_numbers(kind: str, tensor: str, tmp_path: Path) -> None:
    made = gguf_files.write(source("llama"), tmp_path, Writing(kind))
    place = {one.name: one for one in gguf.GGUFReader(made.file).tensors}[tensor].data_offset
    with made.file.open("r+b") as opened:
        opened.seek(
            place + 5 * QUANTISED[kind].size + QUANTISED[kind].halves[-1] if kind != "MXFP4" else place
        )
        opened.write(b"\xff" if kind == "MXFP4" else b"\x00\x7e")
    said = broken(made.file)
    assert f"tensor {tensor}" in said
    assert "no numbers" in said


def test_a_directory_of_gguf_files(tmp_path: Path) -> None:
    gguf_bytes.write(tmp_path / "b.gguf", gguf_bytes.LLAMA, SMALL)
    with pytest.raises(CheckpointError, match=r"has no config.json; to load a GGUF file, give it .*b\.gguf"):
        Checkpoint.open(tmp_path)


def test_ranks_as_processes(tmp_path: Path) -> None:
    made = gguf_files.write(source("llama"), tmp_path, Writing(mixed))
    ranks = outputs(made.file, tensor_parallel=2, kernels=False)
    assert ranks == outputs(made.dense, tensor_parallel=2, kernels=False)


def test_a_lone_file_is_a_model_for_commands(tmp_path: Path) -> None:
    made = gguf_files.write(source("llama"), tmp_path, Writing("Q4_K"))
    command = [sys.executable, "-m", "penstock"]
    packed = forks.run([*command, "pack", str(made.file)], forks.LoadedPopen, text=True)
    assert packed.returncode == 0, packed.stderr
    assert "model.gguf.pack: 6 groups" in packed.stdout
    planned = forks.run([*command, "plan", str(made.file), "--context", "128"], forks.LoadedPopen, text=True)
    assert planned.stdout.startswith("model.gguf: llama, 2 layers")
    run = [*command, "run", str(made.file), "--device", "cpu", "--max-tokens", "2"]
    asked = forks.run([*run, "hello"], forks.LoadedPopen, text=True)
    assert "no tokenizer" in asked.stderr
