"""Formats of few bits by the names that `penstock pack --to` and `--format` have for them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.arch.formats.dense import DENSE, Dense
from penstock.arch.formats.floats import Float4, Float8
from penstock.arch.formats.format import NUMBERS, TensorSlice, WeightFormat
from penstock.arch.formats.integers import Integers, Packing
from penstock.arch.formats.names import EMBEDDING, HEAD, ByName, ModuleNames, linears
from penstock.arch.formats.words import Words
from penstock.base.errors import ConfigError

METHOD = "penstock"
"""The `quant_method` of packs that penstock has quantised itself."""
VERSION = 1
"""Version of the arithmetic that finds codes and scales: another one makes another pack."""
GROUP = 64
"""Columns that share a scale where no other number is asked for."""
GROUPS = range(8, 4097)
"""Numbers of such columns that may be asked for."""
COPY_GROUPS = 128, 64, 32, 16, 8
"""The same for a copy that makes drafts: the first that divides the rows of every matrix."""
BFLOAT16 = "bf16"
"""The name of weights that are not quantised."""


@dataclass(frozen=True)
class DensePacking(Packing):
    """DensePacking reads the dense matrix itself: codes and scales are computed of it when a pack is made."""

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return the matrix."""
        return replace(source, dtypes=NUMBERS)

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return the matrix."""
        return replace(source, dtypes=NUMBERS)


_FORMATS: dict[str, WeightFormat] = {
    "int4": Integers("int4", bits=4, zeros=True, packing=DensePacking()),
    "int8": Integers("int8", bits=8, packing=DensePacking()),
    "fp8": Float8("fp8", block=(128, 128)),
    "mxfp4": Float4("mxfp4"),
    "nvfp4": Float4("nvfp4", 16, "float8_e4m3fn", second="weight_scale_2"),
}
FEW_BITS = tuple(_FORMATS)
"""Names of the formats of few bits."""
SHAPE_FORMATS = (BFLOAT16, *FEW_BITS)
"""Names of the formats that random weights may have."""
QUANTISED_TO = ("int4", "fp8", "int8")
"""Names of the formats that penstock quantises to."""


@dataclass(frozen=True)
class Recipe:
    """A recipe says how a model's matrices are quantised. Norms and routers stay dense, and usually embedding
    and head.

    format: one of `FEW_BITS`.
    group: columns that share a scale, and a zero point; 0 where the format fixes that.
    int8: parts of the names of modules that are kept in eight bits, where the others have four.
    measured: True if penstock has chosen these by what the model loses.
    ends: True if embedding and head are in eight bits, which is good enough for drafts.
    """

    format: str
    group: int = 0
    int8: tuple[str, ...] = ()
    measured: bool = False
    ends: bool = False

    @classmethod
    def of(cls, format: str, group: int | None = None, int8: tuple[str, ...] = ()) -> "Recipe":
        """Return the recipe of a format, with its usual group if none is given. Raises ConfigError for what
        the format does not have."""
        grouped = isinstance(_FORMATS[format], Integers)
        if group is not None and not grouped:
            raise ConfigError(f"{format} has blocks of a fixed size; leave --group out")
        if int8 and format != "int4":
            raise ConfigError(
                f"modules are kept in eight bits beside int4, not beside {format}; leave --int8 out"
            )
        return cls(format, (group or GROUP) if grouped else 0, int8)

    @classmethod
    def parse(cls, text: str) -> "Recipe | None":
        """Read a format of `SHAPE_FORMATS`, perhaps with a group: `int4`, `int4:128`. Return None for bf16.

        Raises ConfigError.
        """
        name, colon, group = text.partition(":")
        sized = group.isdecimal() and len(group) <= len(str(GROUPS.stop)) and int(group) in GROUPS
        if name not in SHAPE_FORMATS or (name == BFLOAT16 and colon) or (colon and not sized):
            raise ConfigError(
                f"{text[:40]!r} is none of {', '.join(SHAPE_FORMATS)}, nor one with a group of "
                f"{GROUPS[0]} to {GROUPS[-1]}: int4:128"
            )
        return None if name == BFLOAT16 else cls.of(name, int(group) if colon else None)

    @classmethod
    def read(cls, config: Mapping[str, object], where: str) -> "Recipe":
        """Return the recipe in what config.json says, see `config`. Raises UnsupportedModelError, naming the
        key."""
        words = Words(config, f"{where}: quantization_config")
        if words.number("version") != VERSION:
            words.refuse("version", f"{VERSION}, as `penstock pack --to` writes it now")
        format = words.one_of("format", "", FEW_BITS)
        group = words.number("group_size", 0)
        grouped = isinstance(_FORMATS[format], Integers)
        if group < 0 or bool(group) != grouped:
            words.refuse("group_size", "a number of columns, for int4 and int8 alone")
        flags = (words.flag(name, False) for name in ("measured", "ends_in_int8"))
        return cls(format, group, words.list("int8_modules"), *flags)

    def __str__(self) -> str:
        groups = f" in groups of {self.group}" if self.group else ""
        return self.format + groups + (f" with {', '.join(self.int8)} in int8" if self.int8 else "")

    def config(self) -> dict[str, object]:
        """Return what config.json says of it in `quantization_config`."""
        group = {"group_size": self.group} if self.group else {}
        kept = {"int8_modules": list(self.int8)} if self.int8 else {}
        how = {"measured": True} if self.measured else {}
        how |= {"ends_in_int8": True} if self.ends else {}
        return {"quant_method": METHOD, "version": VERSION, "format": self.format, **group, **kept, **how}

    def weight_format(self) -> WeightFormat:
        """Return the formats of all weights of a model."""
        format, eight = _FORMATS[self.format], _FORMATS["int8"]
        if isinstance(format, Integers):
            format = replace(format, checkpoint_group=self.group)
        assert isinstance(eight, Integers)
        wide = replace(eight, checkpoint_group=self.group or GROUP)
        excepted, all_others = linears(format)
        rules = (excepted, (ModuleNames(parts=self.int8), wide)) if self.int8 else (excepted,)
        if self.ends:
            rules = ((ModuleNames(whole=frozenset({EMBEDDING, HEAD})), wide), *rules)
        return ByName(METHOD, rules=(*rules, all_others))


def copy_recipe(format: WeightFormat, whose: str, group: int = COPY_GROUPS[0]) -> Recipe:
    """Return the recipe of a copy of a model that makes drafts for it.

    format: of the model's own weights. whose: begins the message of ConfigError, which is raised where these
    have few bits already. group: columns that share a scale.
    """
    if format != DENSE:
        raise ConfigError(
            f"speculate self drafts with a copy of a checkpoint in four bits, but {whose} weights of few "
            "bits already; give speculate suffix, or name a smaller model as the draft model"
        )
    return Recipe("int4", group, ends=True)


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a pack that penstock quantised. Raises UnsupportedModelError, naming the key."""
    return Recipe.read(config, where).weight_format()


