"""Finds an expert in stacks: tensors that hold all experts of a layer, with gate and up row by row.

`formats/mxfp4.py` describes stacks of few bits. Dense ones are those of transformers' `GptOssExperts`: below
`mlp` of a layer there are `experts.gate_up_proj` `[E, H, 2 * I]` and `experts.down_proj` `[E, I, H]`, for E
experts of hidden size H and inner size I. Both sorts have `experts.gate_up_proj_bias` `[E, 2 * I]` and
`experts.down_proj_bias` `[E, H]`.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.arch.formats.format import TensorSlice, WeightFormat
from penstock.arch.formats.mxfp4 import DOWN, GATE_UP, StackedFloat4
from penstock.arch.spec import MoeSpec


def stacked_expert(
    at: str, expert: int, moe: MoeSpec, hidden: int, format: WeightFormat, inner: range
) -> dict[str, Sequence[TensorSlice]]:
    """Return the tensors of an expert's group, by their names in it: matrices, and then biases if there are
    any.

    at: the layer's feed-forward, `model.layers.0.mlp`.
    moe: of the whole model.
    format: of the model's weights.
    inner: rows of gate and up, and columns of down, that a rank has.
    """

    def whole(name: str, height: int, width: int) -> TensorSlice:
        tensor = f"{at}.{name}"
        turned = not isinstance(format.of(tensor), StackedFloat4)
        return TensorSlice(tensor, (height, width), index=expert, transposed=turned)

    size = moe.intermediate_size
    gate_up, down = whole(GATE_UP, 2 * size, hidden), whole(DOWN, hidden, size)
    halves = [range(2 * inner.start + odd, 2 * inner.stop + odd, 2) for odd in (0, 1)]
    columns = None if inner == range(size) else inner
    tensors: dict[str, Sequence[TensorSlice]] = {
        "gate_up": [replace(gate_up, rows=rows) for rows in halves],
        "down": [replace(down, columns=columns)],
    }
    if moe.bias:
        name = f"{gate_up.tensor}_bias"
        tensors["gate_up_bias"] = [TensorSlice(name, (2 * size,), rows, index=expert) for rows in halves]
        tensors["down_bias"] = [TensorSlice(f"{down.tensor}_bias", (hidden,), index=expert)]
    return tensors
