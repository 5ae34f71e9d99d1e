"""Kernels as compilers for GPUs see them, which need no GPU: the interpreter does not know what these refuse,
or what a device lacks."""

import json
import os
import sys
from pathlib import Path

import pytest

import forks
import tiny

pytest.importorskip("triton")

from penstock.ops.triton import warp_tiles

TESTS = Path(__file__).resolve().parents[1]
LARGE = (
    "decode, with log-sum-exp",
    "run, wide heads, known",
    "run, float32, tree",
    "merge",
    "write",
    "fold, float32",
    "draw",
    "routers, in groups",
    "pointwise, half of a head",
    "experts, gpt-oss",
    "decode, sinks",
    "run, sinks, placed",
    "adapters, large",
)
"""Each kernel once, and where one takes most."""
FEW_BITS = (
    "few bits experts, gpt-oss",
    "few bits, integers in turn",
    "few bits, NVFP4 in turn",
    "few bits experts, float16",
)
BLOCKS = ("blocks of GGUF in turn",)
"""The same of few bits, and of GGUF's blocks: low bits, high bits and levels, and more rows of the one
of which a program holds most."""
EARLY = (
    "decode, one row",
    "pointwise",
    "linear",
    "linear, more rows",
    "adapters",
    "steps",
    "sums",
    "few bits, zero points in turn",
    "few bits, MXFP4 in turn",
    "few bits experts, small groups",
    "blocks of GGUF, four bits in turn",
)
"""Where launches may begin before those before them have ended, which devices can from 9.0 on. What such a
kernel does besides is all that it has of its own: as it is otherwise, it is compiled only if all is to be
tested."""
COMPILING = "import sys, compiling; compiling.tell(sys.argv[1:])"
EVERYTHING = [(capability, ()) for capability in (80, 86, 89, 90, 100, 120)]


