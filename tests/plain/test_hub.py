"""Models of the Hub: fetched from a server that speaks its protocol, with the faults that networks have;
found again in the cache without a word to anybody; listed, and removed."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fcntl import flock
from pathlib import Path
from typing import BinaryIO

import pytest
from huggingface_hub import constants

import gguf_bytes
import hubs
from hubs import Hub, sha256
from penstock.base.config import SHIPPED_MODEL
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.hub import fetch
from penstock.hub.cache import CachedRepository, last_used
from penstock.hub.details import details
from penstock.hub.faults import HubError, UnreachableError
from penstock.hub.inventory import CacheRemoval, cached_models
from penstock.hub.models import locate, shape_of
from penstock.hub.names import ModelName
from penstock.hub.remote import RemoteFile
from penstock.hub.telling import Found, Offer, Telling

SMALL = {path: data for path, data in hubs.folder(SHIPPED_MODEL).items() if not path.endswith(".safetensors")}
WEIGHTS = bytes(range(256)) * 12_000
"""3 MB: what is fetched is not opened here."""
FILES = SMALL | {"model.safetensors": WEIGHTS, "README.md": b"---\nlicense: mit\n---\n"}
NAME = "fable/tiny"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hubs.serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server as new, with a model, and an empty cache."""
    hubs.begin(server, tmp_path, monkeypatch)
    monkeypatch.setattr(fetch, "PAUSE", 0.001)
    monkeypatch.chdir(tmp_path)
    server.add(NAME, FILES)
    return server


