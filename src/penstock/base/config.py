"""Every setting of an engine, read once, checked, frozen. Derived numbers live in the budget, not here."""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.base.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_STORES = ("eager", "lazy", "off")
HOST_KV_DTYPES = ("auto", "fp8")
SKETCH_BITS = (0, 4, 8)
POLICIES = {"window": range(2, 3), "topk": range(1, 3), "vertical_slash": range(1, 65)}
"""Attention policies beside full, and how many numbers each may have."""

MOST = (1 << 31) - 1
"""Of tokens, blocks and the like: far beyond what any machine holds, and within what arithmetic on devices
counts."""
CACHE = Path("~/.cache/penstock")


@dataclass(frozen=True, slots=True)
class Config:
    """What an engine is asked to be. Sizes are text or bytes (see base.units); `auto` is decided at boot and
    printed.

    model: a Hugging Face checkpoint directory. device: auto, cpu, cuda or cuda:N. dtype: of weights,
    activations and KV; auto is the checkpoint's on CUDA, and on a CPU the faster exact one (see boot).
    device_memory: bytes the engine may take on the device in all: weights, activations and KV. host_memory:
    bytes the process may take in host memory, its RSS. On a CPU, where the device is part of the host, bytes
    the engine may
        take in all; what is allowed beyond device_memory holds weights that stream.
    host_kv_memory: bytes of host memory for KV of contexts longer than the device holds; 0 for none. By
    default what a sequence of
        `max_length` takes, if such a length was asked for and the device does not hold it beside the weights.
    disk_kv_memory, kv_directory: bytes of disk for KV that host memory does not hold either, and where; none
    if no size is given. host_kv_dtype: of KV in host memory and on disk: auto, as on the device, or fp8,
    rounded to a sixteenth with a scale for each block and
        head, in half the bytes of bfloat16.
    kv_store: when full KV blocks go from the device to host memory, and from there to disk, where later
    requests find them: eager, as they
        are computed; lazy, before the device gives them up; or off. Without host_kv_memory nothing is kept.
    kv_tile: tokens of such a context that pass through the device at a time; None is the usual.
    attention_policy, prefill_policy: what new tokens, and chunks of a prompt, read of KV beyond the device:
    full (exact),
        window:SINKS,RECENT, topk:BLOCKS or vertical_slash:COLUMNS,SLASH (see ops.policies).
    sketch_bits: bits of each number in the copy of keys by which a policy chooses, and from which follows how
    much it may miss. 4: a
        seventh of the KV, which is read beside what is chosen. 8: a quarter, which bounds more closely. 0: a
        sixty-fourth; blocks are then chosen by their keys' extremes, and the bound says next to nothing.
    missed_limit: the largest fraction of a token's attention that a policy may miss in a layer, as far as its
    bounds can tell; above it
        everything is read.
    cache: directory where packs are kept, which are made of models that need the disk while they run, and
    digests of weight files. max_length: longest sequence served; None is the model's. beyond_trained: allow a
    max_length beyond the positions that the model was trained for. block_size: tokens in a KV block.
    max_step_tokens, max_sequences: most tokens and most requests in one step; None is the device's usual.
    kv_blocks: KV blocks to allocate instead of what the budget leaves. prefix_cache: share KV between
    requests with equal prefixes. graphs: record decode steps as CUDA graphs when the engine starts, and
    replay them; without, every kernel is launched by itself. kernels: compute by kernels of our own where
    there are any, on a GPU with Triton; without, by plain torch, which is slower and needs no
        graphs: rows of any length are padded on the host, which cannot be recorded.
    tensor_parallel: devices among which the model is divided, a process for each; all of its ranks carry out
    the same steps. check: prove the ledger's invariants after every step (slow; for tests and hunting
    faults).
    """

    model: Path
    device: str = "auto"
    dtype: str = "auto"
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    host_kv_memory: str | int | None = None
    disk_kv_memory: str | int | None = None
    kv_directory: Path = CACHE
    host_kv_dtype: str = "auto"
    kv_store: str = "eager"
    kv_tile: int | None = None
    attention_policy: str = "full"
    prefill_policy: str = "full"
    sketch_bits: int = 4
    missed_limit: float | None = None
    max_length: int | None = None
    beyond_trained: bool = False
    block_size: int = 64
    max_step_tokens: int | None = None
    max_sequences: int | None = None
    kv_blocks: int | None = None
    prefix_cache: bool = True
    graphs: bool = True
    kernels: bool = True
    tensor_parallel: int = 1
    cache: Path = CACHE
    check: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        if self.kv_store not in KV_STORES:
            raise ConfigError(
                f"kv_store {self.kv_store!r} is not known; choose one of {', '.join(KV_STORES)}"
            )
        if self.host_kv_dtype not in HOST_KV_DTYPES:
            raise ConfigError(
                f"host_kv_dtype {self.host_kv_dtype!r} is not known; choose one of "
                f"{', '.join(HOST_KV_DTYPES)}"
            )
        kind, _, index = self.device.partition(":")
        if (
            kind not in ("auto", "cpu", "cuda")
            or (index and (kind != "cuda" or not index.isdecimal()))
            or self.device.endswith(":")
        ):
            raise ConfigError(f"device {self.device!r} is not known; choose auto, cpu, cuda or cuda:N")
        if self.missed_limit is not None and not (
            isinstance(self.missed_limit, int | float) and 0 <= self.missed_limit <= 1
        ):
            raise ConfigError(f"missed_limit {self.missed_limit!r} must be a fraction, from 0 to 1")
        if isinstance(self.sketch_bits, bool) or self.sketch_bits not in SKETCH_BITS:
            raise ConfigError(
                f"sketch_bits {self.sketch_bits!r} is not known; choose one of "
                f"{', '.join(map(str, SKETCH_BITS))}"
            )
        for name in ("attention_policy", "prefill_policy"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} {getattr(self, name)!r} must be text, as full or window:4,1024")
            policy_numbers(getattr(self, name))
        for name in ("kv_directory", "cache"):
            if not isinstance(value := getattr(self, name), Path) or "\0" in str(value):
                raise ConfigError(f"{name} {value!r} must be a path")
        for name in (
            "max_length",
            "block_size",
            "max_step_tokens",
            "max_sequences",
            "kv_blocks",
            "kv_tile",
            "tensor_parallel",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} {value!r} must be a whole number above zero")
            if value is not None and value > MOST:
                raise ConfigError(f"{name} {value:,} is more than any machine can do; give {MOST:,} or less")

    def changed(self) -> dict[str, object]:
        """The settings that are not the defaults, but the model, for a report in JSON."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        }
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def policy_numbers(text: str) -> tuple[str, tuple[int, ...]]:
    """Read an attention policy's name and numbers: `full`, `window:SINKS,RECENT`, `topk:BLOCKS` or
    `topk:BLOCKS,DENSE_LAYERS`, and `vertical_slash:COLUMNS,SLASH,...`. Raises ConfigError."""
    name, _, numbers = text.partition(":")
    if text == "full":
        return name, ()
    values = tuple(
        int(number) if number.isdecimal() and len(number) < 11 else -1 for number in numbers.split(",")
    )
    if len(values) not in POLICIES.get(name, ()) or not all(0 <= value <= MOST for value in values):
        raise ConfigError(
            f"attention policy {text!r} is not known; write full, window:SINKS,RECENT, "
            "topk:BLOCKS[,DENSE_LAYERS] or "
            f"vertical_slash:COLUMNS[,SLASH...], in whole numbers"
        )
    return name, values


def peers_disabled() -> bool:
    """Whether NCCL is told that GPUs do not reach each other's memory, which then holds for everybody."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")


