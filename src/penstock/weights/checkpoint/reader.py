"""Reads a Hugging Face checkpoint directory, or a GGUF file: what model it is, whether it is whole, and its
weights in the layout the engine wants."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import torch

from penstock.arch.families import TensorNames, family_of, read_spec
from penstock.arch.formats.format import STORED_BYTES, FileTensor, TensorSlice
from penstock.arch.formats.methods import with_stored
from penstock.arch.formats.recipe import quantised_here
from penstock.arch.layout import ALIGNMENT, Field, GroupLayout
from penstock.arch.spec import DTYPE_BYTES, ModelSpec
from penstock.base.errors import CheckpointError, PenstockError
from penstock.memory.disk import DiskFile
from penstock.weights.checkpoint.biases import adds_nothing
from penstock.weights.checkpoint.config import expect_directory, read_config
from penstock.weights.checkpoint.drafts import belongs_to_drafts, left_for_drafts
from penstock.weights.checkpoint.generation import GenerationDefaults, open_generation, read_generation
from penstock.weights.checkpoint.gguf import GGUFWeights
from penstock.weights.checkpoint.identity import Digests, Hashing, Memory, same_bytes_remembered
from penstock.weights.checkpoint.links import expect_inside
from penstock.weights.checkpoint.scoring import SCORE, classifies, made_head
from penstock.weights.checkpoint.shards import EMBEDDING, HEAD, MAX_TENSORS, Shards, ShardTensor, WeightFiles
from penstock.weights.checkpoint.tensors import (
    EXACT,
    ROUNDED,
    Lines,
    bytes_of,
    read_part,
    stored_dtype,
)
from penstock.weights.gguf.config import naming_of, read_gguf_config, read_gguf_generation
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.gguf.tokenizer import read_gguf_tokenizer
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object, readable, shown

FINGERPRINT_BYTES = 16
_FINGERPRINT = "penstock checkpoint", 3
"""Format and version of what the fingerprint is a digest of. Version 1 looked at samples of the weights; the
spec of version 2 did not name the types of mixers and formats."""
_REPACKED = 8
"""Repacked tensors that are kept: as many as threads ask for at once, each for one piece after the other."""


class Checkpoint:
    """Holds a checkpoint open. Opening reads configs and headers only; weights are read group by group into
    memory of the caller's.

    Methods but `read_piece` may be called from one thread at a time.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, object],
        generation: GenerationDefaults,
        shards: WeightFiles,
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
        self._repacked: dict[Field, torch.Tensor] = {}
        self._repacking = Lock()
        self._one_at_a_time: dict[Field, Lock] = {}
        """Of fields that a thread makes: others that want a piece of one wait for it."""

    @classmethod
    def open(cls, path: Path, cache: Path | None = None) -> Self:
        """Open the checkpoint in directory `path`: config.json, generation_config.json if there, safetensors
        in one file or in shards. Or open the GGUF file at `path`, the first if the model was split.

        cache: the directory where digests of weight files are remembered, so that `fingerprint` need not read
        them again. Raises CheckpointError for what is missing, damaged or malformed, UnsupportedModelError
        for models this engine does not run.
        """
        if is_gguf(path):
            return cls._open_gguf(path, cache)
        expect_directory(path)
        expect_inside(path)
        config, where = read_config(path), str(path / "config.json")
        spec = read_spec(config, where)
        if quantised_here(config):
            raise CheckpointError(
                f"{where} is that of a pack which `penstock pack --to` made, but {path} is no "
                "pack; fetch manifest.json and weights.bin, or the model's own config.json"
            )
        generation = open_generation(path, config, spec.vocab_size)
        shards = Shards(path)
        try:
            _check_count(path, spec, family_of(config).names, shards.tensors)
            if shards.headless or (classifies(config) and HEAD not in shards.tensors):
                # What comes of the head means nothing then, and takes no weights of its own.
                config = {**config, "tie_word_embeddings": True}
            found = {name: _found(one) for name, one in shards.tensors.items()}
            config = with_stored(config, where, found, spec.dtype)
            spec = read_spec(config, where)
        except PenstockError:
            shards.close()
            raise
        return cls(path, config, generation, shards, _with_dtype(spec, config, shards), Memory(cache))

    @classmethod
    def _open_gguf(cls, path: Path, cache: Path | None) -> Self:
        files = GGUFFiles(path)
        try:
            config = read_gguf_config(files)
            spec = read_spec(config, str(path))
            generation = read_generation(read_gguf_generation(files), config, spec.vocab_size, str(path))
            weights = GGUFWeights(files, naming_of(config, files.architecture), spec.head_dim)
            _check_count(path, spec, family_of(config).names, weights.tensors)
        except PenstockError:
            files.close()
            raise
        return cls(path, config, generation, weights, spec, Memory(cache))

    @property
    def left_for_drafts(self) -> tuple[str, ...]:
        """Return the names of tensors of layers that predict several tokens, which no pass reads, sorted."""
        return left_for_drafts(self._shards.tensors, self.spec.layers)

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
            tied = ", or set tie_word_embeddings to true if its embedding is its head"
            hint = f"; fetch the file that has it{tied if missing == [HEAD] else ''}"
            raise CheckpointError(
                f"{self.path} lacks tensor {self._shards.spelled(missing[0])}{_and_more(missing)} that "
                f"{self._shards.described} calls for{hint}"
            )
        for source, field in sources.values():
            if not source.optional or self._find(source) is not None:
                self._check(source, field)
        known = {*sources, *(name for source, _ in sources.values() for name in source.also)}
        extra = [name for name in self._shards.tensors if name not in known and not self._ignorable(name)]
        if extra:
            file = self._shards.tensors[extra[0]].file.path
            raise CheckpointError(
                f"{file} holds tensor {shown(extra[0])}{_and_more(extra)} that the model in "
                f"{self._shards.described} does not have; fetch config.json and the weights of the same model"
            )

    def read_piece(self, layout: GroupLayout, start: int, into: torch.Tensor) -> None:
        """Fill `into`, flat uint8 on the CPU, with a part of a group, from byte `start` on, a multiple of
        ALIGNMENT; zeros past the group's end.

        Each field of a group starts at its offset, its sources one below the other; bytes between fields are
        zero. Tensors stored in the field's dtype are read straight into place; others pass through a stage of
        STAGE_BYTES, rounded to nearest even. Of a rank's layout only what the rank holds is read, and of
        columns what lies between them where that is less than GAP_BYTES.

        Any number of threads may do so at once: the work is done on the calling one. Raises CheckpointError;
        `into` then holds anything.
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
                        read_part(stored, Lines.of(source), field.dtype, (first - begin) // element, part)
                    at = last
                begin = stop
        into[at - start :].zero_()

    def _repack(self, field: Field) -> torch.Tensor:
        """Return the bytes, flat uint8, of a field that its format makes of whole sources. Any thread may:
        those that come while one makes them wait for it."""
        with self._repacking:
            if (made := self._repacked.get(field)) is not None:
                return made
            alone = self._one_at_a_time.setdefault(field, Lock())
        with alone:
            with self._repacking:
                made = self._repacked.get(field)
            if made is None:
                made = self._made(field)
            with self._repacking:
                self._one_at_a_time.pop(field, None)
                self._repacked[field] = made
                while len(self._repacked) > _REPACKED:
                    del self._repacked[next(iter(self._repacked))]
        return made

    def _made(self, field: Field) -> torch.Tensor:
        """Make a field of its whole sources. Raises CheckpointError."""
        assert field.repack is not None
        wholes, read = list[torch.Tensor | None](), dict[tuple[str, int | None], torch.Tensor]()
        for source in field.sources:
            if source.optional and self._find(source) is None:
                wholes.append(None)
                continue
            if (known := read.get((source.tensor, source.index))) is not None:
                wholes.append(known)
                continue
            stored = self._check(source, field)
            shape = stored.entry.shape if source.index is None else source.stored_shape
            whole = torch.empty(shape, dtype=stored_dtype(stored))
            with readable():
                stored.file.read_into(
                    bytes_of(whole), stored.entry.offset + (source.index or 0) * whole.nbytes
                )
            whole = whole.t() if source.transposed else whole
            wholes.append(whole)
            read[source.tensor, source.index] = whole
        try:
            tensor: torch.Tensor = field.repack(wholes).contiguous()
        except CheckpointError as fault:
            file, said = self._check(field.sources[0], field).file, str(fault)
            for source in field.sources:
                if source.tensor in said and (named := self._find(source)) is not None:
                    file, said = named.file, said.replace(source.tensor, named.name)
            raise CheckpointError(f"{file.path}: {said}") from fault
        assert (tuple(tensor.shape), tensor.dtype) == (field.shape, getattr(torch, field.dtype)), field.name
        return tensor.view(-1).view(torch.uint8)

    def identify(self) -> int:
        """Begin to find the fingerprint, on other threads, unless that has begun. Weights may be read
        meanwhile.

        Returns the bytes that are to be read and hashed for it: 0 if all are remembered. Raises
        CheckpointError.
        """
        if self._hashing is None:
            self._hashing = Hashing(self._shards.files, self._memory)
        return self._hashing.todo_bytes

    def digests(self, progress: Callable[[int], None] | None = None) -> Digests:
        """Return the digests of the weight files, and what it took to know them; waits for `identify`. Raises
        CheckpointError.

        progress: called now and then with bytes that were hashed since.
        """
        self.identify()
        assert self._hashing is not None
        return self._hashing.result(progress)

    def fingerprint(self) -> bytes:
        """Return FINGERPRINT_BYTES that are the same in every process, on every machine and under every path
        for the same model, and differ for others.

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

    def made_files(self) -> Mapping[str, bytes]:
        """Return the files that a pack has beside its weights, by name, where they are made: of a GGUF file's
        header, or of a reranker's head. Raises CheckpointError, UnsupportedModelError."""
        if not is_gguf(self.path):
            return made_head(self.path)
        with GGUFFiles(self.path) as files:
            made: dict[str, object] = {"generation_config.json": read_gguf_generation(files)}
        made["config.json"], tokenizer = self.config, read_gguf_tokenizer(self.path)
        written = {name: json.dumps(value, indent=1).encode() for name, value in made.items()}
        if tokenizer is None:
            return written
        config = json.dumps(tokenizer.config, indent=1).encode()
        return written | {"tokenizer.json": tokenizer.tokenizer.encode(), "tokenizer_config.json": config}

    def side_file(self, name: str) -> bytes:
        """Return a file of a directory that stands beside the weights, config.json with what a quantiser has
        written elsewhere. Raises CheckpointError."""
        path = self.path / name
        if name == "config.json" and read_object(path, MAX_CONFIG_BYTES) != self.config:
            return json.dumps(self.config, indent=2).encode() + b"\n"
        with readable(), DiskFile(path) as file:
            return bytes(file.read(0, file.size))

    def expect_unchanged(self) -> None:
        """Raise CheckpointError unless all that was read until now is what the fingerprint was made from, if
        it was made at all."""
        if self._hashing is not None:
            self._hashing.expect_unchanged()

    def close(self) -> None:
        """Close the files, and end the threads that hash."""
        if self._hashing is not None:
            self._hashing.close()
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, source: TensorSlice, field: Field) -> ShardTensor:
        """Return the stored tensor of a field's source, if it is there as promised."""
        stored = self._find(source)
        if stored is None:
            raise CheckpointError(
                f"{self.path} lacks tensor {self._shards.spelled(source.tensor)} that "
                f"{self._shards.described} calls for; fetch the checkpoint again"
            )
        where = f"{stored.file.path}: tensor {stored.name}"
        shape, stack = stored.entry.shape, ""
        if source.index is not None:
            stack = f"at least {source.index + 1} of "
            shape = shape[1:] if shape and source.index < shape[0] else ()
        if shape != source.stored_shape and not source.loose:
            raise CheckpointError(
                f"{where} has shape {shown(list(stored.entry.shape))}; {self._shards.described} calls for "
                f"{stack}{list(source.stored_shape)}; fetch config.json and the weights of the same model"
            )
        if field.repack is not None:
            kinds = {**ROUNDED, **EXACT}
            read = [name for name, kind in kinds.items() if not source.dtypes or kind in source.dtypes]
        else:
            floating = field.dtype in DTYPE_BYTES
            read = (
                list(ROUNDED) if floating else [name for name, kind in EXACT.items() if kind == field.dtype]
            )
        if stored.entry.dtype not in read:
            raise CheckpointError(
                f"{where} has dtype {stored.entry.dtype}; supported: {', '.join(read)}; convert the "
                "checkpoint to one of these"
            )
        return stored

    def _find(self, source: TensorSlice) -> ShardTensor | None:
        """Return the tensor of a source under the first of its names that is there."""
        names = source.tensor, *source.also
        return next((self._shards.tensors[name] for name in names if name in self._shards.tensors), None)

    def _ignorable(self, name: str) -> bool:
        """Tell whether no pass needs the tensor, as many checkpoints hold some: rotary frequencies, those of
        `left_for_drafts`, biases of zeros, a head that is the embedding."""
        if name != HEAD:  # Which is expected, and does not come here, where nothing is tied.
            return (
                name.endswith(".rotary_emb.inv_freq")
                or (name == SCORE and classifies(self.config))
                or belongs_to_drafts(name, self.spec.layers)
                or self.spec.format.ignores(name)
                or adds_nothing(name, self._shards.tensors)
            )
        head, embedding = self._shards.tensors[HEAD], self._shards.tensors.get(EMBEDDING)
        alike = embedding is not None and (
            (head.entry.dtype, head.entry.shape) == (embedding.entry.dtype, embedding.entry.shape)
            and self._same(head, embedding)
        )
        if not alike:
            raise CheckpointError(
                f"{head.file.path} holds a {HEAD} that is not {EMBEDDING}, while config.json ties them; "
                "if it is the right head, set tie_word_embeddings to false"
            )
        return True

    def _same(self, one: ShardTensor, other: ShardTensor) -> bool:
        """Tell whether two tensors of one size have the same bytes. Raises CheckpointError."""
        assert isinstance(one.file, DiskFile), one.name
        assert isinstance(other.file, DiskFile), other.name
        places = one.file, one.entry.offset, other.file, other.entry.offset
        return same_bytes_remembered(*places, one.entry.size, self._memory)


