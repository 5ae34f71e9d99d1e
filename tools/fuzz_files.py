"""Files that somebody else made, changed at random, led by which code of penstock they reach (with atheris,
from `make fuzz-files`).

    python tools/fuzz_files.py                        every kind of file, 10,000 changed ones of each
    python tools/fuzz_files.py header --runs 100000   one kind
    python tools/fuzz_files.py header --again FILE    once more a file that was found

A changed file must be read, or refused with a PenstockError: within 10 seconds, with at most 1 GiB more
memory than before, and with no file opened outside its directory. What breaks this is written beside the
report, as `fuzz-<kind>-...`.
"""

import argparse
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

HOME = Path(__file__).resolve().parent.parent
SECONDS, MEMORY = 10, 1 << 30
SECRET = bytes(range(32))
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
RECORD = 4096
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    127,
    128,
    255,
    256,
    65535,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**30,
)
VALUES = (
    *NUMBERS, None, True, False, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "a", "F32", "BF16", "I64",
    "../../etc/passwd",
    "/etc/passwd", "\ud800", "\0", "a" * 100_000, [], {}, [[]], [0, 1 << 60], ["LlamaForCausalLM"],
)  # fmt: skip
SNIPPETS = (
    "{{ 'a' * 10**9 }}", "{{ 10**10**8 }}", "{% for i in range(10**9) %}{% endfor %}",
    "{% for a in messages %}{% for b "
    "in messages %}",
    "{{ messages | tojson }}", "{{ ''.join(['a' * 10**6] * 10**5) }}", "{{ 'a' | center(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}", "{{ messages.__class__.__mro__ }}", "{% include '/etc/passwd' %}",
    "{% set x = 'a' %}",
    "{% set x = x ~ x %}", "{{ raise_exception('no') }}", "{{ cycler('a').__init__.__globals__ }}",
    "{% macro m() %}{{ m() }}{% endmacro %}",
    "{{ m() }}", "{%", "%}", "{{", "}}", "{#", "#}", "loop.index0", "namespace(a=1)", "| indent(10**9)",
    "| slice(10**9)", "~", "\n", "\0",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of file: `prepare` makes the directory in which `file` will be changed, `read` does with it all
    that penstock would."""

    file: str
    prepare: Callable[[Path], None]
    read: Callable[[Path], object]
    change: str = "bytes"
    """bytes, json, header (JSON after its length, before data) or template."""


def _checkpoint(path: Path) -> None:
    import tiny

    shutil.copytree(tiny.checkpoint("llama"), path, dirs_exist_ok=True)


def _shards(path: Path) -> None:
    import tiny

    tiny.load(tiny.checkpoint("llama")).save_pretrained(path, max_shard_size="60KB")


def _read_checkpoint(path: Path) -> None:
    import torch

    from penstock.arch.layout import group_layouts
    from penstock.weights.checkpoint.reader import Checkpoint

    with Checkpoint.open(path) as checkpoint:
        for layout in group_layouts(checkpoint.spec, checkpoint.names, "bfloat16"):
            if layout.size < MEMORY // 8:
                checkpoint.read_piece(layout, 0, torch.empty(layout.size, dtype=torch.uint8))


def _words(path: Path) -> None:
    """A tokenizer of 300 tokens, since reading a large one takes most of a run's time, and a chat
    template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    shutil.copy(HOME / "src/penstock/shipped/tokenizer_config.json", path)
    (path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim "
        "}}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["Once upon a time there was a little penstock."] * 20, trainer)
    made.save(str(path / "tokenizer.json"))


def _read_words(path: Path) -> None:
    from penstock.api.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(path)
    text = "Once upon a time é \U0001f600 <s>"
    tokenizer.least_tokens(text)
    tokens = tokenizer.encode(text)
    tokenizer.decode(tokens)
    detokenizer = tokenizer.detokenizer(stop=["x"])
    for token in tokens:
        detokenizer.push([token])
    detokenizer.finish()
    tokenizer.render_chat([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "There"}])


def _gguf(path: Path) -> None:
    import gguf_bytes

    gguf_bytes.write(path / "model.gguf", gguf_bytes.LLAMA | gguf_bytes.TOKENS, gguf_bytes.tensors())


def _read_gguf(path: Path) -> None:
    from penstock.api.text.tokenizer import Tokenizer

    _read_checkpoint(path / "model.gguf")
    tokenizer = Tokenizer.from_model(path / "model.gguf")
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("ab ab!"))


