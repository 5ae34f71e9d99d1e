"""Chooses which files of a repository the engine needs: a checkpoint's, or those of one GGUF model.

Code, pickles and other formats are never among them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.hub.faults import HubError
from penstock.hub.names import GGUF, ModelName, part_of, quant_of, stem_of

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHAPE = (CONFIG, "quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that say what model a checkpoint is."""
SIDE = (
    *SHAPE,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "?_Pooling/config.json",
    "?_LogitScore/config.json",
)
"""Files that the engine reads beside the weights."""
ADAPTER = "adapter_config.json"
USUAL_QUANT = "Q4_K_M"
"""The quant that is taken where none is named, as llama.cpp and ollama do."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NO_MODEL = re.compile(r"(?:^|/)(?:mmproj|imatrix)|imatrix[^/]*$", re.IGNORECASE)
_SHOWN = 8


def side_files(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the files of a checkpoint that are not weights, sorted."""
    return tuple(sorted(path for path in paths if any(fnmatchcase(path, one) for one in SIDE)))


def shards_of(index: Mapping[str, object]) -> tuple[str, ...]:
    """Return the weight files that a checkpoint's index names, sorted."""
    weight_map = index.get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return tuple(sorted({name for name in names if isinstance(name, str)}))


def gguf_models(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the GGUF models among the files, by the first file of each: all its files, in order."""
    files = [path for path in paths if path.lower().endswith(GGUF) and not _NO_MODEL.search(path)]
    split: dict[tuple[str, int], list[str]] = {}
    for path in sorted(files):
        split.setdefault((stem_of(path), part_of(path)[1]), []).append(path)
    return {parts[0]: tuple(parts) for parts in split.values()}


def is_whole(parts: Sequence[str]) -> bool:
    """Tell whether these are all files of a GGUF model."""
    return len(parts) == part_of(parts[0])[1]


def is_checkpoint(paths: Iterable[str]) -> bool:
    """Tell whether the files are those of a checkpoint that can be read."""
    there = set(paths)
    return CONFIG in there and bool(there & {SINGLE, INDEX})


def choose_gguf(models: Mapping[str, tuple[str, ...]], name: ModelName) -> tuple[str, ...]:
    """Return the files of the GGUF model that a name means. Raises HubError if it is none of them, or none
    before others."""
    if not name.file:
        usual = _with_quant(models, USUAL_QUANT)
        found = usual or (list(models) if len(models) == 1 else [])
    elif name.is_quant:
        found = _with_quant(models, name.file)
    else:
        found = [first for first, parts in models.items() if name.file in parts]
        found = found or [one for one in models if one.rpartition("/")[2] == name.file.rpartition("/")[2]]
    if not found:
        what = (
            f"no GGUF file {name.file!r}" if name.file else f"several GGUF files, and none in {USUAL_QUANT}"
        )
        raise HubError(f"{_repository(name)} has {what}; name one of {shown_quants(models)}")
    return models[min(found, key=lambda first: (len(first), first))]


def _repository(name: ModelName) -> str:
    return str(name.with_file(""))


def _with_quant(models: Iterable[str], quant: str) -> list[str]:
    bounded = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?:$|[-._/])", re.IGNORECASE)
    exact = [first for first in models if quant_of(first) == quant.upper()]
    return exact or [first for first in models if bounded.search(stem_of(first))]


def shown_quants(models: Iterable[str]) -> str:
    """Return how the models may be named behind a colon, as far as a message has room for it."""
    firsts = list(models)
    quants = [quant_or_file(first, firsts) for first in firsts]
    more = f" and {len(quants) - _SHOWN} more" if len(quants) > _SHOWN else ""
    return ", ".join(f":{quant}" for quant in quants[:_SHOWN]) + more


def quant_or_file(first: str, models: Iterable[str]) -> str:
    """Return how a GGUF model is named behind a colon: by its quant, where no other has the same."""
    quant = quant_of(first)
    return quant if quant and [quant_of(one) for one in models].count(quant) == 1 else first


def nothing_to_run(paths: Iterable[str], name: ModelName) -> HubError:
    """Return the error for a repository that has no weights which are read."""
    there = sorted(paths)
    if name.file and is_checkpoint(there):
        return HubError(f"{name.repository} has no GGUF files; leave {name.file!r} out to run its checkpoint")
    pickles = [path for path in there if path.endswith(_PICKLES)]
    if pickles:
        return HubError(
            f"{name} has no weights in safetensors or GGUF, only pickle files ({pickles[0]}), which are not "
            "read since they can run code; look for a conversion of it"
        )
    if ADAPTER in there:
        return HubError(
            f"{name} holds a LoRA adapter ({ADAPTER}): name the model that it was made for, and a directory "
            "with this as its adapter"
        )
    if loose := [path for path in there if path.endswith(".safetensors")]:
        return HubError(
            f"{name} has weights ({loose[0]}), but not as {SINGLE} or {INDEX} beside {CONFIG}; look for the "
            "same model in the layout of Hugging Face"
        )
    has = f"it has {', '.join(there[:_SHOWN])}" if there else "it is empty"
    return HubError(f"{name} has no weights in safetensors or GGUF: {has}; name another model")
