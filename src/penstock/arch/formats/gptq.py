"""GPTQ and what has its layout: AutoRound's `auto_gptq`. Words hold eight or four rows of `[in, out]`.

Source of the layout: GPTQModel's documentation of `checkpoint_format` "gptq" and "gptq_v2".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arch.formats import found
from penstock.arch.formats.awq import AWQPacking
from penstock.arch.formats.codes import as_bytes, in_words
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import NUMBERS, WORDS, TensorSlice, WeightFormat, beside
from penstock.arch.formats.integers import SCALES, Integers, Packing
from penstock.arch.formats.names import ByName, ModuleNames, Rule, checked_regex, linears
from penstock.arch.formats.words import Words

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

METHOD = "gptq"
WORD = 32
"""Bits of a word of codes."""


@dataclass(frozen=True)
class GPTQPacking(Packing):
    """Words along the input, first code in the low bits; zero points along the output.

    plus_one: whether zero points are stored as one less, as in the first version of the format. GPTQModel and
        AutoRound subtract that from words: a zero point of 0 borrows from the next.
    """

    plus_one: bool = True

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return `qweight`, int32 `[in * bits / 32, out]`."""
        height, width = source.shape
        return TensorSlice(beside(source, "qweight"), (-(-width * bits // WORD), height), dtypes=WORDS)

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return `scales` `[groups, out]`."""
        return TensorSlice(beside(source, "scales"), (groups, source.shape[0]), dtypes=NUMBERS)

    def zeros(self, source: TensorSlice, groups: int, bits: int) -> TensorSlice:
        """Return `qzeros`, int32 `[groups, out * bits / 32]`."""
        return TensorSlice(
            beside(source, "qzeros"), (groups, -(-source.shape[0] * bits // WORD)), dtypes=WORDS
        )

    def order(self, source: TensorSlice) -> TensorSlice:
        """Return `g_idx`, int32 `[in]`."""
        return TensorSlice(beside(source, "g_idx"), (source.shape[1],), dtypes=WORDS)

    def read_codes(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the codes, uint8 `[out, in]`."""
        return in_words(as_bytes(whole.t()), bits, shape[1])

    def read_scales(self, whole: "Tensor", shape: tuple[int, int]) -> "Tensor":
        """Return the scales `[out, groups]`."""
        return whole.t()

    def read_zeros(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the zero points as codes, uint8 `[out, groups]`."""
        ones = sum(1 << at for at in range(0, WORD, bits))
        return in_words(as_bytes(whole + ones if self.plus_one else whole), bits, shape[0]).t()


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint of GPTQ. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    version = words.text("checkpoint_format", words.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2", "gemm"):
        raise words.unsupported(
            f"checkpoint_format {version!r}", "gptq, gptq_v2, where other layouts are for one GPU only"
        )
    default = _integers(words, words, GPTQPacking(plus_one=version != "gptq_v2"))
    rules = list[Rule]()
    for pattern, override in words.objects("dynamic").items():
        key = f"{where}: quantization_config.dynamic"
        regexes: tuple[str, ...] = (checked_regex(pattern.removeprefix("-:").removeprefix("+:"), key),)
        format = DENSE if pattern.startswith("-:") else _integers(override, words, default.packing)
        if rules and rules[-1][1] == format:  # One rule has all that follow each other.
            regexes = (*rules.pop()[0].regexes, *regexes)
        rules.append((ModuleNames(regexes=regexes), format))
    head = linears(default, head=words.flag("lm_head", False))
    return ByName(METHOD, rules=(*found.rules(words, default), *rules, *head))


def _integers(words: Words, default: Words, packing: Packing) -> Integers:
    """Return the format that `words` say, and `default` where they say nothing."""
    bits = words.number("bits", default.number("bits", 4))
    if bits not in (4, 8):
        words.refuse("bits", "4, 8")
    group = words.number("group_size", default.number("group_size", 128))
    symmetric = words.flag("sym", default.flag("sym", True))
    ordered = words.flag("desc_act", default.flag("desc_act", False))
    return Integers(
        METHOD, bits, checkpoint_group=max(group, 0), scale=default.one_of(SCALES, "float16", NUMBERS),
        zeros=not symmetric, ordered=ordered, packing=packing,
    )  # fmt: skip


def read_auto_round(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint of AutoRound, which are those of GPTQ or AWQ. Raises
    UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    packing = _layout(words)
    words.one_of("data_type", "int", ("int",))
    default = _integers(words, words, packing)
    exact, patterns = dict[WeightFormat, list[str]](), list[Rule]()
    key = f"{where}: quantization_config.extra_config"
    for name, override in words.objects("extra_config").items():
        format = DENSE if override.number("bits", 4) >= 16 else _integers(override, words, packing)
        exact.setdefault(format, []).append(name)
        if _PATTERN.search(name):  # It is looked for anywhere in a name.
            regex = f".*?(?:{checked_regex(name, key, inside=True)})"
            patterns.append((ModuleNames(regexes=(regex,)), format))
    named = [(ModuleNames(whole=frozenset(names)), format) for format, names in exact.items()]
    rules = (*found.rules(words, default), *named, *patterns, *linears(default))
    return ByName("auto-round", rules=rules)


def _layout(words: Words) -> Packing:
    """Return where AutoRound has the numbers. Its older versions name the kernel that reads them."""
    key = "packing_format" if words.get("packing_format") is not None else "backend"
    parts = words.text(key, "auto_gptq").replace("auto_round:", "").replace("autoround:", "").split(":")
    layout = _LAYOUTS.get(parts[0].removeprefix("auto_"))
    if layout is None:
        words.refuse(key, "auto_round:auto_gptq, auto_round:gptqmodel, auto_round:auto_awq")
    return layout


_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")
"""Characters that make a name of a module a pattern."""
_LAYOUTS: dict[str, Packing] = {
    "gptq": GPTQPacking(),
    "gptqmodel": GPTQPacking(plus_one=False),
    "awq": AWQPacking(),
}
