"""Computes a mixture of experts for a whole step, many experts at a time, where kernels take them by their
addresses."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from penstock.arch.experts import ExpertKind
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.arch.layout import MixtureLayout
from penstock.arch.spec import Activation, MoeSpec
from penstock.ops.activation import activate, activate_into
from penstock.ops.handover import StepRows
from penstock.ops.kernels import native_kernels, triton_kernels
from penstock.ops.linear import dense_linear
from penstock.ops.matrix import GroupViews
from penstock.ops.route import route


def grouped(device: torch.device, mixture: MixtureLayout) -> bool:
    """Tell whether these experts may be computed many at a time on this device: whether `Grouped` works
    there."""
    return bool(mixture.kernels) and _kernels(device) is not None


_FEW_TOKENS = 16
"""Tokens whose pairs are all in memory at once on a CPU; more are bound by the products themselves."""
_PIECE = 32768
"""Numbers that torch computes on one thread: where it divides rows among threads, bits may depend on how."""


def few_tokens(x: Tensor, mixture: MixtureLayout) -> bool:
    """Tell whether kernels for a CPU take any of these experts at once for so few tokens: whether
    `few_outputs` works."""
    formats = mixture.formats
    if x.is_cuda or len(x) > _FEW_TOKENS or formats is None or not formats[0].kernels:
        return False
    kernels = native_kernels()
    return kernels is not None and kernels.takes_each(x, formats)


def few_outputs(
    x: Tensor, experts: Sequence[GroupViews], counts: Sequence[int], activation: Activation
) -> Tensor:
    """Return the outputs of experts, the next `counts` rows of x through each of them: x and result
    `[rows, hidden]`."""
    kernels = native_kernels()
    assert kernels is not None, "few_tokens() says whether there are kernels"
    gate_up, down = ([one.matrices[name] for one in experts] for name in ("gate_up", "down"))
    both = x.new_empty(len(x), gate_up[0].shape[0])
    kernels.few_rows_each(x, gate_up, counts, both)
    _add_each(both, experts, "gate_up_bias", counts)
    inner = x.new_empty(len(x), both.shape[1] // 2)
    each = max(1, _PIECE // inner.shape[1])
    for part, into in zip(torch.split(both, each), torch.split(inner, each), strict=True):
        activate_into(part, into, activation)
    out = torch.empty_like(x)
    kernels.few_rows_each(inner, down, counts, out)
    _add_each(out, experts, "down_bias", counts)
    return out


def _add_each(y: Tensor, experts: Sequence[GroupViews], bias: str, counts: Sequence[int]) -> None:
    """Add each expert's bias, if they have that, to the next `counts` rows of y."""
    if bias in experts[0].vectors:
        for part, expert in zip(torch.split(y, list(counts)), experts, strict=True):
            part.add_(expert.vectors[bias])


class Grouped:
    """Computes one layer's mixture in a step: which experts its tokens take, then products with all of these,
    in one call or in several.

    The result is the same to the last bit however the experts are divided among calls. A pair is a token and
    one of its experts, numbered token * top_k + rank.
    """

    def __init__(
        self,
        x: Tensor,
        logits: Tensor,
        moe: MoeSpec,
        correction: Tensor | None = None,
        *,
        formats: tuple[WeightFormat, ...] | None = None,
        biases: int = 0,
        padding: Tensor | None = None,
    ) -> None:
        """Choose experts; the host waits for nothing.

        x: `[tokens, hidden]`.
        logits: of the router, `[tokens, experts]`. Of equal scores those of the lower experts win.
        moe: of the rank.
        correction: of the router, float32 `[experts]`, if it has one.
        formats: of gate_up and down of all experts, dense by default; their kernels compute the products.
        biases: the field of `MixtureLayout`.
        padding: bool `[tokens]`, tokens that take what the first one takes, not being padding.
        """
        kernels, routing = _kernels(x.device), triton_kernels("routing")
        assert kernels is not None, f"no kernels on {x.device}"
        assert routing is not None
        self._kernels, self._x = kernels, x
        self._kind = ExpertKind(formats or (DENSE, DENSE), biases, moe.activation)
        products = triton_kernels(self._kind.formats[0].expert_kernels)
        assert products is not None, formats
        self._products = products
        (tokens, experts), top_k = logits.shape, moe.top_k
        self._tuning = products.expert_tuning(tokens * top_k, experts, x.dtype)
        routed = routing.route(logits, moe, correction, padding, self._tuning.rows)
        self._shares, self.order, self._blocks, self.pairs = routed
        """Pairs in the order of their experts, int32 `[pairs]`; and how many each expert has, int32
        `[experts]`."""
        self._h = x.new_empty(tokens * top_k, moe.intermediate_size)
        self.y = x.new_empty(tokens * top_k, x.shape[1])
        """Outputs by pair, `[pairs, hidden]`."""
        self._starts: list[int] | None = None
        """For each expert the blocks before its own, and all of them, once the host knows."""

    @property
    def rows(self) -> StepRows:
        """Return what others need to compute some of the experts elsewhere."""
        return StepRows(self._x, self.order, self.y)

    def counts(self) -> list[int]:
        """Return how many pairs each expert has. The host waits for them."""
        counts: list[int] = self.pairs.tolist()
        blocks = (-(-count // self._tuning.rows) for count in counts)
        self._starts = list(accumulate(blocks, initial=0))
        return counts

    def compute(self, table: Tensor, experts: range | None = None, *, moves: bool = False) -> None:
        """Compute the pairs of those experts that have addresses, and if `experts` are given, after `counts`,
        of none but these.

        moves: the field of ExpertKind.
        table: int64 `[experts, tensors]` on the device, addresses or 0; of dense experts those of gate_up
        `[2 * inner, hidden]`, gate first, and down `[hidden, inner]`; of others those of each tensor that
        the formats of both store; then those of biases.
        """
        part = range(self._blocks.shape[1])
        if experts is not None:
            assert self._starts is not None, "which experts are used is not known"
            part = range(self._starts[experts.start], self._starts[experts.stop])
        self._products.products(
            self._x, (self.order, self._blocks), table, self._h, self.y, self._tuning, part,
            replace(self._kind, moves=True) if moves else self._kind,
        )  # fmt: skip

    def total(self) -> Tensor:
        """Return the sum of each token's experts by their shares, `[tokens, hidden]`, when all pairs have
        been computed: in fp32, with shares rounded to the dtype before it."""
        result: Tensor = self._kernels.combine(self.y, self._shares)
        return result


def experts_reference(
    x: Tensor,
    logits: Tensor,
    moe: MoeSpec,
    weights: Sequence[Sequence[Tensor]],
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `Grouped` finds, computed step by step: what each token takes, int64 `[tokens, top_k]`, and
    the sum. weights: gate_up and down of every expert, and perhaps the biases of both."""
    shares, chosen = route(logits, moe, correction, lower_first)
    y = x.new_zeros(len(x), moe.top_k, x.shape[1])
    for expert, (gate_up, down, *biases) in enumerate(weights):
        at = chosen == expert
        if at.any():
            of_both, of_down = biases or (None, None)
            inner = activate(dense_linear(x[at.nonzero()[:, 0]], gate_up, of_both), moe.activation)
            y[at] = dense_linear(inner, down, of_down)
    return chosen, (shares.to(x.dtype).float().unsqueeze(-1) * y.float()).sum(1).to(x.dtype)


def lower_first(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what `torch.topk` returns; of equal numbers the first are taken."""
    values, at = rows.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], at[:, :count]


def _kernels(device: torch.device) -> ModuleType | None:
    return triton_kernels("experts") if device.type == "cuda" else None
