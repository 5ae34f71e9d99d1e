"""Names what other engines call by another name than penstock does: options, and arguments in Python."""

import functools
import inspect
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import TypeVar

Made = TypeVar("Made", bound=type)

_OURS = {
    "--max-model-len": "--max-length",
    "--ctx-size": "--max-length",
    "--num-ctx": "--max-length",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--gpu-memory-utilization": "--device-memory, such as 90%",
    "--n-gpu-layers": "--device-memory, such as 16GiB; what does not fit streams",
    "--gpu-layers": "--device-memory, such as 16GiB; what does not fit streams",
    "--cpu-offload-gb": "--device-memory, such as 16GiB; what does not fit streams",
    "--swap-space": "--host-kv-memory",
    "--max-num-seqs": "--max-sequences",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--tensor-parallel-size": "--tensor-parallel",
    "--enable-prefix-caching": "--prefix-cache, which is on by default",
    "--enforce-eager": "--no-graphs",
    "--served-model-name": "--name",
    "--alias": "--name",
    "--speculative-config": "--speculate",
    "--speculative-model": "--speculate",
    "--model-draft": "--speculate",
    "--api-key": "--api-keys, a file; or the variable PENSTOCK_API_KEYS: all users of a machine see "
    "what is typed",
}
"""Our options by those of vLLM, llama.cpp and ollama."""
_NEEDLESS = {
    "--quantization": "a checkpoint's config.json says how it is quantised; leave it out",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--disable-log-stats": "nothing is logged with each step; leave it out",
}
"""Options of theirs that are not needed here, and why."""
_ARGUMENTS = {
    "max_new_tokens": "max_tokens",
    "best_of": "n",
    "guided_decoding": "structure, a Structure",
    "structured_outputs": "structure, a Structure",
    "include_stop_str_in_output": "include_stop",
}
"""Arguments of other engines in Python that are no options of their command lines."""


def ours_for(option: str, known: Collection[str]) -> str | None:
    """Return what an option of another engine is called here; None if it is none that we know, or none of
    these options is it."""
    ours = _OURS.get(option)
    return ours if ours and ours.split(",")[0].split(";")[0] in known else None


def needless(option: str) -> str | None:
    """Return why an option of another engine is not needed here; None if it is none that we know."""
    return _NEEDLESS.get(option)


def unknown_argument(name: str, known: Collection[str]) -> str:
    """Say what may have been meant by an argument in Python that is not known, behind what is wrong."""
    option = "--" + name.replace("_", "-")
    ours = _ARGUMENTS.get(name) or _argument_of(_OURS.get(option, ""))
    if ours and re.split("[,;= ]", ours)[0] in known:
        return f"; here it is {ours}"
    if why := _NEEDLESS.get(option):
        return f"; {why}"
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; help() names those that there are"


def _argument_of(option: str) -> str:
    """Return an option as it is written in Python."""
    name, rest = re.match(r"([\w-]*)(.*)", option, re.DOTALL).groups()  # type: ignore[union-attr]  # It matches all.
    if name.startswith("--no-"):
        return f"{name[5:].replace('-', '_')}=False{rest}"
    return f"{name.removeprefix('--').replace('-', '_')}{rest}"


def named_arguments(made: Made) -> Made:
    """Let a class say what may have been meant by an argument that it does not know."""
    init: Callable[..., None] = made.__init__  # type: ignore[misc]  # Nobody derives from it.
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        for name in kwargs.keys() - set(known):
            meant = unknown_argument(name, known)
            raise TypeError(f"{made.__name__}() got an unexpected keyword argument {name!r}{meant}")
        init(self, *args, **kwargs)

    made.__init__ = __init__  # type: ignore[misc]
    return made
