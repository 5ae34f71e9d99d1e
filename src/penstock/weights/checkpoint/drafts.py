"""Find the tensors of layers that predict several tokens (MTP; DeepSeek-V3, arXiv 2412.19437).

They stand behind a model's last layer, or in modules of their own called `mtp`. No pass of the model reads
them: they are left for drafts, and `arch/mtp.py` says which of them draft.
"""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_MODULE = re.compile(r"(?:model\.)?mtp(?:_[a-z]+)?\.")


def belongs_to_drafts(tensor: str, layers: int) -> bool:
    """Tell whether a tensor belongs to a layer behind the last of so many, or to an MTP module."""
    layer = _LAYER.match(tensor)
    return _MODULE.match(tensor) is not None if layer is None else int(layer[1]) >= layers


def left_for_drafts(tensors: Iterable[str], layers: int) -> tuple[str, ...]:
    """Return the names of the tensors that belong to drafts, sorted."""
    return tuple(sorted(name for name in tensors if belongs_to_drafts(name, layers)))
