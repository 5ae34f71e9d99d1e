"""Mixtures whose launches overlap: a chain of layers comes out the same as one launch after the other, and
does not as soon as a kernel's wait on the device is left out."""

import os
import subprocess
import sys
import types

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from penstock.arch.spec import MoeSpec, Router
from penstock.ops.experts import Grouped
from penstock.ops.kernels import pdl_launches
from penstock.ops.matrix import Matrix
from penstock.ops.slots import Places
from penstock.ops.triton import expert_columns as triton_columns
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import few_bits_experts as triton_few_bits
from penstock.ops.triton import pointwise as triton_pointwise
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton import warp_tiles as triton_tiles
from penstock.ops.triton.linear import one_row
from penstock.ops.triton.pointwise import rms_norm
from penstock.weights.streaming.slots import SlotRule, SlotTable
from quantised import SCHEMES, matrix_of

DEVICE = torch.device("cuda")
HIDDEN, INNER, EXPERTS, TOP, LAYERS = 1024, 512, 16, 4, 8

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("kernels cannot wait for each other on this device", allow_module_level=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()


class Chain:
    """Layers that are a norm, a router and experts each, as a decode step of so many rows computes them."""

    def __init__(self, scheme: str, rows: int, *, slots: bool = False) -> None:
        self.start, self.gain = random(rows, HIDDEN), torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.product = one_row if rows == 1 else torch.nn.functional.linear
        self.moe = MoeSpec(EXPERTS, TOP, INNER, Router(normalise=True))
        self.routers = [random(EXPERTS, HIDDEN, seed=layer) / 8 for layer in range(LAYERS)]
        rng = torch.Generator().manual_seed(3)

        def made(height: int, width: int, seed: int) -> Matrix | Tensor:
            weight = torch.randn(height, width, generator=rng) / width**0.5
            if scheme == "dense":
                return weight.bfloat16().to(DEVICE)
            few, _ = matrix_of(SCHEMES[scheme], weight, seed)
            return Matrix(few.format, few.shape, {name: part.to(DEVICE) for name, part in few.parts.items()})

        self.experts = [
            (made(2 * INNER, HIDDEN, 2 * at), made(HIDDEN, INNER, 2 * at + 1)) for at in range(EXPERTS)
        ]
        self.slots, self.decides = slots, None
        """What says which experts are in slots, if the device decides about that."""
        self.places = Places(0, EXPERTS // 2, EXPERTS, 1 << 40, 4096, torch.zeros(2).long().to(DEVICE))
        self.formats = tuple(one.format for one in self.experts[0] if isinstance(one, Matrix)) or None
        self.table = torch.tensor(
            [
                [
                    part.data_ptr()
                    for one in pair
                    for part in (one.parts.values() if isinstance(one, Matrix) else [one])
                ]
                for pair in self.experts
            ],
            device=DEVICE,
        )

    def begin(self) -> None:
        """Begin anew, with empty slots and always the same first step: what is in slots depends on it."""
        if self.slots:
            self.decides = SlotTable(LAYERS, EXPERTS, EXPERTS // 2, DEVICE, SlotRule())
        self.start.copy_(random(*self.start.shape))
        self()
        torch.cuda.synchronize()

    def __call__(self) -> Tensor:
        residual, x = self.start.clone(), torch.zeros_like(self.start)
        if self.decides is not None:
            self.decides.begin()
        for layer, router in enumerate(self.routers):
            normed = rms_norm(x, self.gain, 1e-5, residual)[0]
            mixed = Grouped(normed, self.product(normed, router), self.moe, formats=self.formats)
            if self.decides is not None:
                most = TOP * len(normed)
                coming = triton_slots.expert_step(
                    self.decides.arrays(layer), mixed.pairs, most, 1.0, self.places, 1
                ).coming
            mixed.compute(self.table)
            x = mixed.total()
            if self.decides is not None:
                x = x + (coming[0] * torch.arange(most, device=DEVICE)).sum().bfloat16() / 256
        return residual + x


def replays(chain: Chain, turns: int = 6) -> list[Tensor]:
    with pdl_launches():
        chain.begin()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            said = chain()
    found = []
    for turn in range(turns):
        chain.start.copy_(random(*chain.start.shape, seed=50 + turn))
        graph.replay()
        torch.cuda.synchronize()
        found.append(said.clone())
    return found


def one_by_one(chain: Chain, turns: int = 6) -> list[Tensor]:
    found = []
    chain.begin()
    for turn in range(turns):
        chain.start.copy_(random(*chain.start.shape, seed=50 + turn))
        found.append(chain())
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("scheme", ["dense", "mxfp4", "gptq_128"])
def test_a_chain_comes_out_as_one_after_the_other(scheme: str, rows: int) -> None:
    chain = Chain(scheme, rows)
    assert all(map(torch.equal, replays(chain, 20), one_by_one(chain, 20)))


def test_a_chain_in_which_the_device_decides_comes_out_as_one_after_the_other() -> None:
    chain = Chain("dense", 1, slots=True)
    assert all(map(torch.equal, replays(chain, 20), one_by_one(chain, 20)))


HASTY = {
    "_expert_step": (triton_slots, "dense", 1),
    "_route_one": (triton_routing, "dense", 1),
    "_choose": (triton_routing, "dense", 1),
    "_arrange": (triton_routing, "dense", 1),
    "_gate_up": (triton_experts, "dense", 12),
    "_down": (triton_experts, "dense", 12),
    "_combine": (triton_experts, "mxfp4", 1),
    "_expert_columns gate_up": (triton_columns, "mxfp4", 1),
    "_expert_columns down": (triton_columns, "mxfp4", 1),
    "_expert_products": (triton_few_bits, "mxfp4", 12),
}


@triton.jit
def _never() -> None:
    pass


@pytest.mark.parametrize("kernel", HASTY)
def test_without_its_wait_it_is_wrong(kernel: str) -> None:
    """In a process of its own: a kernel that reads where an expert is, too early, may read anywhere."""
    for waits in (True, False):
        done = subprocess.run(
            [sys.executable, __file__, kernel, str(int(waits))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=False,
        )
        assert (done.stdout.strip() == b"right") == waits, done.stderr[-500:]


def in_two_launches(
    logits: Tensor, moe: MoeSpec, correction: Tensor | None, padding: object, rows: int
) -> tuple[Tensor, ...]:
    """Route as many tokens are: a library's product before these would not let them begin early."""
    shares, chosen = triton_routing.choose(logits, moe, correction)
    return shares, *triton_routing.arrange(chosen, logits.shape[1], rows)


def hasty(kernel: str, waits: bool) -> bool:
    """Tell whether a chain comes out right in which a kernel does not wait, unless it `waits`."""
    module, scheme, rows = HASTY[kernel]
    if kernel in ("_choose", "_arrange"):
        triton_routing.route = in_two_launches
    chain = Chain(scheme, rows, slots=module is triton_slots)
    want = one_by_one(chain)

    def copied(one: object, **other: object) -> types.FunctionType:
        fn = one.fn  # type: ignore[attr-defined]
        again = types.FunctionType(fn.__code__, {**fn.__globals__, **other}, fn.__name__)
        again.__annotations__ = fn.__annotations__
        return again

    wait = triton_pointwise.gdc_wait if waits else _never
    own, _, part = kernel.partition(" ")
    swapped = {"in_turn": triton.jit(copied(triton_pointwise.in_turn, gdc_wait=wait))}
    if part == "gate_up":
        swapped = {"gdc_wait": wait}
    if part == "down":
        swapped = {"tiles_of_products": triton.jit(copied(triton_tiles.tiles_of_products, gdc_wait=wait))}
    unspecialised = ["tokens", "pairs", "first", "count", "bound"]
    if module is triton_slots:
        unspecialised = ["base", "first", "transit", "ring", "parts", "begin"]
    setattr(module, own, triton.jit(copied(getattr(module, own), **swapped), do_not_specialize=unspecialised))
    return all(map(torch.equal, replays(chain), want))


if __name__ == "__main__":
    print("right" if hasty(sys.argv[1], bool(int(sys.argv[2]))) else "wrong")
