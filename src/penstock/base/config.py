"""Declare every setting of an engine: once, checked, frozen. What follows from them is computed at boot."""

import os
import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.base.setting import (
    MOST,
    AnyPath,
    Declared,
    NamedPaths,
    OptionalPath,
    Size,
    setting,
    settings_of,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
POLICIES = {"window": range(2, 3), "topk": range(1, 3), "vertical_slash": range(1, 65)}
"""The attention policies beside full, each with how many numbers it may have."""
_DRAFTERS = ("off", "auto", "suffix", "self", "mtp")
CACHE = Path("~/.cache/penstock")
SHIPPED_MODEL = Path(__file__).parent.parent / "shipped"
"""The checkpoint that comes with the package."""


def check_device(text: str) -> None:
    """Raise ConfigError unless `text` is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        raise ConfigError(f"device {text!r} is not known; choose auto, cpu, cuda or cuda:N")


def check_speculate(text: str) -> None:
    """Raise ConfigError for a word that is no way to draft, and neither a path nor a name of a model."""
    if text not in _DRAFTERS and "/" not in text and not os.path.exists(text):
        raise ConfigError(
            f"speculate {text!r} is no way to draft tokens, and no model is called so; choose off, auto, "
            "suffix (which looks up what followed before), self (the model in four bits), mtp (the model's "
            "own MTP layer), or a draft model: a path that is there, or its name on the Hugging Face Hub, "
            "owner/name"
        )


def policy_numbers(text: str) -> tuple[str, tuple[int, ...]]:
    """Read an attention policy's name and numbers.

    The forms are `full`, `window:SINKS,RECENT`, `topk:BLOCKS`, `topk:BLOCKS,DENSE_LAYERS` and
    `vertical_slash:COLUMNS,SLASH,...`. Raises ConfigError.
    """
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


@dataclass(frozen=True, slots=True)
class Config(Declared):
    """Holds the settings of an engine. Each field declares one; penstock.base.setting says what follows from
    it.

    Sizes are text (16GiB, 80%) or bytes; a share is of the memory that is named. What depends on the model or
    the machine is checked at boot. Raises ConfigError for a value that is not allowed.
    """

    model: OptionalPath = setting(
        SHIPPED_MODEL,
        help="The model: the directory of a checkpoint or of a pack, a GGUF file, or owner/name on the "
        "Hugging Face Hub.",
        usual="the small model that comes with penstock",
    )
    _: KW_ONLY
    device: str = setting(
        "auto",
        help="Device to compute on: cpu, cuda, cuda:N, or auto, which is CUDA if there is any.",
        check=check_device,
    )
    dtype: str = setting(
        "auto",
        help="Data type of weights, activations and KV.",
        details="auto is the checkpoint's on CUDA, and on a CPU the faster one of those that are exact.",
        usual="auto: the model's, if fast here",
        choices=DTYPES,
    )
    device_memory: Size | None = setting(
        None,
        help="Most memory to take on the device: 16GiB, 80%.",
        details="Weights, activations and KV count. On a CPU this is host memory.",
        usual="CUDA 90%, CPU 50% of what is free",
    )
    host_memory: Size | None = setting(
        None,
        help="Most host memory for the process to take (RSS): 100GiB, 80%.",
        details="On a CPU it is the most that the engine takes in all: what it allows beyond device_memory "
        "holds weights that stream.",
        usual="CUDA 80% of what is free",
    )
    host_kv_memory: Size | None = setting(
        None,
        help="Host memory for KV of contexts longer than the device holds; 0 for none.",
        details="By default it is what a sequence of max_length takes, if max_length is given and the device "
        "does not hold it beside the weights. KV of earlier requests is kept there too, see kv_store.",
        usual="what max_length needs",
        limits=(0, MOST),
    )
    disk_kv_memory: Size | None = setting(
        None,
        help="Disk space for KV that host memory does not hold, also of earlier runs.",
        usual="none",
    )
    kv_directory: AnyPath = setting(CACHE, help="Directory for KV on disk.")
    host_kv_dtype: str = setting(
        "auto",
        help="Data type of KV in host memory and on disk.",
        details="auto is that of the device. fp8 takes half the bytes of bfloat16: values are rounded to a "
        "sixteenth, with a scale for each block and head.",
        choices=("auto", "fp8"),
    )
    kv_store: str = setting(
        "eager",
        help="When full KV blocks are copied to host memory and disk, for later requests.",
        details="eager copies them as they are computed, lazy before the device gives them up. Without "
        "host_kv_memory nothing is kept.",
        choices=("eager", "lazy", "off"),
    )
    kv_tile: int | None = setting(
        None,
        help="Tokens of KV beyond the device that are on the device at a time.",
        usual="64 MiB of KV",
        unit="tokens",
    )
    attention_policy: str = setting(
        "full",
        help="KV beyond the device that new tokens read: full, window:SINKS,RECENT or topk:BLOCKS.",
        details="full is exact. ops/policies.py explains the others.",
        check=policy_numbers,
    )
    prefill_policy: str = setting(
        "full",
        help="KV beyond the device that prompts read: as attention_policy, or vertical_slash:COLUMNS,SLASH.",
        check=policy_numbers,
    )
    sketch_bits: int = setting(
        4,
        help="Bits of each number in the sketch, the copy of keys by which policies choose blocks.",
        details="The sketch bounds the attention that a policy misses. 4 bits take a seventh of the KV's "
        "bytes. 8 take a quarter, and bound more closely. 0 take a sixty-fourth: blocks are chosen by the "
        "extremes of their keys, and the bound says little.",
        choices=(0, 4, 8),
    )
    missed_limit: float | None = setting(
        None,
        help="Fraction of a token's attention that a policy may miss in a layer; above it all KV is read.",
        usual="no limit",
        limits=(0, 1),
    )
    max_length: int | None = setting(
        None,
        help="Most tokens of prompt and output together.",
        usual="the model's",
        unit="tokens",
    )
    beyond_trained: bool = setting(
        False,
        help="Allow a max_length beyond the positions that the model was trained for.",
    )
    block_size: int = setting(64, help="Tokens in a KV block: a power of two, at most 256.", unit="tokens")
    max_step_tokens: int | None = setting(
        None,
        help="Most tokens to compute in one step.",
        usual="CUDA 8192, 16384 from 64 GiB; CPU 512",
        unit="tokens",
    )
    max_sequences: int | None = setting(
        None,
        help="Most sequences in one step.",
        usual="CUDA 256, CPU 64; run: its outputs",
        unit="sequences",
    )
    kv_blocks: int | None = setting(
        None,
        help="KV blocks on the device, instead of what device_memory leaves room for.",
        usual="as many as are useful and fit",
        unit="blocks",
    )
    prefix_cache: bool = setting(True, help="Share the KV of requests with equal prefixes.")
    graphs: bool = setting(
        True,
        help="Record decode steps as CUDA graphs at start and replay them, on a GPU.",
        details="Without, every kernel is launched by itself.",
    )
    kernels: bool = setting(
        True,
        help="Compute by Triton kernels on a GPU, otherwise by plain torch.",
        details="Plain torch is slower, and has no graphs: rows of any length are padded on the host, "
        "which cannot be recorded.",
    )
    speculate: str = setting(
        "off",
        help="Speculative decoding, off, or by drafts of: auto, suffix, self, mtp, a draft model, EAGLE-3.",
        details="A step verifies several drafted tokens, as many as pay by what was measured. suffix drafts "
        "what followed the last time that the newest tokens occurred in prompt or output: it pays where an "
        "output repeats, such as edited code. self drafts with a copy of the model in four bits, which is "
        "made once, in the cache, and uses the model's KV: it pays where weights stream. mtp drafts with the "
        "layer behind the last one that a checkpoint of GLM-4.5, 4.6 or 4.7 holds to predict one token "
        "further. A draft model is a smaller one with the same tokenizer, named as a model is, and so is an "
        "EAGLE-3 head that was made for the model. All of these stay on the device, and look-up drafts "
        "beside them where it gives more. auto is suffix, or self where that is forecast to pay by far; "
        "penstock plan shows how. Tokens are those that the model draws without drafts, up to rounding: "
        "several tokens are summed in another order than one.",
        check=check_speculate,
    )
    draft_memory: Size | None = setting(
        None,
        help="Most device memory for a draft model, or the copy of self, with its KV: 4GiB, 20%.",
        details="What it leaves of device_memory is the model's. Where the draft does not fit into it, auto "
        "is suffix, and otherwise penstock refuses to start.",
        usual="what the draft takes",
    )
    suffix_decoding_max_cached_requests: int = setting(
        0,
        help="Finished requests whose outputs drafts are looked up in, beside a request's own tokens.",
        details="The newest are kept, at most 65,536 tokens in all. Requests of another API key, where keys "
        "are separated, or of another LoRA adapter look in none of them. vLLM calls it so, too.",
        usual="0, none",
        limits=(0, MOST),
        unit="requests",
    )
    cpu_compute: str = setting(
        "off",
        help="Whether the CPU computes experts that the GPU lacks, in host memory.",
        details="It computes some while others come over the link, in steps of up to 16 tokens. Of models "
        "without experts it computes feed-forwards, in steps of up to 16 rows that decode. auto measures "
        "both, and leaves all to the link where that is faster. Sums are rounded otherwise than on the GPU, "
        "so tokens may differ.",
        choices=("off", "auto", "on"),
    )
    threads: int | None = setting(
        None,
        help="CPU threads to compute with.",
        details="By default a step has as many as its work is worth and as cores are free; what other "
        "processes keep busy is looked at every second. OMP_NUM_THREADS sets the same number for all steps. "
        "Several ranks share them.",
        usual="by the work and the free cores",
        limits=(1, 1024),
        unit="threads",
    )
    lora_modules: NamedPaths = setting(
        (),
        help="LoRA adapters to load at the start: name=path, each a directory that PEFT has written.",
        details="A request names the adapter that it is answered with. Requests of several adapters and of "
        "none are computed together.",
        usual="none",
    )
    max_loras: int | None = setting(
        None,
        help="Most LoRA adapters that are loaded at a time; 0 for none.",
        details="Their memory is taken at the start.",
        usual="as many as lora_modules",
        limits=(0, 1024),
        unit="adapters",
    )
    max_lora_rank: int | None = setting(
        None,
        help="Highest rank of LoRA adapters.",
        usual="that of lora_modules, but at least 16",
        limits=(1, 1 << 16),
    )
    tensor_parallel: int = setting(
        1,
        help="Devices to divide the model among, with a process (rank) for each.",
        unit="devices",
    )
    cache: AnyPath = setting(
        CACHE,
        help="Directory for packs, digests of weight files, and compiled CPU kernels.",
        details="The kernels are in its directory native.",
    )
    check: bool = setting(False, help="Check the KV ledger's invariants after every step (slow; for tests).")

    @property
    def draft_model(self) -> str | None:
        """Return what names the draft model; None without one."""
        return None if self.speculate in _DRAFTERS else self.speculate

    @property
    def drafter(self) -> str:
        """Return what drafts, in a word: off, auto, suffix, self, mtp, or model."""
        return self.speculate if self.speculate in _DRAFTERS else "model"

    @property
    def drafts_by_mtp(self) -> bool:
        """Tell whether the draft head is the MTP layer of the model's own checkpoint."""
        return self.speculate == "mtp"

    @property
    def drafts_itself(self) -> bool:
        """Tell whether the draft model is a copy of the model in few bits."""
        return self.speculate == "self"

    def changed(self) -> dict[str, object]:
        """Return the settings that are not the defaults, without the model, for a report in JSON."""
        values = {one.name: (getattr(self, one.name), one.default) for one in settings_of(Config)[1:]}
        changed = {name: value for name, (value, default) in values.items() if value != default}
        return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}