class Heard(Telling):
    """Notes what is told; refuses if asked to."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse, self.offers, self.advanced, self.ended = (
            refuse,
            list[Offer](),
            list[int](),
            list[Found](),
        )

    def agree(self, offer: Offer) -> None:
        self.offers.append(offer)
        if self.refuse:
            raise CheckpointError("no")

    def advance(self, count: int) -> None:
        self.advanced.append(count)

    def end(self, found: Found) -> None:
        self.ended.append(found)


def large(hub: Hub) -> list[str]:
    """The ranges that were asked of large files."""
    return [one.range for one in hub.asked if one.path.startswith("/cdn/") and one.method == "GET"]


def content(found: Found) -> dict[str, bytes]:
    return hubs.folder(found.path)


def partials(home: Path) -> list[int]:
    return [file.stat().st_size for file in home.rglob("*.incomplete")]


# ---- fetching


def test_what_the_engine_reads_is_fetched_and_nothing_else(hub: Hub) -> None:
    code = {
        "modeling_tiny.py": b"boom",
        "pytorch_model.bin": b"boom",
        "onnx/model.onnx": b"x",
        "vocab.json": b"{}",
    }
    commit = hub.add(NAME, FILES | code)
    heard = Heard()
    found = locate(NAME, heard)
    assert found.name == NAME
    assert content(found) == SMALL | {"model.safetensors": WEIGHTS}
    assert hub.fetched() == {*SMALL, "model.safetensors"}
    assert {one.split("/resolve/")[0] for one in hub.paths() if "/resolve/" in one} == {f"/{NAME}"}
    assert not [
        one for one in hub.paths() if not one.startswith((f"/{NAME}/", "/cdn/", f"/api/models/{NAME}/"))
    ]
    [offer] = heard.offers
    assert offer.size == sum(map(len, FILES.values())) - len(FILES["README.md"]) - len(SMALL["config.json"])
    assert sum(heard.advanced) == offer.size
    assert heard.ended == [found]
    assert CachedRepository.of(NAME).refs() == {"main": commit}


def test_what_is_whole_is_found_without_a_question(hub: Hub) -> None:
    found = locate(NAME)
    hub.asked.clear()
    for text in (NAME, f"hf.co/{NAME}", f"https://huggingface.co/{NAME}", f"{NAME}@main"):
        assert locate(text).path == found.path
    with shape_of(NAME) as shape:
        assert shape.path == found.path
    assert hub.asked == []


def test_revisions_are_branches_tags_and_commits(hub: Hub) -> None:
    first = hub.add(NAME, FILES)
    second = hub.add(NAME, FILES | {"model.safetensors": WEIGHTS[1:]}, "refs/pr/1")
    assert locate(f"{NAME}@refs/pr/1").path.name == second
    assert locate(f"{NAME}@{first}").path.name == first
    hub.asked.clear()
    for revision, commit in (("refs/pr/1", second), (second, second), (first, first), (first[:8], first)):
        assert locate(f"{NAME}@{revision}").path.name == commit
    assert hub.asked == []
    assert CachedRepository.of(NAME).refs() == {"refs/pr/1": second}
    with pytest.raises(HubError, match=f"{NAME} has no revision 'no' on 127.0.0.1:[0-9]+; give a branch"):
        locate(f"{NAME}@no")


def test_a_tag_may_read_like_the_beginning_of_a_commit(hub: Hub) -> None:
    commit = hub.add(NAME, FILES)
    hub.repositories[NAME].branches[commit[0]] = commit
    found = locate(f"{NAME}@{commit[0]}")
    hub.asked.clear()
    assert locate(f"{NAME}@{commit[0]}") == found
    assert hub.asked == []


def test_a_pull_brings_the_branch_to_what_it_is_now(hub: Hub) -> None:
    before = locate(NAME)
    other = hub.add(NAME, FILES | {"model.safetensors": WEIGHTS[::-1]})
    assert locate(NAME).path == before.path
    hub.failures = 99
    with pytest.raises(UnreachableError):
        locate(NAME, refresh=True)
    assert locate(NAME).path == before.path, "an earlier revision is used until the next one is whole"
    hub.failures = 0
    after = locate(NAME, refresh=True)
    assert after.path.name == other
    assert locate(NAME).path == after.path
    assert content(after)["model.safetensors"] == WEIGHTS[::-1]
    hub.asked.clear()
    heard = Heard()
    assert locate(NAME, heard, refresh=True).path == after.path
    assert heard.offers == []
    assert hub.fetched() == set()


def test_shards_are_those_of_the_index(hub: Hub) -> None:
    names = [f"model-0000{one}-of-00002.safetensors" for one in (1, 2)]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    shards = {names[0]: WEIGHTS, names[1]: WEIGHTS[5:]}
    stray = {"consolidated.safetensors": b"x", "model.safetensors.index.json": index}
    hub.add(NAME, SMALL | shards | stray)
    found = locate(NAME)
    assert set(content(found)) == {*SMALL, *names, "model.safetensors.index.json"}
    (found.path / names[1]).unlink()
    hub.asked.clear()
    assert content(locate(NAME))[names[1]] == WEIGHTS[5:]
    assert large(hub) == [], "its bytes are still there"
    hostile = json.dumps({"weight_map": {"a": "../../../../secret.safetensors"}}).encode()
    hub.add("evil/x", SMALL | {"model.safetensors.index.json": hostile})
    with pytest.raises(HubError, match="evil/x lacks"):
        locate("evil/x")


def test_a_digest_that_is_none_names_no_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "sha256", lambda data: "../../evil" if data == WEIGHTS else sha256(data))
    with pytest.raises(HubError):
        locate(NAME)
    assert not list(tmp_path.rglob("evil.incomplete"))


def test_names_that_lead_elsewhere_are_not_taken(hub: Hub) -> None:
    for path in ("additional_chat_templates/../../../../evil.jinja", "/evil.gguf"):
        hub.add("a/g", FILES | {path: b"x"})
        with pytest.raises(HubError, match="does not answer for a/g as the Hub does"):
            locate("a/g")
    commit = hub.add("a/h", FILES)
    there = hub.repositories["a/h"]
    there.commits["../../evil"] = there.commits[commit]
    there.branches["main"] = "../../evil"
    with pytest.raises(HubError, match="does not answer for a/h as the Hub does"):
        locate("a/h")


# ---- interruptions


def test_what_breaks_off_goes_on_at_the_next_byte(hub: Hub) -> None:
    hub.breaks_after += [1_000_000, 500_000, 0]
    heard = Heard()
    assert content(locate(NAME, heard))["model.safetensors"] == WEIGHTS
    last = len(WEIGHTS) - 1
    starts = [0, 1_000_000, 1_500_000, 1_500_000]
    assert large(hub) == [f"bytes={start}-{last}" for start in starts]
    assert sum(heard.advanced) == heard.offers[0].size


def test_what_was_given_up_goes_on_in_the_next_run(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_after += [1_000_000] + [0] * fetch.TRIES
    with pytest.raises(
        UnreachableError, match=f"model.safetensors of {NAME} cannot be fetched: .* does not answer"
    ):
        locate(NAME)
    assert partials(tmp_path) == [1_000_000]
    hub.asked.clear()
    heard = Heard()
    assert content(locate(NAME, heard))["model.safetensors"] == WEIGHTS
    assert large(hub) == [f"bytes=1000000-{len(WEIGHTS) - 1}"]
    assert heard.offers[0].size == sum(heard.advanced) == len(WEIGHTS) - 1_000_000
    assert partials(tmp_path) == []


def test_a_server_that_is_busy_is_asked_again(hub: Hub) -> None:
    hub.failures = fetch.TRIES - 1
    assert content(locate(NAME))["model.safetensors"] == WEIGHTS
    hub.add(NAME, FILES | {"model.safetensors": WEIGHTS[1:]})
    hub.failures = fetch.TRIES
    with pytest.raises(
        UnreachableError, match=f"answered 503 for model.safetensors of {NAME}; try again later"
    ):
        locate(NAME, refresh=True)


def test_a_server_without_ranges_sends_all_again(hub: Hub) -> None:
    hub.breaks_after += [1_000_000]
    hub.ranges = False
    heard = Heard()
    assert content(locate(NAME, heard))["model.safetensors"] == WEIGHTS
    assert -1_000_000 in heard.advanced
    assert sum(heard.advanced) == heard.offers[0].size


def test_what_is_stopped_does_not_read_all_that_was_begun(hub: Hub) -> None:
    file = RemoteFile("model.safetensors", len(WEIGHTS), "", sha256(WEIGHTS))
    begun = CachedRepository.of(NAME).blobs / f"{file.sha256}.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(WEIGHTS)
    fetching = fetch.Fetch(ModelName(NAME), "c" * 40)
    fetching.stop.set()
    with pytest.raises(fetch.FetchStopped):
        fetching._fetch_large(file)
    assert begun.read_bytes() == WEIGHTS


@pytest.mark.parametrize("begun", [b"wrong" * 1000, WEIGHTS + b"more"])
def test_a_wrong_beginning_is_not_kept(begun: bytes, hub: Hub, tmp_path: Path) -> None:
    blobs = CachedRepository.of(NAME).blobs
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(WEIGHTS)}.incomplete").write_bytes(begun)
    if len(begun) < len(WEIGHTS):
        with pytest.raises(
            HubError, match="its SHA-256 is another; what was fetched of it is removed; try again"
        ):
            locate(NAME)
    assert content(locate(NAME))["model.safetensors"] == WEIGHTS
    assert partials(tmp_path) == []


def test_wrong_bytes_get_no_name(hub: Hub, tmp_path: Path) -> None:
    hub.says = {sha256(WEIGHTS): b"\0" * len(WEIGHTS)}
    with pytest.raises(
        HubError, match=f"model.safetensors of {NAME} did not come as the Hub promised: its SHA-256"
    ):
        locate(NAME)
    assert not list(tmp_path.rglob("model.safetensors"))
    assert partials(tmp_path) == []
    hub.says = {sha256(WEIGHTS): WEIGHTS[:-1]}
    with pytest.raises(HubError, match="answered 416"):
        locate(NAME)
    hub.says = {"tokenizer.json": b"x" * len(SMALL["tokenizer.json"])}
    hub.add("other/x", FILES)
    with pytest.raises(HubError, match=r"tokenizer\.json of other/x did not come .* its digest is another"):
        locate("other/x")
    hub.says = {}
    assert content(locate("other/x")) == SMALL | {"model.safetensors": WEIGHTS}
    assert content(locate(NAME)) == SMALL | {"model.safetensors": WEIGHTS}


def test_two_that_fetch_the_same_file_fetch_it_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_POLL", 0.01)
    hub.hold = threading.Event()
    with ThreadPoolExecutor(2) as both:
        running = [both.submit(locate, NAME, Heard()) for _ in range(2)]
        while not large(hub):
            time.sleep(0.005)
        time.sleep(0.3)  # The other one comes to the file, too.
        hub.hold.set()
        found = [one.result(30) for one in running]
    assert large(hub) == [f"bytes=0-{len(WEIGHTS) - 1}"]
    assert content(found[0])["model.safetensors"] == WEIGHTS


def test_a_lock_on_a_file_that_was_renamed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process had it between opening and locking, and made it the blob."""
    path, locks = tmp_path / "x.incomplete", list[int]()

    def late(file: BinaryIO, how: int) -> None:
        if not locks:
            path.rename(tmp_path / "x")
        locks.append(how)
        flock(file, how)

    monkeypatch.setattr(fetch, "flock", late)
    monkeypatch.setattr(fetch, "_POLL", 0.001)
    with fetch._claimed(path, threading.Event()) as out:
        assert os.path.samestat(os.fstat(out.fileno()), path.stat())
    assert len(locks) == 2


