"""Links of a model's directory: within it, and of the Hugging Face cache to its blobs; never to what else
there is on a machine."""

from pathlib import Path

import pytest

import gguf_bytes
from penstock.base.errors import CheckpointError
from penstock.weights.checkpoint.links import expect_inside
from penstock.weights.gguf.files import GGUFFiles


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "weights.bin",
    ],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_leads_out_is_refused(model: Path, name: str, absolute: bool) -> None:
    (model / name).symlink_to(model.parent / "secret" if absolute else "../secret")
    with pytest.raises(CheckpointError, match=r"is a link to .*/secret, outside of the model's directory"):
        expect_inside(model)


def test_so_is_one_by_way_of_another(model: Path) -> None:
    (model / "inner").symlink_to("../secret")
    (model / "config.json").symlink_to("inner")
    with pytest.raises(CheckpointError, match="outside"):
        expect_inside(model)


def test_so_are_templates_beside_the_first(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="outside"):
        expect_inside(model)
    (model / "additional_chat_templates" / "tool_use.jinja").unlink()
    (model / "additional_chat_templates").rmdir()
    (model / "additional_chat_templates").symlink_to("..")
    with pytest.raises(CheckpointError, match="outside"):
        expect_inside(model)


def test_what_stays_inside_or_is_not_read_is_no_fault(model: Path) -> None:
    (model / "real").write_text("{}")
    (model / "config.json").symlink_to("real")
    (model / "README.md").symlink_to("../secret")
    expect_inside(model)
    (model.parent / "name").symlink_to("model")
    expect_inside(model.parent / "name")


def test_the_cache_of_hugging_face(tmp_path: Path) -> None:
    hub = tmp_path / "models--one--model"
    snapshot = hub / "snapshots" / "abc"
    (hub / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (hub / "blobs" / "123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    expect_inside(snapshot)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    for elsewhere in ("../../refs/main", "../../../secret", "../def/config.json"):
        (snapshot / "generation_config.json").symlink_to(elsewhere)
        with pytest.raises(CheckpointError, match="outside"):
            expect_inside(snapshot)
        (snapshot / "generation_config.json").unlink()
    (tmp_path / "link").symlink_to(snapshot)
    expect_inside(tmp_path / "link")


def test_what_repositories_of_that_cache_share(tmp_path: Path) -> None:
    """Files that it has for several of them, which their blobs then lead to."""
    hub, store = tmp_path / "models--one--model", tmp_path / "blobs"
    for folder in (snapshot := hub / "snapshots" / "abc", hub / "blobs", store / "de", store / "fa"):
        folder.mkdir(parents=True)
    values = gguf_bytes.LLAMA | {"split.count": 2, "split.tensors.count": 11}
    whole = gguf_bytes.tensors()
    for at, place in enumerate(("de/dead", "fa/fade")):
        data = gguf_bytes.file(values | {"split.no": at}, whole[:5] if at == 0 else whole[5:])
        (store / place).write_bytes(data)
        (hub / "blobs" / str(at)).symlink_to(f"../../blobs/{place}")
        (snapshot / f"m-0000{at + 1}-of-00002.gguf").symlink_to(f"../../blobs/{at}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0")
    first = snapshot / "m-00001-of-00002.gguf"
    with pytest.raises(CheckpointError, match="outside"):
        expect_inside(snapshot)
    with pytest.raises(CheckpointError, match="outside"):
        GGUFFiles(first)
    (store / ".huggingface-shared-blobs").write_text("1\n")
    expect_inside(snapshot)
    with GGUFFiles(first) as files:
        assert len(files.tensors) == 11
    other = tmp_path / "models--other" / "blobs"
    other.mkdir(parents=True)
    (other / "123").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(other / "123")
    with pytest.raises(CheckpointError, match="outside"):
        expect_inside(snapshot)
