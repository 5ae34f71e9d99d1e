"""Attends with a run that is a tree, in plain torch: to all before the tree, and within it by a mask.

Places of keys are one thing, positions another: a token far behind in memory may be near, on a short branch.
Windows count positions.
"""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.ops.attention.dense import Part, fold, masked
from penstock.ops.attention.gathered import Cache, past_in_pages, places_in_pages
from penstock.ops.attention.inputs import LayerAttention, QueryRun, RunTree


def attend_tree(q: Tensor, k: Tensor, v: Tensor, cache: Cache, run: QueryRun, layer: LayerAttention) -> Part:
    """Attend to the tree and to its past in pages, and return a state, into which more may be folded.

    k, v: the run's own. Those of tokens of earlier steps are in pages.
    """
    tree = run.tree
    assert tree is not None
    stop = run.start + run.count
    if tree.begin < run.start:
        assert run.paged, "the first tokens of a tree are in pages"
        k, v = places_in_pages(cache, run, tree.begin, stop)
    mask = tree.seen(layer.window, stop - tree.begin)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = masked(queries, keys, values, layer, mask=mask, lse=True)
    assert lse is not None
    state = out[0].transpose(0, 1).float().contiguous(), lse[0].t().contiguous()
    for position, past_k, past_v in past_in_pages(cache, replace(run, start=tree.begin), layer.window):
        fold_before(state, q, past_k, past_v, layer, tree, position)
    return state


def fold_before(
    state: Part, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, tree: RunTree, position: int
) -> None:
    """Fold keys that come before a tree into the state of its queries. position: that of the first key."""
    window = layer.window
    if window is None or tree.begin + max(tree.depths) - window < position:
        fold(state, q, k, v, layer)
        return
    for depth in sorted(set(tree.depths)):
        oldest = max(tree.begin + depth - window + 1 - position, 0)
        if oldest < len(k):
            those = [at for at, own in enumerate(tree.depths) if own == depth]
            fold(state, q, k[oldest:], v[oldest:], layer, torch.tensor(those, device=q.device))
