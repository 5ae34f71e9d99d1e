"""A Hugging Face checkpoint directory: what model it is, whether it is whole, and its weights in the layout
the engine wants."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import torch

from penstock.arch.families import TensorNames, family_of, read_spec
from penstock.arch.formats.format import STORED_BYTES, Source
from penstock.arch.layout import ALIGNMENT, Field, GroupLayout
from penstock.arch.spec import DTYPE_BYTES, ModelSpec
from penstock.base.errors import CheckpointError
from penstock.memory.disk import REQUEST_BYTES, ReadError, run_all
from penstock.weights.checkpoint.generation import GenerationDefaults, read_generation
from penstock.weights.checkpoint.identity import Digests, Hashing, Memory, same_bytes_remembered
from penstock.weights.checkpoint.links import expect_inside
from penstock.weights.checkpoint.shards import Shards, Stored
from penstock.weights.jsonfile import read_object, shown

MAX_CONFIG_BYTES = 10_000_000
STAGE_BYTES = 1 << 20
"""Of a tensor whose dtype changes, as much is in passing at once in each thread: within the reach of a core's
cache."""
SERIAL = 32768
"""Elements converted by one call: as many as torch does without waking threads of its own, which would fight
with ours for cores."""
READ_THREADS = 4
"""Two read cached files twice as fast as one (12.7 against 6.5 GB/s on two cores); a cold disk wants some
more in flight."""
FINGERPRINT_BYTES = 16
_FINGERPRINT = "penstock checkpoint", 3
"""Format and version of what the fingerprint is a digest of. Version 1 looked at samples of the weights; the
spec of version 2 did not name the types of mixers and formats."""
GAP_BYTES = 4096
"""Between lines of a tensor that are read, less than this is read with them: it holds no page that a disk
could leave out."""
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXACT = {
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Dtypes that are read only where a storage format asks for them; those above are rounded to each other."""
_REPACKED = 8
"""Repacked tensors that are kept: as many as threads ask for at once, each for one piece after the other."""
_BESIDE = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}
"""Files in which quantisers write their settings if not in config.json, and the methods that these are of."""
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Checkpoint:
    """An open checkpoint. Opening reads configs and headers only; weights are read group by group into memory
    of the caller's.

    Methods may be called from one thread at a time; reads are spread over threads of its own.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, object],
        generation: GenerationDefaults,
        shards: Shards,
        spec: ModelSpec,
        memory: Memory,
    ) -> None:
        self.path = path
        self.config = config
        self.generation = generation
        self.spec = spec
        self.names: TensorNames = family_of(config).names
        self._shards = shards
        self._memory = memory
        self._hashing: Hashing | None = None
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="checkpoint")
        self._repacked: dict[Field, torch.Tensor] = {}
        self._repacking = Lock()

    @classmethod
    def open(cls, path: Path, cache: Path | None = None) -> Self:
        """The checkpoint in directory `path`: config.json, generation_config.json if there, safetensors in
        one file or in shards.

        cache: the directory where digests of weight files are remembered, so that `fingerprint` need not read
        them again. Raises CheckpointError for what is missing, damaged or malformed, UnsupportedModelError
        for models this engine does not run.
        """
        if not os.path.isdir(path):  # Unlike Path.is_dir, an answer also for a path that cannot be looked at.
            fault = (
                "is a file; name the directory it is in"
                if os.path.exists(path)
                else "does not exist; name a directory with config.json in it"
            )
            raise CheckpointError(f"checkpoint {path} {fault}")
        expect_inside(path)
        config = read_config(path)
        spec = read_spec(config, str(path / "config.json"))
        side = path / "generation_config.json"
        generation = read_generation(
            read_object(side, MAX_CONFIG_BYTES) if os.path.lexists(side) else {},
            config,
            spec.vocab_size,
            str(side),
        )
        shards = Shards(path)
        try:
            _check_count(path, spec, len(shards.tensors))
        except CheckpointError:
            shards.close()
            raise
        return cls(path, config, generation, shards, _with_dtype(spec, config, shards), Memory(cache))

    def verify(self, layouts: Iterable[GroupLayout]) -> None:
        """Check that the files hold exactly the tensors that `layouts`, of the whole model, are made from, in
        shapes and dtypes to match.

        Raises CheckpointError, naming file and tensor.
        """
        sources = {
            source.tensor: (source, field)
            for layout in layouts
            for field in layout.fields
            for source in field.sources
        }
        missing = [
            name
            for name, (source, _) in sources.items()
            if not source.optional and self._find(source) is None
        ]
        if missing:
            hint = "; does the model share its embedding (tie_word_embeddings)?" if missing == [_HEAD] else ""
            raise CheckpointError(
                f"{self.path} lacks tensor {missing[0]}{_and_more(missing)} that config.json calls for{hint}"
            )
        for source, field in sources.values():
            if not source.optional or self._find(source) is not None:
                self._check(source, field)
        known = {*sources, *(name for source, _ in sources.values() for name in source.also)}
        extra = [name for name in self._shards.tensors if name not in known and not self._ignorable(name)]
        if extra:
            file = self._shards.tensors[extra[0]].file.path
            raise CheckpointError(
                f"{file} holds tensor {shown(extra[0])}{_and_more(extra)} that a model as in config.json "
                "does not have"
            )

    def read_group(self, layout: GroupLayout, into: torch.Tensor) -> None:
        """Fill `into`, flat uint8 of `layout.size` bytes on the CPU, with a group.

        Each field starts at its offset, its sources one below the other; bytes between fields are zero.
        Tensors stored in the field's dtype are read straight into place; others pass through a stage of
        STAGE_BYTES in each of READ_THREADS threads, rounded to nearest even. Of a rank's layout only what the
        rank holds is read, and of columns what lies between them where that is less than GAP_BYTES. Raises
        CheckpointError; `into` then holds anything.
        """
        assert (into.dtype, into.shape, into.device.type) == (torch.uint8, (layout.size,), "cpu")
        assert into.is_contiguous()
        tasks: list[Callable[[], None]] = []
        at = 0
        for field in layout.fields:
            into[at : field.offset].zero_()
            at = field.offset
            if field.repack is not None:
                into[at : at + field.size].copy_(self._repack(field))
                at += field.size
                continue
            for source in field.sources:
                end = at + prod(source.taken) * STORED_BYTES[field.dtype]
                tasks += _reading(self._check(source, field), _Lines.of(source), field.dtype, into[at:end])
                at = end
        into[at:].zero_()
        run_all(tasks, self._pool)

    def read_piece(self, layout: GroupLayout, start: int, into: torch.Tensor) -> None:
        """Fill `into` with a part of what read_group gives, from its byte `start` on, a multiple of
        ALIGNMENT; zeros past its end.

        Any number of threads may do so at once: the work is done on the calling one. Raises CheckpointError.
        """
        assert (into.dtype, into.dim(), into.device.type, start % ALIGNMENT) == (torch.uint8, 1, "cpu", 0)
        end, at = start + len(into), start
        for field in layout.fields:
            begin, element = field.offset, STORED_BYTES[field.dtype]
            for source in field.sources if field.repack is None else (None,):
                stop = begin + (field.size if source is None else prod(source.taken) * element)
                first, last = max(begin, start), min(stop, end)
                if first < last:
                    into[at - start : first - start].zero_()
                    part = into[first - start : last - start]
                    if source is None:
                        part.copy_(self._repack(field)[first - begin : last - begin])
                    else:
                        stored = self._check(source, field)
                        _read_part(stored, _Lines.of(source), field.dtype, (first - begin) // element, part)
                    at = last
                begin = stop
        into[at - start :].zero_()

    def _repack(self, field: Field) -> torch.Tensor:
        """Return the bytes, flat uint8, of a field that its format makes of whole sources. Any thread may."""
        with self._repacking:
            made = self._repacked.get(field)
        if made is not None:
            return made
        assert field.repack is not None
        wholes = list[torch.Tensor | None]()
        for source in field.sources:
            if source.optional and self._find(source) is None:
                wholes.append(None)
                continue
            stored = self._check(source, field)
            whole = torch.empty(stored.entry.shape, dtype=_kind(stored))
            try:
                stored.file.read_into(_bytes(whole), stored.entry.offset)
            except ReadError as error:
                raise CheckpointError(str(error)) from error
            wholes.append(whole)
        try:
            tensor: torch.Tensor = field.repack(wholes).contiguous()
        except CheckpointError as fault:
            raise CheckpointError(f"{self._check(field.sources[0], field).file.path}: {fault}") from fault
        assert (tuple(tensor.shape), tensor.dtype) == (field.shape, getattr(torch, field.dtype)), field.name
        made = tensor.view(-1).view(torch.uint8)
        with self._repacking:
            self._repacked[field] = made
            while len(self._repacked) > _REPACKED:
                del self._repacked[next(iter(self._repacked))]
        return made

    def identify(self) -> int:
        """Begin to find the fingerprint, on other threads, unless that has begun. Weights may be read
        meanwhile.

        Returns the bytes that are to be read and hashed for it: 0 if all are remembered. Raises
        CheckpointError.
        """
        if self._hashing is None:
            self._hashing = Hashing(self._shards.files, self._memory)
        return self._hashing.todo_bytes

    def digests(self) -> Digests:
        """The digests of the weight files, and what it took to know them; waits for `identify`. Raises
        CheckpointError."""
        self.identify()
        assert self._hashing is not None
        return self._hashing.result()

    def fingerprint(self) -> bytes:
        """FINGERPRINT_BYTES that are the same in every process, on every machine and under every path for the
        same model, and differ for others.

        Covered: every value of the spec; names and sizes of the weight files; and every byte of them, so
        names, dtypes and shapes of all tensors too. Not covered: file times; tokenizer, chat template and
        generation settings, on which neither weights nor KV depend. Reads all weight files once, in the
        background if `identify` was called; not even that where `open` was given a cache that remembers them.
        Raises CheckpointError, also if a file changes meanwhile.
        """
        digests = self.digests().files
        files = [
            [file.path.name, file.size, digest]
            for file, digest in zip(self._shards.files, digests, strict=True)
        ]
        what = {"format": _FINGERPRINT, "spec": repr(self.spec), "files": files}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()[:FINGERPRINT_BYTES]

    def expect_unchanged(self) -> None:
        """Raises CheckpointError unless all that was read until now is what the fingerprint was made from, if
        it was made at all."""
        if self._hashing is not None:
            self._hashing.expect_unchanged()

    def close(self) -> None:
        if self._hashing is not None:
            self._hashing.close()
        self._pool.shutdown()
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, source: Source, field: Field) -> Stored:
        """Return the stored tensor of a field's source, if it is there as promised."""
        stored = self._find(source)
        if stored is None:
            raise CheckpointError(f"{self.path} lacks tensor {source.tensor} that config.json calls for")
        where = f"{stored.file.path}: tensor {stored.name}"
        if stored.entry.shape != source.shape and not source.loose:
            raise CheckpointError(
                f"{where} has shape {shown(list(stored.entry.shape))}; config.json calls for "
                f"{list(source.shape)}"
            )
        if field.repack is not None:
            kinds = {**_NAMES, **_EXACT}
            read = [name for name, kind in kinds.items() if not source.dtypes or kind in source.dtypes]
        else:
            floating = field.dtype in DTYPE_BYTES
            read = (
                list(_NAMES) if floating else [name for name, kind in _EXACT.items() if kind == field.dtype]
            )
        if stored.entry.dtype not in read:
            raise CheckpointError(f"{where} has dtype {stored.entry.dtype}; {', '.join(read)} are read")
        return stored

    def _find(self, source: Source) -> Stored | None:
        """Return the tensor of a source under the first of its names that is there."""
        names = source.tensor, *source.also
        return next((self._shards.tensors[name] for name in names if name in self._shards.tensors), None)

    def _ignorable(self, name: str) -> bool:
        """Tensors that many checkpoints hold and no pass needs: rotary frequencies, layers past the last, a
        head that is the embedding."""
        if name != _HEAD:  # Which is expected, and does not come here, where nothing is tied.
            layer = _LAYER.match(name)
            return (
                name.endswith(".rotary_emb.inv_freq")
                or (layer is not None and int(layer[1]) >= self.spec.layers)
                or self.spec.format.ignores(name)
            )
        head, embedding = self._shards.tensors[_HEAD], self._shards.tensors[_EMBEDDING]
        alike = (head.entry.dtype, head.entry.shape) == (embedding.entry.dtype, embedding.entry.shape)
        if not alike or not self._same(head, embedding):
            raise CheckpointError(
                f"{head.file.path} holds a {_HEAD} that is not {_EMBEDDING}, while config.json ties them; "
                "if it is the right head, set tie_word_embeddings to false"
            )
        return True

    def _same(self, one: Stored, other: Stored) -> bool:
        """Whether two tensors of one size have the same bytes. Raises CheckpointError."""
        places = one.file, one.entry.offset, other.file, other.entry.offset
        return same_bytes_remembered(*places, one.entry.size, self._memory)


