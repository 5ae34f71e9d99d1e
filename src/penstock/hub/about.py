"""Says what a model is from its config.json, or from the header of its GGUF file; its weights need not be
there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.arch import bounds
from penstock.arch.families import family_of, read_spec
from penstock.arch.formats.recipe import name_of
from penstock.arch.layout import group_layouts
from penstock.hub.names import quant_of
from penstock.weights.checkpoint.config import read_config
from penstock.weights.gguf.config import read_gguf_config
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_LICENCE = "general.license"


@dataclass(frozen=True, slots=True)
class About:
    """Describes a model that the engine runs.

    context: tokens that it was trained for. format: of its weights. template: whether it has a chat template.
    licence: what its file says; empty if it says nothing.
    """

    family: str
    layers: int
    parameters: int
    context: int
    format: str
    template: bool
    licence: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Describe the model in a directory, of which config.json is read, or in a GGUF file, of which the
        header is read. Raises CheckpointError and UnsupportedModelError."""
        if not is_gguf(path):
            return cls._of(read_config(path), str(path / "config.json"), template=_has_template(path))
        with GGUFFiles(path, whole=False) as files:
            said = files.metadata.get(_LICENCE)
            return cls._of(
                read_gguf_config(files),
                str(path),
                template="tokenizer.chat_template" in files.metadata,
                licence=said if isinstance(said, str) else "",
                format=quant_of(path.name),
            )

    @classmethod
    def _of(
        cls,
        config: Mapping[str, object],
        where: str,
        *,
        template: bool,
        licence: str = "",
        format: str = "",
    ) -> Self:
        spec = read_spec(config, where)
        layouts = group_layouts(spec, family_of(config, where).names, spec.dtype)
        return cls(
            family=spec.family,
            layers=spec.layers,
            parameters=bounds.parameters(layouts),
            context=spec.max_length,
            format=format or name_of(spec.format) or spec.dtype,
            template=template,
            licence=licence,
        )


def _has_template(path: Path) -> bool:
    if any((path / one).exists() for one in _TEMPLATES):
        return True
    file = path / _TOKENIZER_CONFIG
    return file.exists() and bool(read_object(file, MAX_CONFIG_BYTES).get("chat_template"))