def _found(stored: ShardTensor) -> FileTensor:
    """Return what a format may know of a tensor."""
    entry = stored.entry
    return FileTensor(str(stored.file.path), {**ROUNDED, **EXACT}.get(entry.dtype, ""), entry.shape)


def _check_count(path: Path, spec: ModelSpec, names: TensorNames, tensors: Mapping[str, ShardTensor]) -> None:
    """Refuse a config far beyond its files before anything is laid out for every layer and expert that it
    claims."""
    mixtures, experts, there = sum(spec.moe_layers), spec.moe.experts if spec.moe else 0, len(tensors)
    if names.stacked:
        stacks = (
            one.entry.shape[0] for name, one in tensors.items() if ".experts." in name and one.entry.shape
        )
        most = max(stacks, default=0)
        if experts > most or experts * mixtures > MAX_TENSORS:
            raise CheckpointError(
                f"{path} holds stacks of {most} experts; {experts} in each of {mixtures} layers, as in "
                "config.json, are not there; fetch config.json and the weights of the same model"
            )
        experts = 1
    least = spec.layers + mixtures * experts
    if least > there:
        raise CheckpointError(
            f"{path} holds {there} tensors; {spec.layers} layers as in config.json need at least {least}; "
            "fetch the files that are missing"
        )


def _with_dtype(spec: ModelSpec, config: Mapping[str, object], shards: Shards) -> ModelSpec:
    """Return the spec with the dtype of the embedding where config.json does not name one."""
    embedding = shards.tensors.get(EMBEDDING)
    if embedding is None or config.get("dtype") is not None or config.get("torch_dtype") is not None:
        return spec
    return dataclasses.replace(spec, dtype=ROUNDED.get(embedding.entry.dtype, spec.dtype))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