def config_in(format: str | None, config: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Return a dense model's config.json with weights in a format, as `Recipe.parse` reads it; as it is for
    None.

    where: opens the message of ConfigError, which a model that is quantised already raises.
    """
    if format is None:
        return config
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{where} has a format of few bits already; leave --format out")
    recipe = Recipe.parse(format)
    return {**config, **({"quantization_config": recipe.config()} if recipe else {"dtype": "bfloat16"})}


def quantised_here(config: Mapping[str, object]) -> bool:
    """Tell whether a config.json is that of a model which was quantised by a recipe."""
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == METHOD


def name_of(format: WeightFormat) -> str:
    """Return the name by which reports call a model's format: that of most of its matrices, such as int4
    or gptq; empty for dense weights."""
    if format == DENSE:
        return ""
    if isinstance(format, ByName):
        few = [one.name for _, one in format.rules if not isinstance(one, Dense)]
        return "+".join(dict.fromkeys(few))
    return format.name


def name_with_group(format: WeightFormat) -> str:
    """Return the name of `name_of`, with the columns that share a scale where integers have groups:
    int4:128."""
    if not isinstance(format, ByName):
        group = format.checkpoint_group if isinstance(format, Integers) else 0
        return name_of(format) + (f":{group}" if group else "")
    few = [name_with_group(one) for _, one in format.rules if not isinstance(one, Dense)]
    return "+".join(dict.fromkeys(few))
