"""Muon for the matrices of a small model: momentum whose steps are made orthogonal, all matrices of one shape
in one batch."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


def orthogonal(m: Tensor, steps: int = 5) -> Tensor:
    """Nearly the nearest orthogonal matrix of each m [batch, rows, cols], by the quintic Newton-Schulz
    iteration of the Muon optimizer (K. Jordan et al., 2024); singular values end between about 0.7 and
    1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay."""

    def __init__(self, params: list[Tensor], momentum: float = 0.95, decay: float = 0.1) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in params:
            groups[tuple(p.shape)].append(p)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([p.grad for p in group])  # type: ignore[arg-type]
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonal(grad.lerp(buffer, self.momentum)).float()
            scale = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr * scale)

    def state_dict(self) -> list[Tensor]:
        return self.buffers

    def load_state_dict(self, state: list[Tensor]) -> None:
        for mine, theirs in zip(self.buffers, state, strict=True):
            mine.copy_(theirs)