@dataclasses.dataclass(frozen=True, slots=True)
class _Lines:
    """Where what a source takes lies in its tensor, in elements: lines of `width`, the first at `start`, then
    one every `pitch`."""

    start: int
    width: int
    pitch: int

    @classmethod
    def of(cls, source: Source) -> Self:
        row, above = prod(source.shape[1:]), source.rows.start if source.rows else 0
        if source.columns is not None:
            return cls(above * row + source.columns.start, len(source.columns), row)
        return cls(above * row, prod(source.taken), prod(source.taken))


def _kind(stored: Stored) -> torch.dtype:
    """Return the dtype of a tensor as it is in its file."""
    kind: torch.dtype = getattr(torch, {**_NAMES, **_EXACT}[stored.entry.dtype])
    return kind


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, to be written."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _reading(stored: Stored, lines: _Lines, dtype: str, into: torch.Tensor) -> list[Callable[[], None]]:
    """The tasks that fill `into`, flat uint8, with all of a source as `dtype`."""
    parts, each = torch.split(into, REQUEST_BYTES), REQUEST_BYTES // STORED_BYTES[dtype]
    return [
        partial(_read_part, stored, lines, dtype, number * each, part) for number, part in enumerate(parts)
    ]


def _read_part(stored: Stored, lines: _Lines, dtype: str, first: int, into: torch.Tensor) -> None:
    """Fill `into`, flat uint8, with elements of a source as `dtype`, from its element `first`. Any thread
    may. Raises CheckpointError."""
    part = into.view(getattr(torch, dtype))
    line, begun = divmod(first, lines.width)
    at = lines.start + line * lines.pitch
    try:
        # The rest of a line that was begun, whole lines, and the beginning of another one.
        head = min(lines.width - begun, len(part)) if begun or lines.width == lines.pitch else 0
        if head:
            _read_run(stored, at + begun, part[:head])
            at += lines.pitch
        whole, tail = divmod(len(part) - head, lines.width)
        if whole:
            _read_lines(stored, lines, at, part[head : len(part) - tail].view(whole, -1))
            at += whole * lines.pitch
        if tail:
            _read_run(stored, at, part[len(part) - tail :])
    except ReadError as error:
        raise CheckpointError(str(error)) from error


