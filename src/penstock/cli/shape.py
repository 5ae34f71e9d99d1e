"""Reads the shape of the model that `penstock plan` is asked about, which need not be here. Nothing here
imports torch."""

from pathlib import Path

from penstock.arch.families import TensorNames, family_of, read_spec
from penstock.arch.formats.recipe import METHOD, config_in
from penstock.arch.heads import HeadSpec, check_kind, is_head, read_head
from penstock.arch.mtp import no_mtp, read_mtp
from penstock.arch.spec import ModelSpec
from penstock.base.errors import CheckpointError, PenstockError
from penstock.bench.shapes import SHAPES
from penstock.cli.terminal import one_line
from penstock.engine.limits import check_positions
from penstock.hub.models import local, shape_of
from penstock.hub.names import ModelName
from penstock.weights.checkpoint.config import read_config
from penstock.weights.gguf.config import read_gguf_config
from penstock.weights.gguf.files import GGUFFiles, is_gguf
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object
from penstock.weights.pieces import MANIFEST


def open_model(model: str, weight_format: str | None = None) -> tuple[str, ModelSpec, TensorNames]:
    """Return a name to show, and the shape. Raises CheckpointError, ConfigError, UnsupportedModelError.

    weight_format: the format of weights instead of the model's; None is the model's.
    """
    path = Path(model)
    if model in SHAPES and not path.exists():
        config, where, name = SHAPES[model], model, model
    elif (wanted := ModelName.parse(model)) and local(model) is None:
        with shape_of(model) as found:
            return str(wanted), *open_model(str(found.path), weight_format)[1:]
    else:
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            shapes, loose = ", ".join(SHAPES), sorted(path.glob("*.gguf"))
            such = f" by name: {loose[0]}" if loose else ""
            raise CheckpointError(
                f"{file} does not exist; give a config.json, a directory with one, or one of the shapes "
                f"{shapes}, or owner/name on the Hugging Face Hub, or a GGUF file{such}"
            )
        where, named = str(file), file.resolve()
        if is_gguf(file):
            with GGUFFiles(file, whole=False) as files:
                config, name = read_gguf_config(files), one_line(named.name)
        else:
            config = read_config(path) if path.is_dir() else read_object(file, MAX_CONFIG_BYTES)
            name = one_line(named.parent.name)
    config = config_in(weight_format, config, where)
    return name, read_spec(config, where), family_of(config, where).names


def expect_trained(model: Path, length: int, asked: str) -> None:
    """Raise ConfigError for a length beyond the positions that a model which is here was trained for. What
    else is wrong with the model, loading says. asked: what asks for it, as the message names it."""
    try:
        _, spec, _ = open_model(str(model))
    except PenstockError:
        return
    check_positions(spec, length, asked)


def open_head(model: str) -> HeadSpec | None:
    """Return the draft head that a text means; None if it means another model, or nothing.

    Raises ConfigError for a draft head of a kind that does not run here, CheckpointError and
    UnsupportedModelError.
    """
    path = Path(model)
    if model in SHAPES and not path.exists():
        return None
    if ModelName.parse(model) and local(model) is None:
        with shape_of(model) as found:
            return open_head(str(found.path))
    file = path / "config.json" if path.is_dir() else path
    if not file.exists() or is_gguf(file):
        return None
    config = read_config(path) if path.is_dir() else read_object(file, MAX_CONFIG_BYTES)
    check_kind(config, str(file))
    return read_head(config, str(file)) if is_head(config) else None


def open_mtp(model: str, spec: ModelSpec) -> HeadSpec:
    """Return the MTP layer of a model that `open_model` has opened. Raises ConfigError if it has none."""
    path = Path(model)
    if model in SHAPES and not path.exists():
        return read_mtp(SHAPES[model], spec, model)
    if ModelName.parse(model) and local(model) is None:
        with shape_of(model) as found:
            return open_mtp(str(found.path), spec)
    if is_gguf(path):
        raise no_mtp(f"{model} is a GGUF file, in which it is not read")
    if (path / MANIFEST).exists():
        raise no_mtp(f"{model} is a pack, which has none")
    if spec.format.name == METHOD:
        raise no_mtp("weights in another format than the model's are in a pack, which has none")
    config = read_config(path) if path.is_dir() else read_object(path, MAX_CONFIG_BYTES)
    return read_mtp(config, spec, str(path / "config.json" if path.is_dir() else path))
