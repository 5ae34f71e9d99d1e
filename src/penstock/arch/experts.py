"""Say how kernels compute the experts of a mixture."""

from dataclasses import dataclass

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.arch.spec import SWIGLU, Activation


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """An ExpertKind says how kernels compute the experts of a layer, of which they have a table of addresses.

    Addresses of an expert are those of the tensors that the formats store, gate_up's before down's, and then
    those of its biases.

    formats: of gate_up and down.
    biases: the field of `MixtureLayout`.
    moves: whether experts come to the device while it computes. Nothing of them is read before all earlier
        work has ended.
    """

    formats: tuple[WeightFormat, ...] = (DENSE, DENSE)
    biases: int = 0
    activation: Activation = SWIGLU
    moves: bool = False