def _read_lines(stored: Stored, lines: _Lines, at: int, into: torch.Tensor) -> None:
    """Fill `into` `[lines, width]` with lines of a stored tensor, the first at element `at`: read with what
    is between them if that is little, or else each by itself."""
    kind = _kind(stored)
    together = (lines.pitch - lines.width) * kind.itemsize < GAP_BYTES
    if not together and kind is into.dtype:
        _read_each(stored, lines, at, into)
        return
    pitch = lines.pitch if together else lines.width
    stage = torch.empty(min(max(STAGE_BYTES // (pitch * kind.itemsize), 1), len(into)), pitch, dtype=kind)
    for part in torch.split(into, len(stage)):
        read = stage[: len(part)]
        if together:
            _read_run(stored, at, read.view(-1)[: read.numel() - pitch + lines.width])
        else:
            _read_each(stored, lines, at, read)
        _round(stored, read[:, : lines.width], part)
        at += len(part) * lines.pitch


def _read_each(stored: Stored, lines: _Lines, at: int, into: torch.Tensor) -> None:
    """Fill `into` `[lines, width]`, of the stored dtype, with one request for each line."""
    data, size = _bytes(into), into.itemsize
    for number in range(len(into)):
        line = data[number * lines.width * size : (number + 1) * lines.width * size]
        stored.file.read_into(line, stored.entry.offset + (at + number * lines.pitch) * size)


def _read_run(stored: Stored, first: int, into: torch.Tensor) -> None:
    """Fill `into`, flat, with elements of a stored tensor, from its element `first`, rounded to nearest even
    if need be."""
    kind = _kind(stored)
    at = stored.entry.offset + first * kind.itemsize
    if kind is into.dtype:
        stored.file.read_into(_bytes(into), at)
        return
    stage = torch.empty(min(STAGE_BYTES // kind.itemsize, len(into)), dtype=kind)
    for part in torch.split(into, len(stage)):
        read = stage[: len(part)]
        stored.file.read_into(_bytes(read), at)
        at += read.nbytes
        _round(stored, read, part)


def _round(stored: Stored, read: torch.Tensor, into: torch.Tensor) -> None:
    """Copy elements, flat or in lines, rounded to nearest even if the dtypes differ."""
    rows = max(SERIAL // prod(read.shape[1:]), 1)
    for block, filled in zip(torch.split(read, rows), torch.split(into, rows), strict=True):
        filled.copy_(block)
        narrowed = filled.dtype is torch.float16 and block.dtype is not torch.float16
        if narrowed and not all(extreme.isfinite() for extreme in torch.aminmax(filled)):
            raise CheckpointError(
                f"{stored.file.path}: tensor {stored.name} has values beyond float16; choose another dtype"
            )


def read_config(path: Path) -> Mapping[str, object]:
    """Return config.json of a model's directory, with what a quantiser has written beside it. Raises
    CheckpointError."""
    config = read_object(path / "config.json", MAX_CONFIG_BYTES)
    if config.get("quantization_config") is not None:
        return config
    for name, method in _BESIDE.items():
        if os.path.lexists(path / name):
            return config | {
                "quantization_config": {"quant_method": method} | read_object(path / name, MAX_CONFIG_BYTES)
            }
    return config


def _check_count(path: Path, spec: ModelSpec, there: int) -> None:
    """Refuse a config far beyond its files before anything is laid out for every layer and expert that it
    claims."""
    least = spec.layers + sum(spec.moe_layers) * (spec.moe.experts if spec.moe else 0)
    if least > there:
        raise CheckpointError(
            f"{path} holds {there} tensors; {spec.layers} layers as in config.json need at least {least}"
        )


def _with_dtype(spec: ModelSpec, config: Mapping[str, object], shards: Shards) -> ModelSpec:
    """The spec with the dtype of the embedding where config.json does not name one."""
    embedding = shards.tensors.get(_EMBEDDING)
    if embedding is None or config.get("dtype") is not None or config.get("torch_dtype") is not None:
        return spec
    return dataclasses.replace(spec, dtype=_NAMES.get(embedding.entry.dtype, spec.dtype))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
