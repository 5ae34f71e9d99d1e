"""Headers of GGUF files, sound, broken and hostile: read rightly, or refused in one line; what they stand for
as config."""

import random
import struct
import time
import tracemalloc
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import gguf_bytes
from gguf_bytes import LLAMA, TOKENS, As, Tensor, file, refusal, tensors, write
from penstock.api.text.tokenizer import Tokenizer
from penstock.arch.families import TensorNames, read_spec
from penstock.arch.formats.gguf import ByType
from penstock.arch.spec import RopeKind
from penstock.base.errors import PenstockError, UnsupportedModelError
from penstock.cli.commands.plan import open_model
from penstock.memory.disk import DiskFile
from penstock.weights.checkpoint.generation import read_generation
from penstock.weights.gguf.config import read_gguf_config, read_gguf_generation
from penstock.weights.gguf.container import MAX_STRINGS, read_header
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.gguf.names import Naming

BLOCK = Tensor("blk.0.ffn_up.weight", (256, 2), 12, bytes(288))


def config(path: Path) -> Mapping[str, object]:
    with GGUFFiles(path) as files:
        return read_gguf_config(files)


def test_sound_header(tmp_path: Path) -> None:
    values = {
        "a": 7, "b": As(1, -3), "c": 0.5, "d": True, "e": "text", "f": ["x", "", "\u00e9"], "g": [1, 2],
        "h": As(12, 1e-9), "i": As(11, -(2**40)), "j": As(10, 2**40),
    }  # fmt: skip
    path = write(tmp_path / "m.gguf", values, [Tensor("t", (2,), 0, bytes(8)), BLOCK])
    with DiskFile(path) as opened:
        header = read_header(opened)
    assert dict(header.metadata) == {
        "a": 7, "b": -3, "c": 0.5, "d": True, "e": "text", "f": [b"x", b"", "\u00e9".encode()],
        "g": array("I", [1, 2]), "h": 1e-9, "i": -(2**40), "j": 2**40,
    }  # fmt: skip
    first, second = header.tensors
    assert (first.shape, first.size, first.type.name) == ((2,), 8, "F32")
    assert (second.shape, second.stored, second.size) == ((2, 256), (2, 144), 288)
    assert (second.offset - first.offset, second.offset + second.size) == (32, path.stat().st_size)


def string(length: int) -> bytes:
    """A pair of which the string has that length."""
    return gguf_bytes.text("k") + struct.pack("<IQ", 8, length)


def head(*, keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, keys) + rest