def peers_disabled() -> bool:
    """Tell whether NCCL_P2P_DISABLE keeps GPUs from reaching each other's memory, in all of this program."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")


def threads_named() -> bool:
    """Tell whether the environment says how many threads the CPU computes with: then torch has as many."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def debug_requested() -> bool:
    """Tell whether PENSTOCK_DEBUG asks for tracebacks.

    The environment is read in this file, and nowhere else in the package.
    """
    return os.environ.get("PENSTOCK_DEBUG", "") not in ("", "0")


def terminal_kind() -> str:
    """Return the terminal's kind by TERM; "dumb", which is written line by line, if TERM is not set."""
    return os.environ.get("TERM") or "dumb"


def state_directory() -> Path:
    """Return the directory for what is kept between runs and is no cache: by XDG_STATE_HOME, which must be
    absolute, or in the home."""
    return _xdg("XDG_STATE_HOME", "~/.local/state") / "penstock"


def completion_file(shell: str) -> tuple[Path, Path | None]:
    """Return the file for a shell's completion, and the file that has to load it; None where the shell finds
    it by itself."""
    if shell == "fish":
        return _xdg("XDG_CONFIG_HOME", "~/.config") / "fish" / "completions" / "penstock.fish", None
    script = _xdg("XDG_DATA_HOME", "~/.local/share") / "penstock" / f"completion.{shell}"
    home = Path(os.environ.get("ZDOTDIR") or "~") if shell == "zsh" else Path("~")
    return script, home.expanduser() / f".{shell}rc"


