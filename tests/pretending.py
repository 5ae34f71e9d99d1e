"""A CUDA device that is not there: tensors lie in host memory and say that they are on it, and torch computes
there. Kernels of ours are noted or shown, and never run. In a process where Triton does not interpret.

    python tests/pretending.py NAME
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import JITFunction, driver

from compiling import SHARED, Driver
from penstock.arch.layout import group_layouts, kv_layout
from penstock.arch.shards import WHOLE
from penstock.base.config import Config
from penstock.bench.shapes import LAYERS_OF, SHAPES
from penstock.engine import parts
from penstock.engine.contexts import LongRoom
from penstock.engine.parts import blank_runner, make_carrier, make_runner
from penstock.engine.plan import Outline
from penstock.engine.rooms import Hardware
from penstock.engine.settling import Settled
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.host import HostLedger
from penstock.kv.movement import carrier
from penstock.kv.movement.pool import KVPool
from penstock.memory import sending
from penstock.memory.arena import Arena
from penstock.memory.streams import CallerStream
from penstock.ops.attention import dense
from penstock.ops.kernels import noted
from penstock.ops.triton import experts, few_bits_experts
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler, Storage
from penstock.step.plan import Plan
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.views import Blank
from penstock.worker import ahead
from penstock.worker.runner import Runner
from penstock.worker.warmup import kernel_steps, largest_step, small_steps
from worlds import sampling

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
PAGES = 24
_SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}
MODELS = {
    "llama": SHAPES["8B"] | _SMALL | _HEADS,
    "qwen3": SHAPES["0.6B"] | _SMALL | _HEADS,
    "windows": SHAPES["8B"] | _SMALL | _HEADS | _WINDOWS | {"model_type": "qwen2"},
    "mixture": LAYERS_OF["30B-A3B"][0] | _SMALL | _HEADS | _MIXTURE,
    "gpt-oss": SHAPES["gpt-oss-20b"] | _SMALL | _HEADS | {"num_local_experts": 8},
}
Key = tuple[str, str, str]


class Pretended(TorchFunctionMode):
    """Within it, whatever this thread has of torch is on the device."""

    def __torch_function__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if function == Tensor.device.__get__:
            return DEVICE
        if function is Tensor.pin_memory:
            return args[0]
        named = {name: _there(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_there, args), **named)


def _there(value: object) -> object:
    return "cpu" if isinstance(value, torch.device) else value


def _blank_flash(q: Tensor, *_: object, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros(q.shape[:2])


class _Event:
    def record(self) -> None:
        pass

    synchronize = record


class _Stream:
    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: True)


@contextmanager
def pretended() -> Iterator[None]:
    """On the device."""
    driver.set_active(Driver(10 * CAPABILITY[0]))  # type: ignore[arg-type]
    properties = SimpleNamespace(multi_processor_count=132)
    with ExitStack() as patched:
        for name, value in {
            "device": lambda _: nullcontext(),
            "Event": _Event,
            "current_stream": lambda _: _Stream(),
            "get_device_capability": lambda _: CAPABILITY,
            "get_device_properties": lambda _: properties,
        }.items():
            patched.enter_context(patch.object(torch.cuda, name, value))
        patched.enter_context(patch.object(parts, "streams_both_ways", lambda _: (CallerStream(),) * 3))
        patched.enter_context(patch.object(carrier, "more_streams", lambda *_: (CallerStream(),) * 2))
        patched.enter_context(patch.object(Arena, "_register", lambda *_: None))
        patched.enter_context(patch.object(sending, "seen_by", lambda _, pinned: pinned))
        patched.enter_context(patch.object(dense, "dense", dense.dense_reference))
        patched.enter_context(patch.object(dense, "_flash", _blank_flash))
        for module in (experts, few_bits_experts):
            patched.enter_context(patch.object(module, "shared_memory", lambda _: SHARED[90]))
        patched.enter_context(Pretended())
        yield


def settled(name: str) -> Settled:
    shape = Shape.of(MODELS[name])
    spec, dtype, limits = shape.spec, "bfloat16", SchedulerLimits(16, 1152, 64, 2048)
    groups = group_layouts(spec, shape.names, dtype)
    hardware, kv = Hardware(True, 1 << 40, 1 << 40, 0, 0, kernels=True, pdl=True), kv_layout(spec, dtype, 16)
    settings = Config(Path(), block_size=16)
    far = LongRoom(kv, 128, 64, 128)
    return Outline(settings, hardware, spec, WHOLE, dtype, limits, False, 1 << 40, groups, kv, far)


def key(function: Any, arguments: dict[str, Any]) -> Key:
    """By which Triton tells compiled kernels apart."""
    *_, bind = function.device_caches[0]
    _, specialised, options = bind(**arguments)
    return function.__name__, str(specialised), str(sorted(options.items()))


def launched(work: Callable[[], object]) -> set[Key]:
    """The kernels that would be launched."""
    found = set[Key]()

    def run(self: Any, *given: object, grid: object, warmup: bool, **more: object) -> None:
        found.add(key(self, dict(zip((one.name for one in self.params), given, strict=False)) | more))

    with patch.object(JITFunction, "run", run), ahead.ZeroFilled():
        work()
    return found


def rehearsed(name: str, *, recorded: bool) -> tuple[set[Key], set[Key]]:
    """The kernels that are noted of a model's rehearsal, and those that its calls launch; none of these may
    fail."""
    found = settled(name)
    runner, sizes = blank_runner(found, DEVICE, None, early=True), found.sizes
    with ahead.ZeroFilled():
        kernels: list[Any] = noted(runner.rehearse(sizes, recorded=recorded))
    notes = [
        key(one.func.__self__, {name: value for name, value in one.keywords.items() if name != "grid"})
        for one in kernels
    ]
    assert len(notes) == len(set(notes)), "noted twice"
    runner = blank_runner(found, DEVICE, None, early=True)
    calls = [launched(call) for call in runner.rehearse(sizes, recorded=recorded)]
    return set(notes), set[Key]().union(*calls)


def requested(name: str) -> set[Key]:
    """The kernels that the whole model's steps launch: decode steps of many sizes, prompts, all at once; and
    of requests that the pages do not hold, from the first chunk on."""
    found = settled(name)
    weights = Blank(found.layouts, DEVICE)
    runner: Runner = make_runner(found, DEVICE, None)
    assert found.far is not None
    runner.attach(weights, KVPool(found.kv, PAGES, DEVICE), make_carrier(found.far, DEVICE), early=True)
    sizes = found.sizes
    plans: list[Plan] = [*kernel_steps(sizes), *small_steps(sizes), largest_step(sizes, past=2048)]
    kernels = set[Key]().union(*(launched(lambda plan=plan: runner.run(plan)) for plan in plans))
    scheduler = Scheduler(
        BlockLedger(PAGES),
        replace(found.limits, max_step_tokens=128),
        PrefixRule(bytes(16)),
        Storage(HostLedger(found.far.blocks)),
    )

    def step() -> None:
        plan = scheduler.plan()
        tiled.append(sum(share.cold_start > 0 for share in plan.shares))
        found_some.append(sum(run.start > 0 and not run.near for run in plan.runs))
        scheduler.commit(plan, runner.run(plan))

    # Two that begin alike share tiles, a third is long by itself, and short ones come between them.
    # Those that come last find how they begin, and are attended to together.
    tiled, found_some = list[int](), list[int]()
    for lengths in ((500, 20, 430, 5, 400), (21, 25), range(21, 35)):
        for length in lengths:
            scheduler.submit([at * (1 + (length == 400)) % 1000 for at in range(length)], sampling(), 9)
        while scheduler.busy:
            kernels |= launched(step)
    assert 2 in found_some
    assert max(found_some) > 8, found_some
    assert {1, 2, 3} <= set(tiled), tiled
    return kernels


def main(name: str) -> None:
    """How many kernels are noted, whether those are launched, whether fewer are without recording, and which
    a whole model launches besides."""
    with pretended():
        noted_, launched_ = rehearsed(name, recorded=True)
        eager, _ = rehearsed(name, recorded=False)
        print(len(noted_), noted_ == launched_, eager < noted_, sorted(requested(name) - eager))


if __name__ == "__main__":
    main(sys.argv[1])