# ---- refusals


def test_a_disk_without_room_is_told_before_anything_large(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    heard = Heard()
    with pytest.raises(
        HubError, match=r"fable/tiny takes 3\.18 MiB more, and the disk of .* has 1\.00 MiB free"
    ):
        locate(NAME, heard)
    assert (heard.offers, large(hub)) == ([], [])


def test_a_disk_that_gets_full_meanwhile_loses_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, chunk: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fetch._Tail, "write", full)
        with pytest.raises(
            HubError, match="the disk of the cache is full; free some space, and the same command"
        ):
            locate(NAME)
    assert content(locate(NAME))["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize("broken", ["hub", "hub/models--a--g/refs/v1"])
def test_a_cache_that_cannot_be_written_is_told(broken: str, hub: Hub, tmp_path: Path) -> None:
    hub.add("a/g", {"m-Q8_0.gguf": gguf(1000)}, "v1/x")
    (tmp_path / broken).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / broken).write_text("a file, where a directory is to be")
    with pytest.raises(HubError, match=r"^a/g@v1/x cannot be fetched: .*; see that HF_HOME is a directory"):
        locate("a/g@v1/x")


def test_what_is_refused_is_not_fetched(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"^no$"):
        locate(NAME, Heard(refuse=True))
    assert large(hub) == []
    with pytest.raises(HubError, match="neither here nor whole in the cache"):
        locate("a/b", fetch=False)
    assert not [one for one in hub.paths() if "a/b" in one]


