"""Finds the biases that quantisers of GPTQ write beside every matrix, also for modules that have none."""

from collections.abc import Mapping

import torch

from penstock.base.errors import CheckpointError
from penstock.weights.checkpoint.shards import ShardTensor
from penstock.weights.checkpoint.tensors import ROUNDED, bytes_of, stored_dtype
from penstock.weights.jsonfile import readable, shown

_BIAS, _CODES = ".bias", ".qweight"


def adds_nothing(name: str, tensors: Mapping[str, ShardTensor]) -> bool:
    """Tell whether a tensor that the model does not have is a bias of zeros beside packed codes.

    Raises CheckpointError for such a bias with other numbers: the model would not be computed as it was made.
    """
    stored, module = tensors[name], name.removesuffix(_BIAS)
    if module == name or module + _CODES not in tensors or stored.entry.dtype not in ROUNDED:
        return False
    bias = torch.empty(stored.entry.shape, dtype=stored_dtype(stored))
    with readable():
        stored.file.read_into(bytes_of(bias), stored.entry.offset)
    if bool((bias != 0).any()):
        raise CheckpointError(
            f"{stored.file.path} holds tensor {shown(name)}, a bias with numbers other than 0, which the "
            "model in config.json does not have; fetch config.json and the weights of the same model"
        )
    return True