def _pack(path: Path) -> None:
    import tiny
    from penstock.weights.checkpoint.reader import Checkpoint
    from penstock.weights.pack.writer import write_pack

    with Checkpoint.open(tiny.checkpoint("llama")) as checkpoint:
        write_pack(checkpoint, path, "bfloat16")


def _read_pack(path: Path) -> None:
    import torch

    from penstock.weights.pack.reader import Pack

    with Pack.open(path) as pack:
        for layout, run in zip(pack.layouts, pack.manifest.runs, strict=True):
            if layout.size < MEMORY // 8:
                pack.read_piece(layout.id, 0, torch.empty(run.length, dtype=torch.uint8), check=True)


def _half_pack(path: Path) -> None:
    import tiny
    from penstock.weights.checkpoint.reader import Checkpoint
    from penstock.weights.pack import writer as packing

    def stop(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    checkpoint = Checkpoint.open(tiny.checkpoint("llama"))
    with checkpoint, patch.object(packing, "COMMIT_BYTES", 1), suppress(KeyboardInterrupt):
        packing.write_pack(checkpoint, path, "bfloat16", progress=stop)
    assert (path / packing.JOURNAL).exists()


def _go_on_packing(path: Path) -> None:
    _pack(path)
    _read_pack(path)


def _store(path: Path) -> None:
    from penstock.kv.store.blocks import BlockStore
    from penstock.kv.store.directory import StoreIdentity

    store = BlockStore.open(path, StoreIdentity(b"identity", RECORD, SECRET), 64 << 20)
    for number, key in enumerate(KEYS):
        store.write(key, memoryview(bytearray([number]) * RECORD), lambda: None).result()
    store.close()
    (folder,) = (each for each in path.iterdir() if each.is_dir())
    if not (path / "at").exists():
        (path / "at").symlink_to(folder.name)


def _read_store(path: Path) -> None:
    """What is read must be what was written, whatever the files say."""
    from penstock.kv.store.blocks import BlockStore
    from penstock.kv.store.directory import StoreIdentity
    from penstock.kv.store.diskpool import LostKV

    store = BlockStore.open(path, StoreIdentity(b"identity", RECORD, SECRET), 64 << 20, threads=(1, 1))
    try:
        for number, key in enumerate(KEYS):
            into = bytearray(RECORD)
            try:
                store.read(key, memoryview(into), lambda: None).result()
            except LostKV:
                continue
            if into != bytearray([number]) * RECORD:
                raise AssertionError(f"another record was given for {key.hex()}")
        for key in store.keys():  # noqa: SIM118 - it is no dict
            if key not in KEYS:
                with suppress(LostKV):
                    store.read(key, memoryview(bytearray(RECORD)), lambda: None).result()
                    raise AssertionError(f"a record that nobody wrote: {key.hex()}")
    finally:
        store.close()


def _routing(path: Path) -> None:
    import numpy as np

    from penstock.bench.routing.recording import Recording, RoutedModel

    chosen = np.arange(2 * 40 * 3).reshape(40, 3, 2).astype(np.uint8) % 8
    two = np.array([30, 10], np.int32)
    told = np.concatenate([chosen[:, 1:], (chosen[:, 1:] + 2) % 8], 2)
    model = RoutedModel("a", "qwen3_moe", "0", 8, 2, "b")
    Recording(model, np.arange(3, dtype=np.int32), two, two, chosen, told).write(path / "routing.npz")


def _read_routing(path: Path) -> None:
    from penstock.bench.routing.recording import Recording

    Recording.read(path / "routing.npz")


KINDS = {
    "config": Kind("config.json", _checkpoint, _read_checkpoint, "json"),
    "generation": Kind("generation_config.json", _checkpoint, _read_checkpoint, "json"),
    "header": Kind("model.safetensors", _checkpoint, _read_checkpoint, "header"),
    "index": Kind("model.safetensors.index.json", _shards, _read_checkpoint, "json"),
    "gguf": Kind("model.gguf", _gguf, _read_gguf),
    "tokenizer": Kind("tokenizer.json", _words, _read_words, "json"),
    "tokenizer-config": Kind("tokenizer_config.json", _words, _read_words, "json"),
    "template": Kind("chat_template.jinja", _words, _read_words, "template"),
    "manifest": Kind("manifest.json", _pack, _read_pack, "json"),
    "pack-journal": Kind("manifest.partial", _half_pack, _go_on_packing),
    "kv-journal": Kind("at/journal", _store, _read_store),
    "kv-segment": Kind("at/segment", _store, _read_store),
    "kv-about": Kind("at/store.json", _store, _read_store, "json"),
    "routing": Kind("routing.npz", _routing, _read_routing),
}


# ---- changes


def changed(data: bytes, how: str, random_: random.Random) -> bytes:
    if how == "template" and random_.random() < 0.6:
        text = data.decode(errors="replace")
        for _ in range(random_.randint(1, 3)):
            at, end = sorted(random_.randint(0, len(text)) for _ in range(2))
            text = text[:at] + random_.choice(SNIPPETS) + text[end if random_.random() < 0.2 else at :]
        return text.encode(errors="replace")
    if how == "json" and random_.random() < 0.8:
        return _changed_json(data, random_)
    if how == "header" and len(data) >= 8 and random_.random() < 0.8:
        size = int.from_bytes(data[:8], "little")
        header = _changed_json(data[8 : 8 + size], random_)
        length = len(header) if random_.random() < 0.9 else random_.choice(NUMBERS) % (1 << 64)
        return length.to_bytes(8, "little") + header + data[8 + size :]
    return _changed_bytes(data, random_)


def _changed_json(data: bytes, random_: random.Random) -> bytes:
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        return _changed_bytes(data, random_)
    for _ in range(random_.randint(1, 3)):
        places: list[tuple[dict | list, str | int]] = []
        queue = [table]
        while queue:
            node = queue.pop()
            found = (
                list(node)
                if isinstance(node, dict)
                else list(range(len(node)))
                if isinstance(node, list)
                else []
            )
            places += [(node, key) for key in found]
            queue += [node[key] for key in found]
        if not places:
            return json.dumps(_value(random_)).encode(errors="replace")
        node, key = random_.choice(places)
        match random_.randrange(6):
            case 0:
                del node[key]
            case 1:
                other, name = random_.choice(places)
                with suppress(KeyError, IndexError, RecursionError):
                    node[key] = json.loads(json.dumps(other[name]))
            case 2 if isinstance(node[key], int | float) and not isinstance(node[key], bool):
                node[key] = random_.choice(
                    (node[key] * 2, -node[key], node[key] + 1, node[key] * (1 << 40), str(node[key]))
                )
            case 3 if isinstance(node, dict):
                node[str(random_.choice(VALUES))[:50]] = node.pop(key)
            case 4:
                for _ in range(random_.choice((1, 10, 2000))):
                    node[key] = [node[key]]
            case _:
                node[key] = _value(random_)
    with suppress(RecursionError, ValueError):
        return json.dumps(table, ensure_ascii=random_.random() < 0.9).encode(errors="replace")
    return data


def _value(random_: random.Random) -> object:
    return deepcopy(random_.choice(VALUES))


def _changed_bytes(data: bytes, random_: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 8))):
        at = random_.randrange(len(made) + 1)
        match random_.randrange(6):
            case 0 if at < len(made):
                made[at] ^= 1 << random_.randrange(8)
            case 1:
                made[at : at + random_.choice((1, 4, 100))] = b""
            case 2:
                made[at:at] = random_.randbytes(random_.choice((1, 4, 100)))
            case 3:
                del made[at:]
            case 4:
                end = at + random_.randrange(64)
                made[at:at] = made[at:end] * random_.choice((1, 2, 1000))
            case _:
                width, form = random_.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
                made[at : at + width] = struct.pack("<" + form, random_.choice(NUMBERS) % (1 << 8 * width))
    return bytes(made)