def array_of(kind: int, count: int, rest: bytes = b"") -> bytes:
    return head(keys=1, rest=gguf_bytes.text("k") + struct.pack("<IIQ", 9, kind, count) + rest)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "other": (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
    "version 1": (file({}, version=1), "version 1; supported"),
    "version 9": (file({}, version=9), "version 9; supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (file({}, counts=(2**40, None)), "1,099,511,627,776 tensors, and"),
    "more tensors": (file({}, counts=(3, None)), "cut short"),
    "many keys": (file({}, counts=(None, 2**63)), "keys of metadata, and"),
    "more keys": (file({"a": 1}, counts=(None, 40)), "key '' is there twice"),
    "long key": (head(keys=1, rest=struct.pack("<Q", 2**40)), "would have 1,099,511,627,776 bytes"),
    "key is no text": (file([(b"\xff\xfe", 1)]), "not UTF-8"),  # type: ignore[list-item]
    "key twice": (file([("a", 1), ("a", 2)]), "key 'a' is there twice"),
    "unknown type of value": (head(keys=1, rest=gguf_bytes.text("k") + struct.pack("<I", 77)), "type 77"),
    "long string": (head(keys=1, rest=string(2**62)), "key 'k' would end at"),
    "long array": (array_of(4, 2**61), "key 'k' would end at"),
    "array of arrays": (array_of(9, 2), "array of arrays"),
    "many strings": (array_of(8, MAX_STRINGS + 1), "strings in arrays"),
    "more strings": (array_of(8, 1000, gguf_bytes.text("x") * 9), "key 'k' would end at"),
    "a string too long": (array_of(8, 2, struct.pack("<Q", 2**50)), "key 'k' would end at"),
    "alignment 0": (file({"general.alignment": 0}), "general.alignment is 0"),
    "alignment 48": (file({"general.alignment": 48}), "general.alignment is 48"),
    "alignment is text": (file({"general.alignment": "32"}), "general.alignment is '32'"),
    "no extents": (file({}, [Tensor("t", (), 0, b"")]), "tensor 't' has 0 extents"),
    "five extents": (file({}, [Tensor("t", (1,) * 5, 0, bytes(4))]), "tensor 't' has 5 extents"),
    "extent 0": (file({}, [Tensor("t", (0, 4), 0, b"")]), "tensor 't' has extents [0, 4]"),
    "extents overflow": (file({}, [Tensor("t", (2**40, 2**40), 0, b"")]), "tensor 't' has extents"),
    "unknown type": (file({}, [Tensor("t", (32,), 99, bytes(32))]), "tensor 't' has type 99, which"),
    "unread type": (file({}, [Tensor("t", (256,), 22, bytes(82))]), "tensor 't' has type 22 (IQ2_S), which"),
    "uneven rows": (file({}, [replace(BLOCK, extents=(255, 2))]), "rows of 255 numbers; blocks of Q4_K"),
    "twice": (file({}, [BLOCK, BLOCK]), "tensor 'blk.0.ffn_up.weight' is there twice"),
    "overlap": (file({}, [BLOCK, Tensor("t", (8,), 0, bytes(32), offset=256)]), "tensor 't' overlaps"),
    "not aligned": (file({}, [Tensor("t", (8,), 0, bytes(40), offset=8)]), "tensor 't' begins at byte"),
    "beyond": (file({}, [Tensor("t", (8,), 0, b"", offset=2**60)]), "tensor 't' ends at"),
    "cut": (file({}, [BLOCK])[:-1], "tensor 'blk.0.ffn_up.weight' ends at"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(case: str, tmp_path: Path) -> None:
    data, said = BROKEN[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        message = refusal(lambda: GGUFFiles(path))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert said in message
    assert str(path) in message
    if "type" in case and "value" not in case:
        assert "supported: F32, F16, BF16, Q4_0" in message


def test_files_cut_anywhere(tmp_path: Path) -> None:
    data = file(LLAMA | TOKENS, tensors())
    path = tmp_path / "model.gguf"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert str(path) in refusal(lambda: GGUFFiles(path))


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    data, draw = file(LLAMA | TOKENS, tensors()), random.Random(4)
    path, ends = tmp_path / "model.gguf", data.index(b"output_norm")
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            changed[draw.randrange(4, ends)] = draw.choice([0, 1, 255, draw.randrange(256)])
        path.write_bytes(changed)
        with suppress(PenstockError):
            read_spec(config(path), str(path))
            Tokenizer.from_model(path)


def test_large_vocabularies_are_read_fast(tmp_path: Path) -> None:
    words = [f"token {number}" for number in range(300_000)]
    path = write(
        tmp_path / "m.gguf", {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": [1] * 300_000}
    )
    best = min(_seconds(path) for _ in range(3))
    assert best < 1


def _seconds(path: Path) -> float:
    began = time.process_time()
    with GGUFFiles(path) as files:
        assert len(files.metadata["tokenizer.ggml.tokens"]) == 300_000  # type: ignore[arg-type]
    return time.process_time() - began


def split(folder: Path, **changed: object) -> list[Path]:
    """A model in three files."""
    paths = []
    for number in range(3):
        own: dict[str, object] = {"split.no": number, "split.count": 3, "split.tensors.count": 11}
        own = {**(LLAMA if number == 0 else {}), **own, **(changed if number == 1 else {})}
        paths.append(write(folder / f"m-{number + 1:05}-of-00003.gguf", own, tensors()[number::3]))
    return paths


def test_split_files(tmp_path: Path) -> None:
    first, second, third = split(tmp_path)
    with GGUFFiles(first) as files:
        assert len(files.tensors) == 11
        assert [one.path for one in files.files] == [first, second, third]
    assert "give the first, m-00001-of-00003.gguf" in refusal(lambda: GGUFFiles(second))
    third.rename(tmp_path / "gone")
    assert f"{third} does not exist" in refusal(lambda: GGUFFiles(first))
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (tmp_path / "gone").rename(outside / third.name)
    third.symlink_to(outside / third.name)
    assert f"{third} is a link" in refusal(lambda: GGUFFiles(first))
    other = write(tmp_path / "one.gguf", {"split.count": 2, "split.no": 0})
    assert "name them NAME-00001-of-00002.gguf" in refusal(lambda: GGUFFiles(other))


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"split.no": 0}, "is not file 2 of 3"), ({"split.count": 4}, "is not file 2 of 3"),
     ({"split.no": As(6, 1.0)}, "split.no is 1.0")],
)  # fmt: skip
def test_split_files_that_do_not_belong_together(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    first = split(tmp_path, **changed)[0]
    assert said in refusal(lambda: GGUFFiles(first))
    write(tmp_path / "m-00002-of-00003.gguf", {"split.no": 1, "split.count": 3}, tensors()[1::3][:-1])
    assert "have 11 tensors, but they have 10" in refusal(lambda: GGUFFiles(first))
    write(tmp_path / "m-00002-of-00003.gguf", {"split.no": 1, "split.count": 3}, tensors()[:4])
    assert "is in both" in refusal(lambda: GGUFFiles(first))


def test_what_is_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    blob = write(tmp_path / "sha256-0123", LLAMA)
    (tmp_path / "other").write_bytes(b"GGU")
    assert is_gguf(blob)
    assert is_gguf(tmp_path / "missing.gguf")
    assert not is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path)
    assert "missing.gguf" in refusal(lambda: GGUFFiles(tmp_path / "missing.gguf"))


# ---- config


def test_config(tmp_path: Path) -> None:
    found = config(write(tmp_path / "m.gguf", LLAMA, tensors(12)))
    assert found == {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "vocab_size": 12, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "dtype": "float32", "bos_token_id": None,
        "eos_token_id": [], "pad_token_id": None, "sliding_window": None, "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }  # fmt: skip
    name, spec, _ = open_model(str(tmp_path / "m.gguf"))
    assert (name, spec.layers, spec.vocab_size) == ("m.gguf", 1, 12)


def test_a_header_alone_is_planned(tmp_path: Path) -> None:
    factors = Tensor("rope_freqs.weight", (2,), 0, struct.pack("<2f", 1, 8))
    data = file(LLAMA, [*tensors(12), factors])
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with GGUFFiles(path) as files:
        start = min(one.info.offset for one in files.tensors.values())
    path.write_bytes(data[:start])
    assert "cut short" in refusal(lambda: GGUFFiles(path))
    assert open_model(str(path))[1].vocab_size == 12
    path.write_bytes(data[:300])
    assert "cut short" in refusal(lambda: open_model(str(path)))


@pytest.mark.parametrize(
    ("kind", "other", "dtype"),
    [(0, 0, "float32"), (1, 1, "float16"), (0, 1, "float16"), (30, 30, "bfloat16"), (1, 30, "bfloat16"),
     (1, 8, "bfloat16")],
)  # fmt: skip
def test_dtype(kind: int, other: int, dtype: str, tmp_path: Path) -> None:
    more = Tensor("blk.0.more.weight", (32, 2), other, bytes(256))
    path = write(tmp_path / "m.gguf", LLAMA, [*tensors(kind=kind), more])
    assert config(path)["dtype"] == dtype


@pytest.mark.parametrize(
    ("step", "exponents", "spoilt", "dtype"),
    [
        (8, range(1, 31), None, "bfloat16"),
        (4, range(1, 31), None, "float16"),
        (8, range(1, 31), 130, "float16"),
        (8, range(1, 31), 300, "bfloat16"),
        (8, range(1), None, "bfloat16"),
        (3, range(1), None, "float16"),
    ],
)
def test_files_of_f16_that_were_made_in_bfloat16(
    step: int, exponents: range, spoilt: int | None, dtype: str, tmp_path: Path
) -> None:
    """Each number has eight significant bits, or one has more. The first 256 of a matrix are looked at."""
    numbers = [exponents[at % len(exponents)] << 10 | at * step % 1024 for at in range(512)]
    numbers[spoilt if spoilt is not None else 0] |= 0 if spoilt is None else 0x8001
    few = Tensor("blk.0.more.weight", (32, 16), 1, struct.pack("<512H", *numbers))
    path = write(tmp_path / "m.gguf", LLAMA, [*tensors(kind=1), few])
    assert config(path)["dtype"] == dtype
    path.write_bytes(path.read_bytes()[:-1024])
    assert open_model(str(path))[1].dtype == "float16"  # The header says no more.


def test_words_that_are_no_control_tokens_end_nothing(tmp_path: Path) -> None:
    named = 2, 3  # The file's own, and <|im_end|>.
    for kind, ends in ((3, named), (1, named[:1])):
        kinds = [As(5, one) for one in (2, 3, 3, kind, 1, 1, 1, 1, 1, 6)]
        values = LLAMA | TOKENS | {"tokenizer.ggml.token_type": kinds}
        assert config(write(tmp_path / "m.gguf", values, tensors()))["eos_token_id"] == list(ends)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_windows_that_are_refused(architecture: str, tmp_path: Path) -> None:
    values = {key.replace("llama", architecture): value for key, value in LLAMA.items()}
    values |= {"general.architecture": architecture, f"{architecture}.attention.sliding_window": 32}
    path = write(tmp_path / "m.gguf", values, tensors())
    assert "sliding_window is 32; supported: 0" in refusal(lambda: config(path), UnsupportedModelError)


def test_a_header_may_claim_any_number_of_experts(tmp_path: Path) -> None:
    stack = Tensor("blk.0.ffn_gate_exps.weight", (32, 1, 2**50), 8, b"")
    experts = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    path = write(tmp_path / "m.gguf", LLAMA | experts, [*tensors(), stack])
    format = open_model(str(path))[1].format
    assert format == ByType(types=(("Q8_0", ("model.layers.0.block_sparse_moe.experts.w1",)),))


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama, qwen2"),
    (
        {"general.architecture": "gpt-oss"},
        "qwen3moe; other families are read from directories of safetensors",
    ),
    ({"general.architecture": As(4, 3)}, "general.architecture is 3"),
    ({"llama.block_count": As(9, gguf_bytes.content([1, 2]))}, "llama.block_count is"),
    ({"llama.block_count": "one"}, "llama.block_count is 'one'"),
    ({"llama.embedding_length": 0}, "llama.embedding_length is 0"),
    ({"llama.attention.head_count": [2, 4]}, "head_count is array"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_epsilon is 0.0"),
    ({"llama.attention.layer_norm_rms_epsilon": As(6, float("nan"))}, "rms_epsilon is nan"),
    ({"llama.attention.value_length": 9}, "value_length is 9; supported: 4"),
    ({"llama.pooling_type": 3}, "pooling_type is 3; supported: files of models that write; for embeddings"),
    ({"llama.attention.causal": False}, "causal is False; supported: True"),
    ({"llama.rope.dimension_count": 2}, "dimension_count is 2; supported: 4"),
    ({"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'; supported: none, linear, yarn"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.2}, "attn_factor is 1.2"),
    ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
    ({"llama.attn_logit_softcapping": 30.0}, "softcapping is 30.0"),
    ({"llama.expert_gating_func": 2, "llama.expert_count": 2}, "expert_gating_func is 2"),
    ({"llama.expert_weights_norm": False, "llama.expert_count": 2}, "norm is False; supported: True"),
    ({"llama.expert_weights_scale": 2.5, "llama.expert_count": 2}, "scale is 2.5; supported: 1.0, 0.0"),
    ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is '2'"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_metadata_that_is_refused(changed: dict[str, object], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA | changed, tensors())
    message = refusal(lambda: config(path), UnsupportedModelError)
    assert said in message
    assert str(path) in message


@pytest.mark.parametrize("key", [key for key in LLAMA if "kv" not in key and "freq_base" not in key])
def test_metadata_that_is_missing(key: str, tmp_path: Path) -> None:
    rest = {name: value for name, value in LLAMA.items() if name != key}
    path = write(tmp_path / "m.gguf", rest, tensors())
    assert f"key {key} is missing" in refusal(lambda: config(path), UnsupportedModelError)


def test_harmless_metadata(tmp_path: Path) -> None:
    harmless = {
        "llama.tensor_data_layout": "Meta AI original pth", "llama.expert_shared_count": 0, "other.key": 5,
        "llama.rope.scaling.finetuned": True, "llama.attention.head_count": [2, 2, 2],
    }  # fmt: skip
    assert config(write(tmp_path / "m.gguf", LLAMA | harmless, tensors()))["num_attention_heads"] == 2


def test_no_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA, tensors()[1:])
    assert "lacks tensor token_embd.weight" in refusal(lambda: config(path))


def rope_of(path: Path) -> object:
    return read_spec(config(path), str(path)).rope


def test_rope(tmp_path: Path) -> None:
    def rope(*more: Tensor, **keys: object) -> object:
        values = {f"llama.rope.{key.replace('__', '.')}": value for key, value in keys.items()}
        return rope_of(write(tmp_path / "m.gguf", LLAMA | values, [*tensors(), *more]))

    plain = rope()
    assert rope(scaling__type="none") == plain
    assert rope(scale_linear=1.0) == plain
    linear = rope(scaling__type="linear", scaling__factor=2.5)
    assert (linear.kind, linear.factor) == (RopeKind.LINEAR, 2.5)  # type: ignore[attr-defined]
    assert rope(scale_linear=2.5) == linear
    yarn = rope(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=32,
                scaling__yarn_beta_fast=16.0)  # fmt: skip
    assert (yarn.kind, yarn.factor, yarn.original_length, yarn.beta_fast) == (RopeKind.YARN, 4, 32, 16)  # type: ignore[attr-defined]
    usual = rope(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=32,
                 scaling__yarn_beta_fast=16.0, scaling__attn_factor=1.0)  # fmt: skip
    assert usual == yarn
    factors = Tensor("rope_freqs.weight", (2,), 0, struct.pack("<2f", 1, 1))
    assert rope(factors) == plain
    unknown = replace(factors, data=struct.pack("<2f", 3, 8))
    assert "supported: that of Llama 3.1" in refusal(lambda: rope(unknown), UnsupportedModelError)
    wrong = replace(factors, extents=(1,))
    assert "rope_freqs.weight is [1] of F32" in refusal(lambda: rope(wrong))
    both = refusal(lambda: rope(factors, scaling__type="yarn"), UnsupportedModelError)
    assert "none beside tensor rope_freqs.weight" in both


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
def test_rope_factors_out_of_range(value: float, tmp_path: Path) -> None:
    factors = Tensor("rope_freqs.weight", (2,), 0, struct.pack("<2f", 1, value))
    path = write(tmp_path / "m.gguf", LLAMA, [*tensors(), factors])
    assert "supported: a divisor" in refusal(lambda: config(path), UnsupportedModelError)


def test_names_go_both_ways() -> None:
    naming = Naming(TensorNames(), 8, 4, turned=True)
    for name in ("blk.3.attn_q.weight", "blk.3.ffn_gate_inp.weight", "output.weight", "token_embd.weight"):
        with_info = gguf_bytes.Tensor(name, (8, 8), 0, b"")
        info = _info(with_info)
        (part,) = naming.parts(info)
        assert naming.spelled(part.name) == name
    experts = list(naming.parts(_info(Tensor("blk.3.ffn_down_exps.weight", (8, 16, 3), 0, b""))))
    assert [(one.name, one.first, one.shape) for one in experts] == [
        (f"model.layers.3.mlp.experts.{expert}.down_proj.weight", 16 * expert, (16, 8)) for expert in range(3)
    ]
    assert {naming.spelled(one.name) for one in experts} == {"blk.3.ffn_down_exps.weight"}
    fused = list(naming.parts(_info(Tensor("blk.0.attn_qkv.weight", (8, 16), 0, b""))))
    assert [(one.module[-6:], one.first, one.shape[0], one.turned) for one in fused] == [
        ("q_proj", 0, 8, True), ("k_proj", 8, 4, True), ("v_proj", 12, 4, False),
    ]  # fmt: skip
    assert naming.spelled("model.layers.0.mlp.strange.weight") == "model.layers.0.mlp.strange.weight"


def _info(tensor: Tensor) -> object:
    from penstock.arch.formats.gguf_blocks import TYPES
    from penstock.weights.gguf.container import TensorInfo

    return TensorInfo(tensor.name, tuple(tensor.extents[::-1]), TYPES[tensor.kind], 0)


def test_generation(tmp_path: Path) -> None:
    more = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.min_p": "no"}
    with GGUFFiles(write(tmp_path / "m.gguf", LLAMA | TOKENS | more, tensors())) as files:
        found = read_generation(read_gguf_generation(files), read_gguf_config(files), 10, "m.gguf")
    assert (found.temperature, found.top_k, found.min_p) == (0.5, 20, None)
    assert (found.eos_tokens, found.bos_token) == ((2, 3), 1)