def _xdg(name: str, usual: str) -> Path:
    given = os.environ.get(name, "")
    return Path(given if os.path.isabs(given) else usual).expanduser()


def source_commit() -> str | None:
    """Return the commit that PENSTOCK_COMMIT names, for a copy of the sources without git's history.

    A plus sign behind it says that files differ. None if it is not set. Raises ConfigError if it is no
    commit.
    """
    said = os.environ.get("PENSTOCK_COMMIT", "").strip()
    if said and not re.fullmatch(r"[0-9a-f]{7,40}\+?", said):
        raise ConfigError(
            f"PENSTOCK_COMMIT={said} is no commit; give what `git rev-parse HEAD` prints, followed by + if "
            "files were changed"
        )
    return said or None


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that torchrun has started knows its place among the others.

    rank: its number, of `ranks` in all.
    local: its number on its machine.
    one_machine: whether all of them are known to be on this machine.
    """

    rank: int
    ranks: int
    local: int
    one_machine: bool


def launched() -> Launched | None:
    """Return the place that torchrun gave this process; None if torchrun did not start it.

    Raises ConfigError if the environment has no numbers.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    if not all(name in os.environ for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
        return None
    try:
        rank, ranks, local = (int(os.environ[name]) for name in names)
    except ValueError as error:
        said = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise ConfigError(
            f"torchrun's variables are set, but not all of them are numbers: {said}; start with torchrun, "
            "or unset them"
        ) from error
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"torchrun's variables are set, but RANK={rank} is not below WORLD_SIZE={ranks}; start with "
            "torchrun, or unset them"
        )
    return Launched(rank, ranks, local, os.environ.get("LOCAL_WORLD_SIZE") == str(ranks))