def test_a_model_that_does_not_run_is_not_fetched(hub: Hub) -> None:
    hub.add("bert/base", FILES | {"config.json": b'{"model_type": "bert"}'})
    with pytest.raises(
        UnsupportedModelError,
        match=r"^bert/base was not fetched, since it does not run: config\.json: key 'model_type' is 'bert'",
    ):
        locate("bert/base", Heard())
    hub.add("pickled/x", SMALL | {"pytorch_model.bin": b"x"})
    with pytest.raises(HubError, match="only pickle files"):
        locate("pickled/x")
    hub.add("none/x", {"README.md": b""})
    with pytest.raises(HubError, match=r"no weights in safetensors or GGUF: it has README\.md"):
        locate("none/x")
    hub.add("maker/x", {"params.json": b"{}", "consolidated.safetensors": b"x"})
    with pytest.raises(HubError, match=r"has weights \(consolidated\.safetensors\), but not as model\.safe"):
        locate("maker/x")
    hub.add("lora/x", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    with pytest.raises(HubError, match=r"holds a LoRA adapter .*: name the model that it was made for"):
        locate("lora/x")
    with pytest.raises(HubError, match="fable/tiny has no GGUF files; leave 'Q8_0' out"):
        locate(f"{NAME}:Q8_0")
    assert large(hub) == []


def test_models_that_are_closed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gated", "private"):
        hub.add(f"shut/{name}", FILES)
        setattr(hub.repositories[f"shut/{name}"], name, "hf_right")
    gated = (
        "^shut/gated is gated: accept its terms at https://.*/shut/gated, then log in with `hf auth login`"
    )
    missing = "has no model {}, or it is private; check the name, or log in"
    for token in (None, "hf_wrong"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(HubError, match=gated):
            locate("shut/gated")
        for name in ("shut/private", "no/where"):
            with pytest.raises(HubError, match=missing.format(name)):
                locate(name)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.asked.clear()
    assert locate("shut/gated").path.is_dir()
    assert locate("shut/private").path.is_dir()
    tokens = {(one.path.startswith("/cdn/"), one.token) for one in hub.asked}
    assert tokens == {(False, "hf_right"), (True, "")}, "where files lie gets no token"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (500, "answered 500 for fable/tiny; try again later"),
        (429, "answered 429, too many requests, for fable/tiny; wait some minutes"),
        (403, "does not let you fetch fable/tiny: it answered 403; log in"),
        (418, "answered 418 for fable/tiny"),
    ],
)
def test_what_a_hub_may_answer(status: int, said: str, hub: Hub) -> None:
    hub.status = status
    with pytest.raises(HubError, match=said) as caught:
        locate(NAME)
    assert "\n" not in str(caught.value)