def debug_requested() -> bool:
    """Whether PENSTOCK_DEBUG asks for tracebacks. The environment is read here and below, and nowhere else in
    the package."""
    return os.environ.get("PENSTOCK_DEBUG", "") not in ("", "0")


def terminal_kind() -> str:
    """What TERM says of the terminal; "dumb", which can only be written to line by line, where it says
    nothing."""
    return os.environ.get("TERM") or "dumb"


def source_commit() -> str | None:
    """The commit of these sources that PENSTOCK_COMMIT names, for a copy of them without git's history; a
    plus sign behind it says that files differ. None if it is not set. Raises ConfigError if it is no
    commit."""
    said = os.environ.get("PENSTOCK_COMMIT", "").strip()
    if said and not re.fullmatch(r"[0-9a-f]{7,40}\+?", said):
        raise ConfigError(
            f"PENSTOCK_COMMIT={said} is no commit; give what `git rev-parse HEAD` prints, with a + behind "
            "it if files differ"
        )
    return said or None


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that torchrun has started: which it is of how many, and which of those on its machine."""

    rank: int
    ranks: int
    local: int
    one_machine: bool
    """Whether all of them are known to be on this machine."""


def launched() -> Launched | None:
    """What torchrun says of this process; None where it has not started it. Raises ConfigError if that is no
    number."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    if not all(name in os.environ for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
        return None
    try:
        rank, ranks, local = (int(os.environ[name]) for name in names)
    except ValueError as error:
        said = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise ConfigError(
            f"the environment is that of torchrun, but for numbers in {said}; start with torchrun, or unset "
            "them"
        ) from error
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"the environment is that of torchrun, but RANK={rank} is none of WORLD_SIZE={ranks}; start "
            "with torchrun, or unset them"
        )
    return Launched(rank, ranks, local, os.environ.get("LOCAL_WORLD_SIZE") == str(ranks))