# ---- runs


def _peak() -> int:
    """Most bytes of memory since `_forget_peak`."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) << 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Outside(Exception):
    """A file was opened that is none of the model's."""


class Runs:
    """One kind of file in a directory of its own, read anew with each change."""

    def __init__(self, kind: Kind, path: Path) -> None:
        self._kind, self._path, self._made = kind, path / "as-made", path / "read"
        self._path.mkdir()
        kind.prepare(self._path)
        if kind.file == "at/segment":  # its name has a number
            (segment,) = (file.name for file in (self._path / "at").iterdir() if file.suffix == ".segment")
            self._file = f"at/{segment}"
        else:
            self._file = kind.file
        self._allowed = [
            os.path.realpath(path) + "/",
            tempfile.gettempdir() + "/penstock-tiny-",
            "/dev/",
            "/proc/",
            "/sys/",
        ]
        self._allowed += [str(HOME), sys.prefix, sys.base_prefix, "/usr/"]
        self._outside: list[str] = []
        self.original = (self._path / self._file).read_bytes()
        self._put(self.original)
        kind.read(self._made)  # as it was made it is not refused
        self._watching = False
        sys.addaudithook(self._hook)  # which cannot be taken back

    def __enter__(self) -> "Runs":
        self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self._watching = False

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._watching and event == "open" and isinstance(name := arguments[0], str | bytes | os.PathLike):
            place = os.path.realpath(os.fsdecode(name))
            if not place.startswith(tuple(self._allowed)):
                self._outside.append(place)

    def _put(self, data: bytes) -> None:
        if (
            not self._made.exists()
            or self._kind.file == "manifest.partial"
            or self._kind.file.startswith("at/")
        ):
            shutil.rmtree(self._made, ignore_errors=True)  # what reads it writes there too
            shutil.copytree(self._path, self._made, symlinks=True)
        (self._made / self._file).write_bytes(data)

    def read(self, data: bytes) -> None:
        """Raises what reading raises but for refusals, and Outside."""
        from penstock.base.errors import PenstockError

        self._put(data)
        _forget_peak()
        before = _peak()
        with suppress(PenstockError):
            self._kind.read(self._made)
        if self._outside:
            found, self._outside = self._outside, []
            raise Outside(", ".join(found))
        if (grown := _peak() - before) > MEMORY + len(data):
            raise MemoryError(f"{grown >> 20} MiB more than before")