@pytest.mark.parametrize(
    ("capability", "cases"),
    EVERYTHING if tiny.THOROUGH else [(89, LARGE), (89, FEW_BITS), (89, BLOCKS), (90, EARLY)],
)
def test_every_kernel_compiles_for_it_and_fits(
    capability: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("triton.backends.nvidia")
    early = ["--early"] if cases == EARLY else []
    output = _run("-c", COMPILING, *early, str(capability), *cases, cache=tmp_path)
    most, *kernels = map(json.loads, output.splitlines())
    assert len(kernels) >= 2 * len(cases or LARGE + FEW_BITS + BLOCKS)
    assert not cases or {kernel["case"] for kernel in kernels} == set(cases)
    assert all(kernel["early"] for kernel in kernels) or not early
    assert not [kernel for kernel in kernels if kernel["shared"] > most]
    assert not [kernel for kernel in kernels if {"write", "end"} & set(kernel.get("before", ()))]
    assert not [kernel for kernel in kernels if kernel["overtakes"]]
    assert cases != EARLY or sum(kernel["products"] for kernel in kernels) > 2
    # The products of a warp are used with a compiler that deals tensors out as they need, and no other.
    dealt = [each for kernel in kernels for each in kernel["dealt"]]
    assert {each.startswith("[32, 1, 1] [1, ") for each in dealt} <= {warp_tiles.DEALT}
    assert dealt or cases not in ((), FEW_BITS, EARLY)


def test_what_begins_early_waits_on_every_way_before_it_writes_and_before_it_ends(tmp_path: Path) -> None:
    """A kernel that writes sooner may write what another still reads; and the end of one that does not wait
    is not the end of those before it."""
    pytest.importorskip("triton.backends.nvidia")
    few = "few bits experts, few tokens", "few bits experts that come"
    cases = "slots, few", "routers, few", "experts, few", *few
    output = _run("-c", COMPILING, "--early", "--ptx", "90", *cases, cache=tmp_path)
    kernels = list(map(json.loads, output.splitlines()))[1:]
    early = [(one["kernel"], set(one["before"])) for one in kernels if "before" in one]
    products = [before for name, before in early if name == "_expert_columns"]
    assert {name for name, _ in early} == {
        "_expert_step", "_foretell", "_give", "_take", "_route_one", "_choose", "_arrange", "_gate_up",
        "_down", "_combine", "_expert_columns",
    }  # fmt: skip
    assert not [name for name, before in early if {"write", "end"} & before]
    # What says where experts are is read sooner by the one with down alone, which begins when the one before
    # it has waited; and not where experts come and go.
    assert products == [set(), {"launch", "read"}, set(), set()]
    assert not [name for name, before in early if "read" in before and name != "_expert_columns"]


def test_adapters_begin_beside_a_product_that_has_waited(tmp_path: Path) -> None:
    """So what they read is there, and past caches that may hold what was there before; and one of their
    programs waits, behind all that they write, for the end of that product."""
    pytest.importorskip("triton.backends.nvidia")
    cases = "adapters beside one row", "adapters beside few rows"
    output = _run("-c", COMPILING, "--early", "--ptx", "90", *cases, cache=tmp_path)
    kernels = list(map(json.loads, output.splitlines()))[1:]
    assert [one["kernel"] for one in kernels] == [
        *("_one_row", "_shrink", "_expand_gated"),
        *("_few_rows", "_shrink", "_expand_gated"),
    ]
    for product, shrink, expand in (kernels[:3], kernels[3:]):
        assert not {"launch", "write", "end"} & set(product["before"])
        assert shrink["before"] == ["end", "launch", "read", "write"]
        assert (shrink["waits"], shrink["cached"]) == (1, 0)
        assert expand["before"] == ["launch", "read"]


ADAPTED = """
from unittest.mock import patch
import torch
from triton.runtime import JITFunction
from pretending import pretended
from penstock.arch.layout import GroupId, GroupKind
from penstock.models.inputs import LoraInputs
from penstock.ops import lora
from penstock.ops.kernels import pdl_launches
from penstock.ops.matrix import Matrix

def run(self, *given, grid, warmup, **more):
    said = {"BEFORE_OTHERS": "lets", "HIDDEN": "hidden", "launch_pdl": "early"}
    print(" ".join([self.__name__, *(word for name, word in said.items() if more.get(name))]), end=", ")

group, like = GroupId(GroupKind.FFN, 0), torch.empty(0, dtype=torch.bfloat16)
with pretended(), pdl_launches(), patch.object(JITFunction, "run", run):
    weight, gates = Matrix.of(like.new_zeros(512, 512)), (256, 256)
    bank = {group: {"qkv": lora.LoraMatrix((256, 128, 128), 512, slots=2, rank=8, like=like)}}
    bank[group]["gate_up"] = lora.LoraMatrix(gates, 512, slots=2, rank=8, like=like)
    for rows in (1, 16):
        for hides in ((False, True, False), (True, False)):
            every, x = lora.StackedRows(torch.zeros(rows, dtype=torch.int64), 2), like.new_zeros(rows, 512)
            step = LoraInputs(bank, every, every)
            for number, lora.HIDES in enumerate(hides):
                if number:
                    step.gated((group, "gate_up"), x, weight, None)
                else:
                    step.linear((group, "qkv"), x, weight, None)
            print()
"""


def test_a_steps_first_launch_of_adapters_is_early_only_if_it_is_hidden(tmp_path: Path) -> None:
    """Else what says which row has which adapter may not be there. A product that is not asked to lets the
    next launch begin at once."""
    pytest.importorskip("triton.backends.nvidia")
    lines = _run("-c", ADAPTED, cache=tmp_path).splitlines()
    for base, (first, second) in zip(("_one_row", "_few_rows"), (lines[:2], lines[2:]), strict=True):
        hidden = f"{base} lets early, _shrink hidden early"
        later = f"{base} early, _shrink early, _expand_gated early, "
        assert first == f"{base} early, _shrink, _expand early, {hidden}, _expand_gated early, {later}"
        assert second == f"{hidden}, _expand early, {later}"


def test_what_changes_in_place_waits_until_all_threads_have_read_it(tmp_path: Path) -> None:
    """Threads share what is read, and one of them writes: without a barrier a late one reads what is new.

    That takes a pause between two warps of one program, as a GPU shared by processes makes it.
    """
    pytest.importorskip("triton.backends.nvidia")
    cases = (
        "merge", "fold, one", "fold, some", "pointwise, one head", "pointwise, half of a head",
        "sums, narrow", "slots, some", "adapters, float32",
    )  # fmt: skip
    output = _run("-c", COMPILING, "--ptx", "89", *cases, cache=tmp_path)
    kernels = list(map(json.loads, output.splitlines()))[1:]
    changing = ("_merge", "_fold", "_rope", "_project", "_norm_together", "_expert_step", "_expand")
    assert {kernel["kernel"] for kernel in kernels} >= set(changing)
    assert not [one for one in kernels if one["kernel"] in changing and not one["meets"]]
    # One of its threads looks whether it is time to end, for all of them.
    assert all(one["barriers"] for one in kernels if one["kernel"] == "_fetch_ahead")
    # Sums of few numbers need no barrier of the compiler's own. One is before turns change, and one before
    # the residual does, where its sum is normalised.
    assert [one["barriers"] for one in kernels if one["kernel"] == "_sum"] == [1, 2]


NAMES = """
import sys
from triton.runtime import JITFunction
from penstock.ops import kernels
for which in ("sampling", "attention", "linear", "steps", "sums"):
    kernels.triton_kernels(which)
modules = [one for name, one in sys.modules.items() if name.startswith("penstock.ops.triton.")]
functions = {
    f"{module.__name__}.{name}": one
    for module in modules
    for name, one in vars(module).items()
    if isinstance(one, JITFunction)
}
for name in sorted(functions, reverse=sys.argv[1] == "reverse"):
    print(name, functions[name].cache_key)
"""


def test_what_kernels_are_called_does_not_depend_on_which_is_launched_first(tmp_path: Path) -> None:
    """Else a later process would not find in the cache what an earlier one has compiled."""
    one, other = (_named(NAMES, order, cache=tmp_path) for order in ("forward", "reverse"))
    assert len(one) > 40
    assert one == other[::-1]


INTERRUPTED = """
from unittest.mock import patch
from triton.runtime.jit import DependenciesFinder
from penstock.ops import kernels
from penstock.ops.kernels import triton_kernels

def stop(self, function):
    raise KeyboardInterrupt

with patch.object(DependenciesFinder, "_update_hash", stop):
    try:
        triton_kernels("sampling")
    except KeyboardInterrupt:
        print("interrupted")
print(triton_kernels("sampling").draw_tokens.cache_key)
"""


def test_kernels_are_named_anew_where_naming_them_was_interrupted(tmp_path: Path) -> None:
    names = _named(NAMES, "forward", cache=tmp_path)
    _, name = _named(INTERRUPTED, cache=tmp_path)
    assert f"penstock.ops.triton.sampling.draw_tokens {name}" in names


NOTED = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from triton import knobs
from compiling import CASES, elsewhere
from penstock.ops.kernels import noted

def launch():
    for case in ("pointwise", "linear"):
        CASES[case]()

def fail():
    raise KeyError

def at_once(_):
    both.wait()
    return noted([fail, launch, fail] * 5)

launched, again, both = [], [], Barrier(2)
with elsewhere(90, launched.append), ThreadPoolExecutor(2) as pool:
    kernels, others = pool.map(at_once, range(2))
    list(pool.map(lambda compile: compile(), kernels))
    print(len(kernels), len(others), len(launched))
    print(len(noted([lambda: pool.submit(CASES["linear"]).result()])), len(launched))
    launched.clear()
    knobs.runtime.jit_cache_hook = lambda **launch: again.append(launch["fn"].name)
    list(pool.map(lambda compile: compile(), others))
    launch()
print(len(set(map(id, launched))), again)
"""


def test_kernels_that_are_noted_and_compiled_are_what_is_launched(tmp_path: Path) -> None:
    """Also where two threads note at once; what another thread launches meanwhile is launched."""
    pytest.importorskip("triton.backends.nvidia")
    assert _run("-c", NOTED, cache=tmp_path) == "7 7 0\n0 3\n7 []\n"


CUT_SHORT = """
from itertools import count
from compiling import CASES, elsewhere
from penstock.ops import kernels
from streams import STRIDE, cut_short

launched, held = [], []

def note():
    try:
        kernels.noted([CASES["linear"]])
    except KeyboardInterrupt as fault:
        held.append(fault)
        raise

with elsewhere(90, launched.append):
    CASES["linear"]()
    for where in count(step=STRIDE):
        struck = cut_short(note, where, ("penstock", "contextlib"))
        launched.clear()
        assert not kernels._NOTING.locked(), where
        CASES["linear"]()
        assert len(launched) == 3, where
        if not struck:
            break
print("never suspended" if where > 1000 else where)
"""


def test_an_interrupt_leaves_nothing_of_noting_in_effect(tmp_path: Path) -> None:
    """Though it is held by somebody, as an interactive Python does."""
    pytest.importorskip("triton.backends.nvidia")
    assert _run("-c", CUT_SHORT, cache=tmp_path) == "never suspended\n"


@pytest.mark.parametrize(
    "model",
    ["llama", "qwen3", "windows", "mixture", "gpt-oss"]
    if tiny.THOROUGH
    else ["windows", "mixture", "gpt-oss"],
)
def test_the_kernels_of_a_rehearsal_are_those_of_a_models_steps(model: str, tmp_path: Path) -> None:
    """As Triton tells kernels apart: each is noted once, as it is launched; a whole model needs no others."""
    pytest.importorskip("triton.backends.nvidia")
    noted, same, fewer, missing = _run(
        "-c", "import sys, pretending; pretending.main(sys.argv[1])", model, cache=tmp_path
    ).split(maxsplit=3)
    assert (int(noted) > 25, same, fewer, missing.strip()) == (True, "True", "True", "[]")


def _named(script: str, *words: str, cache: Path) -> list[str]:
    """Lines that a process prints in which nothing was imported before."""
    return _run("-c", script, *words, cache=cache, popen=forks.Popen).splitlines()


def _run(*arguments: str, cache: Path, popen: type[forks.Popen] = forks.CompilerPopen) -> str:
    """What a Python process prints in which kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    result = forks.run([sys.executable, *arguments], popen, env=environment, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout
