"""A model as a runner holds it: what it computes with, and what was recorded of that."""

from dataclasses import dataclass

from penstock.kv.movement.carrier import Carrier
from penstock.kv.movement.pool import KVPool
from penstock.models.decoder import Decoder
from penstock.models.inputs import Weights
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.adapters import RowAdapters
from penstock.worker.decode_step import DecodeStep
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.inputs import InputBuilder
from penstock.worker.sampler import Sampler


@dataclass(slots=True, eq=False)
class LoadedModel:
    """Holds all that one model of a runner has to itself.

    decoder: its arithmetic. inputs: makes the tensors of its steps. sampler: draws its tokens, and has the
    newest of each row. adapters: LoRA adapters, if there is room for any. What follows is there while the
    model is attached.
    weights: lent group by group. pool: its KV; the blocks have the same numbers in the pools of all models.
    carrier: moves its KV beyond the device, if anything does. early: whether kernels may begin before the one
    before has ended, and read weights: all of these stay, on a device that can wait. graphs: its recorded
    steps, if any were.
    """

    decoder: Decoder
    inputs: InputBuilder
    sampler: Sampler
    adapters: RowAdapters | None = None
    weights: Weights | None = None
    pool: KVPool | None = None
    carrier: Carrier | None = None
    early: bool = False
    graphs: DecodeGraphs | None = None

    def decode_step(self, rows: int, tokens: int, max_length: int) -> DecodeStep:
        """Return the pass of a step as it is recorded: of up to `rows` rows, or of a run of up to `tokens`
        tokens, of sequences of up to `max_length`. To be called while the model is attached."""
        assert self.pool is not None, "a step before attach"
        table, newest = self.inputs.tables.keep_on_device(), self.sampler.newest
        sizes = {"rows": rows, "tokens": tokens, "max_length": max_length}
        step = DecodeStep(self.decoder, self.inputs.angles, self.pool, table, newest, **sizes)
        step.adapters = self.adapters
        return step

    @property
    def lends_all(self) -> bool:
        """Tell whether rows read all of their KV beyond the device, if they have any."""
        return self.carrier is not None and self.carrier.chosen is None

    def detach(self) -> None:
        """Let go of weights and KV, and of what was recorded of them."""
        if self.graphs is not None:
            self.graphs.close()
        self.weights = self.pool = self.carrier = self.graphs = None
        self.decoder.taps = None  # They have weights and pages of another model.

    def close(self) -> None:
        """Let go of them for good: what moves weights or KV ends."""
        weights, carrier = self.weights, self.carrier
        self.detach()
        self.adapters = None
        if carrier is not None:
            carrier.close()
        if isinstance(weights, WeightStream):
            weights.close()