def fuzz(name: str, runs: int, seed: int, again: Path | None, out: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["penstock"]):
        import penstock.api.text.tokenizer
        import penstock.arch.layout
        import penstock.kv.store.blocks
        import penstock.weights.pack.reader
        import penstock.weights.pack.writer  # noqa: F401
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder, ExitStack() as stack:
        one = stack.enter_context(Runs(KINDS[name], Path(folder)))
        if again:
            one.read(again.read_bytes())
            return
        (Path(folder) / "seeds").mkdir()
        (Path(folder) / "seeds" / "original").write_bytes(one.original)

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            random_ = random.Random(seed)
            return changed(data if random_.random() < 0.7 else one.original, KINDS[name].change, random_)[
                :most
            ]

        limit = (_peak() + 2 * MEMORY) >> 20
        arguments = [
            sys.argv[0], f"-runs={runs}", f"-seed={seed}", f"-timeout={SECONDS}", f"-rss_limit_mb={limit}",
            f"-malloc_limit_mb={MEMORY >> 20}",
            f"-max_len={len(one.original) + (4 << 20)}", f"-artifact_prefix={out}/fuzz-{name}-",
            "-print_final_stats=1", "-len_control=0",
            f"{folder}/seeds",
        ]  # fmt: skip
        atheris.Setup(arguments, one.read, custom_mutator=mutate)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        choices=[*KINDS, []],
        metavar="KIND",
        help=f"of files: {', '.join(KINDS)}; all of them if none is named",
    )
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="a file that was found, to be read once more")
    parser.add_argument("--out", type=Path, default=Path(), help="where files that are found are written")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(HOME / "tests"))
    if args.one or args.again:
        fuzz(args.kinds[0], args.runs, args.seed, args.again, args.out)
        return
    failed = []
    for name in args.kinds or KINDS:
        more = ["--runs", str(args.runs), "--seed", str(args.seed), "--out", str(args.out), "--one"]
        ran = subprocess.run(
            [sys.executable, __file__, name, *more], capture_output=True, text=True, errors="replace"
        )
        told = [line for line in ran.stderr.splitlines() if "cov:" in line]
        print(
            f"{name:17} {'failed' if ran.returncode else 'well'}  "
            f"{told[-1].split(chr(9))[1].strip() if told else ''}",
            flush=True,
        )
        if ran.returncode:
            failed.append(name)
            lines = [
                line for line in (ran.stdout + ran.stderr).splitlines() if not line.startswith(("INFO", "#"))
            ]
            print("\n".join(lines)[-3000:])
    sys.exit(f"found in {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
