"""Layers of experts of few bits that come to slots, computed one behind the other as in a decode step."""

import torch
from torch import Tensor

from penstock.arch.layout import Field, GroupId, GroupKind, GroupLayout, MixtureLayout
from penstock.arch.spec import MoeSpec, Router
from penstock.memory.streams import Stream
from penstock.ops.experts import Grouped
from penstock.ops.triton.linear import one_row
from penstock.ops.triton.pointwise import rms_norm
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom
from penstock.weights.streaming.slots import SlotRule
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from quantised import SCHEMES, matrix_of
from streams import Gates, Store

_ALIGNED = 256


class SlotChain:
    """A chain of layers that are a norm, a router and experts each, for a single token.

    start: what it begins with, `[1, hidden]`. Its experts rest on the device, too, to compare with.
    """

    def __init__(
        self,
        scheme: str,
        streams: tuple[Stream, Stream, Stream],
        *,
        device: torch.device,
        sizes: tuple[int, int, int, int, int],
        slots: int,
        ring: int,
    ) -> None:
        """Begin with empty slots.

        streams: the link's, the one that computes, and that of copies.
        sizes: layers, experts of each, and of these those of a token; hidden and inner numbers.
        """
        layers, experts, top, hidden, inner = sizes
        link, compute, copies = streams
        rng = torch.Generator().manual_seed(3)
        self.device, self.top = device, top

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng)

        self.start, self.gain = random(1, hidden).bfloat16().to(device), torch.ones(hidden).bfloat16()
        self.gain = self.gain.to(device)
        self.routers = [random(experts, hidden).bfloat16().to(device) for _ in range(layers)]
        ids = [GroupId(GroupKind.EXPERT, at // experts, at % experts) for at in range(layers * experts)]
        shapes = (2 * inner, hidden), (hidden, inner)
        every = [
            [
                matrix_of(SCHEMES[scheme], random(*shape) / shape[1] ** 0.5, at, dtype="bfloat16")[0]
                for shape in shapes
            ]
            for at in range(len(ids))
        ]
        formats = tuple(one.format for one in every[0])
        tensors = [[part for one in both for part in one.parts.values()] for both in every]
        fields, size = list[Field](), 0
        for at, part in enumerate(tensors[0]):
            fields.append(Field(str(at), (part.nbytes,), size, (), "uint8"))
            size += -(-part.nbytes // _ALIGNED) * _ALIGNED
        host = torch.zeros(len(ids), size, dtype=torch.uint8)
        for row, parts in zip(host, tensors, strict=True):
            for field, part in zip(fields, parts, strict=True):
                row[field.offset :][: part.nbytes] = part.flatten().view(torch.uint8)
        self.host = host.pin_memory() if device.type == "cuda" else host
        self.resting = host.to(device, copy=True)
        begins = self.resting.data_ptr() + torch.arange(len(ids)).unsqueeze(1) * size
        offsets = torch.tensor([field.offset for field in fields])
        self.tables = (begins + offsets).view(layers, experts, -1).to(device)
        self.memory = torch.zeros(slots + ring, size, dtype=torch.uint8, device=device)
        layouts = [GroupLayout(id, tuple(fields), size) for id in ids]
        room = ExpertRoom(size, len(ids), 0, len(ids), ring, slots=slots, copies=True)
        own = Experts(
            layouts, room, self.memory[slots:], self.host, Store(Gates()), copies, compute, StreamWaits(None)
        )
        mixtures = dict.fromkeys(range(layers), MixtureLayout(experts, formats))
        self.experts = SlotExperts(
            layouts, mixtures, own, self.memory, self.host, (link, compute), SlotRule(1.0, 0.0)
        )
        self.experts.look_ahead()
        self.moe, self.formats = MoeSpec(experts, top, inner, Router(normalise=True)), formats

    def __call__(self, *, rests: bool) -> Tensor:
        """Return what the last layer makes, `[1, hidden]`. rests: by the experts that rest on the device."""
        x = self.start
        for layer, router in enumerate(self.routers):
            x = rms_norm(x, self.gain, 1e-5)[0]
            mixed = Grouped(x, one_row(x, router), self.moe, formats=self.formats)
            standing = self.experts.recorded()
            parts = None if rests else standing.parts(layer, mixed.pairs, self.top)
            if parts is not None and (following := standing.foretells(layer, self.top)) is not None:
                standing.foretell(following, one_row(x, self.routers[following]), self.top, None)
            for table in parts or (self.tables[layer],):
                mixed.compute(table, moves=parts is not None)
            x = mixed.total()
        return x
