"""A draft model beside models that are loaded at their first use: its memory is counted, and one that does
not fit is refused before the server listens."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.api.text.vocabularies import check_tokens
from penstock.base.config import SHIPPED_MODEL, Config
from penstock.base.errors import ConfigError
from penstock.engine.rooms import Hardware
from penstock.server import hosting
from penstock.server.hosting import Hosting
from penstock.server.settings import OnDemandSettings

HARDWARE = Hardware(False, 8 << 30, 8 << 30, 8 << 30, 8 << 30)


def other(path: Path, edit: Mapping[str, int], file: str = "config.json") -> Path:
    shutil.copytree(SHIPPED_MODEL, path)
    read = json.loads((path / file).read_text())
    (read if file == "config.json" else read["model"]["vocab"]).update(edit)
    (path / file).write_text(json.dumps(read))
    return path


def prepared(monkeypatch: pytest.MonkeyPatch, speculate: str) -> int:
    """Return the device memory that the shipped model may take."""
    monkeypatch.setattr(hosting, "hardware_of", lambda _: HARDWARE)
    config = Config(SHIPPED_MODEL, device="cpu", dtype="float32", kv_blocks=64, speculate=speculate)
    host = Hosting({"shipped": config}, {}, OnDemandSettings())
    host.prepare()
    assert host._prepared is not None
    return host._prepared.models[0].share.device


def test_weights_and_kv_of_a_draft_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, looked_up = (prepared(monkeypatch, speculate) for speculate in ("off", "suffix"))
    both = prepared(monkeypatch, str(SHIPPED_MODEL))
    assert looked_up == alone
    kv = 64 * 64 * (2 * 8 * 2 * 64 * 4)  # Blocks, tokens, and K and V of 8 layers with 2 heads.
    assert both - alone == pytest.approx(7_000_000 * 4 + kv, rel=0.05)


def test_the_weights_of_a_copy_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no KV. What auto takes is decided in the memory that is there without drafts."""
    alone, itself, auto = (prepared(monkeypatch, speculate) for speculate in ("off", "self", "auto"))
    bits = 4 + 24 / 128  # With a scale and a zero point for each 128; embedding and head have eight.
    assert itself - alone == pytest.approx(7_000_000 * bits / 8, rel=0.25)
    assert auto == alone


def test_a_draft_model_that_does_not_fit_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="4,000 tokens was asked for, but the model has 4,096"):
        prepared(monkeypatch, str(other(tmp_path / "fewer", {"vocab_size": 4000})))


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    vocab = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    names = sorted(vocab, key=vocab.__getitem__)
    first, second, third = names[2000], names[3000], names[4000]
    turned = {first: 4000, second: 2000, third: 3000}
    draft = other(tmp_path / "turned", turned, "tokenizer.json")
    with pytest.raises(ConfigError) as refused:
        check_tokens(SHIPPED_MODEL, draft)
    assert f"{second!r} is 2000 there and 3000 here" in str(refused.value)
