"""MXFP4 as gpt-oss has it: the experts of a layer are one stack of tensors, gate and up row by row.

Source of the layout: `openai/gpt-oss` and transformers' `integrations/mxfp4.py`. Below `mlp.experts` of a
layer there are, for E experts of hidden size H and inner size I:

- `gate_up_proj_blocks`, uint8 `[E, 2 * I, H / 32, 16]`: codes of 32 columns, the first of two in the low
  bits. Even rows are the gate's, odd ones are up's. `down_proj_blocks` is `[E, H, I / 32, 16]`.
- `gate_up_proj_scales`, uint8 `[E, 2 * I, H / 32]`: E8M0 exponents; and so `down_proj_scales`.
- `gate_up_proj_bias` `[E, 2 * I]` and `down_proj_bias` `[E, H]`, not quantised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import Float4
from penstock.arch.formats.format import TensorSlice, WeightFormat
from penstock.arch.formats.names import ByName, ModuleNames
from penstock.arch.formats.words import Words

METHOD = "mxfp4"
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
"""Ends of the names of the stacks. No other matrix is quantised."""


@dataclass(frozen=True)
class StackedFloat4(Float4):
    """Codes are in a tensor of blocks, `[out, in / 32, 16]`, one of a stack."""

    name: str = METHOD
    codes: str = "_blocks"
    scales: str = "_scales"

    def codes_of(self, source: TensorSlice) -> TensorSlice:
        """Return the blocks of an expert's matrix."""
        halved = super().codes_of(source)
        size = self.checkpoint_group // 2
        return replace(halved, shape=(source.shape[0], self.groups_of(source), size))


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint of gpt-oss. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    excepted = ModuleNames(globs=words.list("modules_to_not_convert"))
    return ByName(METHOD, rules=((excepted, DENSE), (ModuleNames(ends=(GATE_UP, DOWN)), StackedFloat4())))
