"""GGUF files made by hand, byte by byte, sound or as broken as a test wants them; without torch."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.base.errors import CheckpointError, PenstockError

NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class As:
    """A value of a type that Python's own does not lead to."""

    kind: int
    value: object


@dataclass(frozen=True)
class Tensor:
    """A tensor's info, with extents as the file has them, and its bytes. offset: None is where it belongs."""

    name: str
    extents: Sequence[int]
    kind: int
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def kind_of(value: object) -> int:
    kinds = {bool: 7, int: 4, float: 6, str: STRING, bytes: STRING, list: ARRAY}
    return value.kind if isinstance(value, As) else kinds[type(value)]


def content(value: object) -> bytes:
    if isinstance(value, As):
        if value.kind != ARRAY:
            return struct.pack(NUMBERS[value.kind], value.value)
        assert isinstance(value.value, bytes)
        return value.value
    if isinstance(value, list):
        first = value[0] if value else 0
        return struct.pack("<IQ", kind_of(first), len(value)) + b"".join(map(content, value))
    return text(value) if isinstance(value, str | bytes) else struct.pack(NUMBERS[kind_of(value)], value)


def pair(key: str | bytes, value: object) -> bytes:
    return text(key) + struct.pack("<I", kind_of(value)) + content(value)


def file(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    """The bytes of a file. counts: of tensors and of keys, where these shall lie."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    infos, data = b"", b""
    for one in tensors:
        data += bytes(-len(data) % alignment)
        infos += text(one.name) + struct.pack(f"<I{len(one.extents)}Q", len(one.extents), *one.extents)
        infos += struct.pack("<IQ", one.kind, len(data) if one.offset is None else one.offset)
        data += one.data
    said = [
        real if lie is None else lie for lie, real in zip(counts, (len(tensors), len(pairs)), strict=True)
    ]
    head = b"GGUF" + struct.pack("<IQQ", version, *said) + b"".join(pair(*one) for one in pairs) + infos
    return head + bytes(-len(head) % alignment) + data


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}
"""Metadata of a small model."""


def tensors(vocabulary: int = 10, kind: int = 0, size: int = 4) -> list[Tensor]:
    """The tensors of that model, zeros."""
    shapes = {
        "token_embd.weight": (8, vocabulary), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (8, 4), "blk.0.attn_v.weight": (8, 4),
        "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (8, 16),
        "blk.0.ffn_up.weight": (8, 16), "blk.0.ffn_down.weight": (16, 8),
    }  # fmt: skip
    made = []
    for name, extents in shapes.items():
        count = 1
        for extent in extents:
            count *= extent
        made.append(Tensor(name, extents, kind, bytes(count * size)))
    return made


def write(path: Path, *given: object, **more: object) -> Path:
    path.write_bytes(file(*given, **more))  # type: ignore[arg-type]
    return path


TOKENS: dict[str, object] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        "<|im_end|>",
        "a",
        "b",
        "\u2581",
        "ab",
        "\u2581ab",
        "<0x21>",
    ],
    "tokenizer.ggml.token_type": [As(5, kind) for kind in (2, 3, 3, 3, 1, 1, 1, 1, 1, 6)],
    "tokenizer.ggml.scores": [-0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, 0.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
"""Metadata of a small tokenizer."""


def refusal(call: Callable[[], object], kind: type[PenstockError] = CheckpointError) -> str:
    """What is said, in one line that is not long."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