def test_without_a_network_what_is_here_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = locate(NAME)
    (found.path / "tokenizer.json").unlink()
    for change in ("offline", "down"):
        with monkeypatch.context() as patched:
            if change == "offline":
                patched.setattr(constants, "HF_HUB_OFFLINE", True)
            else:
                hubs.use("http://127.0.0.1:9", patched)
            assert locate(NAME).path == found.path, "it has weights, if no tokenizer"
            said = "HF_HUB_OFFLINE forbids" if change == "offline" else "127.0.0.1:9 does not answer"
            with pytest.raises(UnreachableError, match=said) as caught:
                locate("a/b")
            assert "\n" not in str(caught.value)
            with pytest.raises(UnreachableError):
                locate(NAME, refresh=True)
    assert (locate(NAME).path / "tokenizer.json").exists()


def test_something_that_is_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs.use(f"{hub.url}/cdn", monkeypatch)
    hub.says = {f"api/models/{NAME}/revision/main": b"<html>"}
    with pytest.raises(
        HubError, match="does not answer for fable/tiny as the Hub does; see that HF_ENDPOINT"
    ):
        locate(NAME)


def test_a_password_in_the_hubs_address_is_not_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs.use(hub.url.replace("//", "//me:secret@"), monkeypatch)
    with pytest.raises(HubError, match=r"^127.0.0.1:[0-9]+ has no model no/where") as caught:
        locate("no/where")
    assert "secret" not in str(caught.value)
    hubs.use("http://me:secret@127.0.0.1:9", monkeypatch)
    with pytest.raises(UnreachableError, match=r"127.0.0.1:9 does not answer") as caught:
        locate("no/where")
    assert "secret" not in str(caught.value)


# ---- what is here


