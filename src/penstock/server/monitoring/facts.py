"""Holds what does not change of a loaded model, for clients that list models."""

from dataclasses import dataclass
from typing import Self

from penstock.api.llm import LLM
from penstock.arch.bounds import parameters, weight_bytes
from penstock.arch.families import FAMILIES
from penstock.arch.formats.recipe import name_of
from penstock.arch.layout import group_layouts
from penstock.arch.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Describes a model. All but the family is 0 or empty where replicas have it.

    bytes: of the weights, on all tiers. device_bytes: those on the device.
    """

    family: str = ""
    format: str = ""
    """The format of weights of few bits, else the dtype."""
    parameters: int = 0
    layers: int = 0
    hidden_size: int = 0
    bytes: int = 0
    device_bytes: int = 0

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Return the facts of a loaded model."""
        spec, weights = llm.spec, llm.memory.weights
        layouts = group_layouts(spec, FAMILIES[spec.family].names, llm.dtype)
        return cls(
            family=spec.family,
            format=name_of(spec.format) or llm.dtype,
            parameters=parameters(layouts),
            layers=spec.layers,
            hidden_size=spec.hidden_size,
            bytes=weights.device + weights.host + weights.disk,
            device_bytes=weights.device,
        )

    @classmethod
    def of_spec(cls, spec: ModelSpec, dtype: str) -> Self:
        """Return the facts of a model that is not loaded. dtype: of its weights."""
        layouts = group_layouts(spec, FAMILIES[spec.family].names, dtype)
        return cls(
            family=spec.family,
            format=name_of(spec.format) or dtype,
            parameters=parameters(layouts),
            layers=spec.layers,
            hidden_size=spec.hidden_size,
            bytes=weight_bytes(layouts),
        )

    @property
    def size(self) -> str:
        """Return the number of parameters in words, such as "7.6B"."""
        for unit, letter in ((10**9, "B"), (10**6, "M")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters or "")
