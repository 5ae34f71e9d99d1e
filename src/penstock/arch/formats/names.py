"""Tell which weights of a checkpoint are quantised, by the names of their modules, as quantisers say it."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.base.errors import UnsupportedModelError

MAX_PATTERN = 300
"""Characters of a pattern that are read, and beyond which no quantiser writes one."""
_QUANTIFIERS, _MOST = re.compile(r"(?<!\\)[*+{?]"), 5
"""A pattern of a stranger may not take forever: few quantifiers, and none of a group."""
_NESTED = re.compile(r"(?<!\\)\)[*+{?]")
_ALONE = re.compile(r"\(\?[PaiLmsux(-]|\\[1-9]")
"""An expression with names or numbers of groups, or with flags, cannot be a part of another."""
_EXPERT = re.compile(r"\.experts\.\d{1,9}\.")
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ROUTERS = (".mlp.gate", ".block_sparse_moe.gate", ".mlp.router", ".mlp.shared_expert_gate")
"""Ends of the names of routers of mixtures, and of gates of shared experts, which quantisers leave alone
without saying so."""


@dataclass(frozen=True)
class ModuleNames:
    """ModuleNames say which modules are meant: by whole names, regular expressions for the beginning of a
    name, parts, ends and globs.

    linear: whether every linear module is meant, the head too, but no embedding.
    """

    whole: frozenset[str] = frozenset()
    regexes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    linear: bool = False

    def has(self, module: str) -> bool:
        """Tell whether a module is meant."""
        return (
            module in self.whole
            or (self.linear and module != EMBEDDING)
            or any(part in module for part in self.parts)
            or module.endswith(self.ends)
            or any(fnmatch.fnmatchcase(module, glob) for glob in self.globs)
            or any(pattern.match(module) for pattern in _compiled(self.regexes))
        )


@dataclass(frozen=True)
class Listed(ModuleNames):
    """Modules are listed by whole names; `experts.*` stands for every expert of a layer."""

    def has(self, module: str) -> bool:
        """Tell whether a module is meant."""
        return module in self.whole or of_all_experts(module) in self.whole


def of_all_experts(module: str) -> str:
    """Return the name that stands for a module of every expert of a layer; another module's own name."""
    return _EXPERT.sub(".experts.*.", module)


def together(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return kinds by the names of modules, for experts that are all of one kind by a name for all."""
    found = dict[str, dict[str, str]]()
    for module, kind in kinds.items():
        found.setdefault(of_all_experts(module), {})[module] = kind
    listed = dict[str, str]()
    for name, each in found.items():
        some = set(each.values())
        listed |= {name: some.pop()} if len(some) == 1 else each
    return listed


Rule = tuple[ModuleNames, WeightFormat]
"""Modules, and the format that they are in."""


@dataclass(frozen=True)
class ByName(WeightFormat):
    """A checkpoint whose weights rest in several formats: the first rule that has a weight's module."""

    rules: tuple[Rule, ...] = ()
    unread: tuple[str, ...] = ()
    """Ends of the names of tensors that no product of ours reads, such as scales of activations."""

    def of(self, tensor: str) -> WeightFormat:
        """Return the format of a weight: dense where no rule has it."""
        module = tensor.removesuffix(".weight")
        return next((format for names, format in self.rules if names.has(module)), DENSE)

    def ignores(self, tensor: str) -> bool:
        """Tell whether a tensor is one of those that no product of ours reads."""
        return tensor.endswith(self.unread)


def linears(format: WeightFormat, *, head: bool = False) -> tuple[Rule, ...]:
    """Return the rules by which all linear modules but routers rest in `format`, the head only if `head`."""
    excepted = ModuleNames(whole=frozenset() if head else frozenset({HEAD}), ends=ROUTERS)
    return (excepted, DENSE), (ModuleNames(linear=True), format)


@lru_cache(maxsize=256)
def _compiled(regexes: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Return patterns of which one matches where one of the regular expressions does: a single one of all
    that can be parts of another, since a list may name three modules of every layer."""
    joined = [regex for regex in regexes if not _ALONE.search(regex)]
    alone = [regex for regex in regexes if _ALONE.search(regex)]
    whole = ["|".join(f"(?:{regex})" for regex in joined)] if joined else []
    return tuple(re.compile(regex) for regex in whole + alone)


def checked_regex(regex: str, key: str, *, inside: bool = False) -> str:
    """Return a regular expression for the beginning of a module's name. Raises UnsupportedModelError, naming
    `key`, for one that is none or may take forever. inside: whether it is to be a part of another."""
    try:
        re.compile(f"(?:{regex})" if inside else regex)
        fits = (
            len(regex) <= MAX_PATTERN
            and len(_QUANTIFIERS.findall(regex)) <= _MOST
            and not _NESTED.search(regex)
        )
    except (re.error, OverflowError, RecursionError):
        fits = False
    if not fits:
        raise UnsupportedModelError(
            f"{key} has the pattern {regex[:80]!r}; supported: regular expressions of at most {MAX_PATTERN} "
            f"characters with at most {_MOST} quantifiers, none of a group"
        )
    return regex
