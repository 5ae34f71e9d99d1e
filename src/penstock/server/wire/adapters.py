"""Declares the requests that load and unload LoRA adapters, as vLLM has them."""

from msgspec import Struct


class LoadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/load_lora_adapter.

    load_inplace: whether the adapter takes the place of one of its name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/unload_lora_adapter."""

    lora_name: str
