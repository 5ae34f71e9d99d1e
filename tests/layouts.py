"""Layouts of KV blocks for tests that need no model."""

from penstock.arch.layout import KVLayout
from penstock.arch.mixers.mixer import Plane


def kv_of_heads(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
    """Blocks of layers with keys and values of as many heads."""
    planes = Plane("k", kv_heads, head_dim, scored=True), Plane("v", kv_heads, head_dim)
    return KVLayout((planes,) * layers, block_size, dtype)


def heads_of(layout: KVLayout) -> tuple[int, int]:
    """How many heads keys have, and how many numbers a head."""
    k = layout.planes[0][0]
    return k.heads, k.width