def test_what_is_here_goes_first(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert locate(NAME) == Found(Path(NAME), "tiny")
    assert hub.asked == []
    assert locate(f"hf.co/{NAME}").path.name in CachedRepository.of(NAME).commits()
    assert locate("gpt2") == Found(Path("gpt2"), "gpt2"), "whoever opens it says that it is missing"


def test_when_a_model_was_used_is_noted_without_a_change_to_its_files(hub: Hub) -> None:
    found = locate(NAME)
    link, blob = found.path / "config.json", (found.path / "config.json").stat()
    os.utime(link, (0, 1000), follow_symlinks=False)
    assert last_used(found.path) == 1000
    locate(NAME)
    assert time.time() - last_used(found.path) < 100
    after = link.stat()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (blob.st_mtime_ns, blob.st_ctime_ns)


# ---- GGUF


def gguf(size: int, **metadata: object) -> bytes:
    """A GGUF file of about so many bytes, most of them an embedding's."""
    tensors = gguf_bytes.tensors(vocabulary=max(size // 32, 10))
    return gguf_bytes.file(gguf_bytes.LLAMA | gguf_bytes.TOKENS | metadata, tensors)


def test_a_header_is_fetched_alone_and_not_again(hub: Hub, tmp_path: Path) -> None:
    data = gguf(3_000_000, **{"general.license": "mit"})
    hub.add(
        "a/g", {"m-Q8_0.gguf": data, "m-Q4_K_M.gguf": gguf(100), "mmproj-F16.gguf": b"x", "README.md": b"x"}
    )
    with shape_of("a/g:Q8_0") as shape:
        assert shape.path.name == "m-Q8_0.gguf"
    assert not shape.path.exists()
    shown = details("a/g:q8_0")
    assert (shown.about.family, shown.about.format, shown.licence) == ("llama", "Q8_0", "mit")
    assert (shown.size, shown.state) == (len(data), "not here")
    assert large(hub) == [f"bytes=0-{(1 << 20) - 1}"]
    found = locate("a/g:Q8_0")
    assert found.path.read_bytes() == data
    assert large(hub)[1:] == [f"bytes={1 << 20}-{len(data) - 1}"]
    assert hub.fetched() == {"m-Q8_0.gguf"}
    hub.asked.clear()
    assert locate("a/g/m-Q8_0.gguf").path == locate("a/g").path == found.path, "the only one that is here"
    assert hub.asked == []
    assert locate("a/g:Q4_K_M").path.name == "m-Q4_K_M.gguf"
    assert locate("a/g").path.name == "m-Q4_K_M.gguf"


def test_a_long_header_is_fetched_to_its_end(hub: Hub) -> None:
    words = [f"word{'x' * 90}{at}" for at in range(20_000)]
    hub.add("a/g", {"m.gguf": gguf(100_000, **{"tokenizer.ggml.tokens": words})})
    with shape_of("a/g"):
        pass
    assert next(int(one.rpartition("-")[2]) + 1 for one in large(hub)) == 1 << 20
    assert len(large(hub)) == 2


def test_a_model_in_several_files(hub: Hub) -> None:
    parts = {}
    whole = gguf_bytes.tensors(vocabulary=1000)
    for at, some in enumerate((whole[:4], whole[4:])):
        split = {"split.count": 2, "split.no": at, "split.tensors.count": len(whole)}
        more = gguf_bytes.LLAMA if at == 0 else {"general.architecture": "llama"}
        parts[f"q/m-Q8_0-0000{at + 1}-of-00002.gguf"] = gguf_bytes.file(more | split, some)
    hub.add("a/g", parts)
    found = locate("a/g:Q8_0")
    assert found.path.name == "m-Q8_0-00001-of-00002.gguf"
    assert hub.fetched() == set(parts)
    assert details("a/g").size == sum(map(len, parts.values()))
    [one] = cached_models()
    assert (one.name, one.state) == ("a/g:Q8_0", "whole")
    (found.path.parent / "m-Q8_0-00002-of-00002.gguf").unlink()
    [one] = cached_models()
    assert (one.name, one.state) == ("a/g:Q8_0", "partial")
    assert locate("a/g:Q8_0") == found
    assert (found.path.parent / "m-Q8_0-00002-of-00002.gguf").exists()


# ---- the list


def test_the_list_says_what_is_whole_and_what_runs(hub: Hub, tmp_path: Path) -> None:
    assert list(cached_models()) == []
    locate(NAME)
    hub.add("a/g", {"m-Q8_0.gguf": gguf(2_000_000)})
    with shape_of("a/g"):
        pass
    hub.add("bert/base", FILES | {"config.json": b'{"model_type": "bert"}'})
    with pytest.raises(UnsupportedModelError):
        locate("bert/base")
    hub.add("part/x", FILES)
    hub.breaks_after += [10] + [0] * fetch.TRIES
    with pytest.raises(UnreachableError):
        locate("part/x")
    (tmp_path / "hub" / "models--odd--x" / "snapshots" / "c").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--some--x").mkdir()
    found = {one.name: one for one in cached_models()}
    assert {name: one.state for name, one in found.items()} == {
        "a/g": "partial",
        "bert/base": "not runnable: architecture bert",
        NAME: "whole",
        "odd/x": "not runnable: no config.json",
        "part/x": "partial",
    }
    whole = found[NAME]
    assert whole.size == sum(map(len, SMALL.values())) + len(WEIGHTS)
    assert whole.revision == f"main, {whole.commit[:7]}"
    assert whole.about is not None
    assert (whole.about.family, whole.about.parameters, whole.about.template) == ("llama", 6_951_168, True)


def test_what_is_removed_frees_what_no_other_revision_uses(hub: Hub, tmp_path: Path) -> None:
    first = locate(NAME).path.name
    hub.add(NAME, FILES | {"generation_config.json": b"{}"}, "next")
    second = locate(f"{NAME}@next")
    removal = CacheRemoval.of(ModelName(NAME, first[:9]))
    before = sum(file.stat().st_size for file in CachedRepository.of(NAME).blobs.iterdir())
    freed = len(SMALL["generation_config.json"])
    assert removal.frees == freed
    removal.run()
    assert before - sum(one.stat().st_size for one in CachedRepository.of(NAME).blobs.iterdir()) == freed
    assert content(locate(f"{NAME}@next", fetch=False))["model.safetensors"] == WEIGHTS
    assert CachedRepository.of(NAME).refs() == {"next": second.path.name}
    rest = CacheRemoval.of(ModelName(NAME))
    assert rest.everything
    assert rest.frees == before - freed
    rest.run()
    assert not CachedRepository.of(NAME).exists
    for name, said in ((NAME, "is not in the cache"), ("no/where", "is not in the cache")):
        with pytest.raises(HubError, match=said):
            CacheRemoval.of(ModelName(name))


def test_one_of_several_gguf_files_is_removed_alone(hub: Hub) -> None:
    files = {"m-Q8_0.gguf": gguf(1000), "m-Q4_K_M.gguf": gguf(2000)}
    hub.add("a/g", files)
    locate("a/g:Q8_0")
    with pytest.raises(HubError, match="no GGUF file 'Q5_0'; name one of :Q8_0"):
        CacheRemoval.of(ModelName("a/g", "", "Q5_0"))
    with pytest.raises(HubError, match="but not its revision 'x'"):
        CacheRemoval.of(ModelName("a/g", "x"))
    locate("a/g:Q4_K_M")
    removal = CacheRemoval.of(ModelName("a/g", "", "q8_0"))
    assert (removal.everything, removal.frees) == (False, len(files["m-Q8_0.gguf"]))
    removal.run()
    assert [one.name for one in cached_models()] == ["a/g:Q4_K_M"]
    last = CacheRemoval.of(ModelName("a/g", "", "Q4_K_M"))
    assert last.everything
    last.run()
    assert list(cached_models()) == []


def test_what_was_only_begun_is_removed_too(hub: Hub) -> None:
    hub.add("a/g", {"m-Q8_0.gguf": gguf(2_000_000)})
    with shape_of("a/g"):
        pass
    removal = CacheRemoval.of(ModelName("a/g"))
    assert removal.frees == 1 << 20
    removal.run()
    assert not CachedRepository.of("a/g").exists


def test_the_licence_is_that_of_the_card(hub: Hub) -> None:
    hub.repositories[NAME].card = {"license": "apache-2.0"}
    shown = details(NAME)
    assert (shown.licence, shown.state, shown.about.template) == ("apache-2.0", "not here", True)
    assert large(hub) == []
    found = locate(NAME)
    again = details(NAME)
    assert (again.licence, again.state, again.path, again.size) == (
        "apache-2.0",
        "whole",
        found.path,
        shown.size,
    )
    shutil.copytree(found.path, "plain")
    Path("plain/README.md").write_bytes(FILES["README.md"])
    assert (details("plain").licence, details("plain").name) == ("mit", "plain")
    before = details("plain").size
    Path("plain/weights.bin").write_bytes(bytes(5000))  # As a pack has it.
    assert details("plain").size == before + 5000
    shutil.copytree("plain", "hf.co/plain")  # Not owner and name behind the address: a directory.
    assert details("hf.co/plain").path == Path("hf.co/plain")
