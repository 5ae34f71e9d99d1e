"""Names the tensors of GGUF files as checkpoints of Hugging Face do: a model is then read as one of these."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.arch.families import TensorNames
from penstock.weights.gguf.container import TensorInfo

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate": "expert_gate", "ffn_up": "expert_up", "ffn_down": "expert_down"}
"""Fields of `TensorNames`."""
_FUSED = {"ffn_gate_up": ("ffn_gate", "ffn_up"), "attn_qkv": ("attn_q", "attn_k", "attn_v")}
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.([a-z_]+?)(_exps|\.([0-9]{1,6}))?\.(weight|bias)")
_INSIDE = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?<=\.)[0-9]+(?=\.)")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a GGUF tensor is a tensor of a checkpoint.

    module: name of the checkpoint's tensor, without its last part.
    kind: that last part, `weight` or `bias`.
    first: rows before it in the tensor, counted over all experts.
    shape: extents, the one that varies fastest last.
    turned: whether the rows of each head are interleaved, as llama.cpp has those that RoPE turns.
    """

    module: str
    kind: str
    first: int
    shape: tuple[int, ...]
    turned: bool = False

    @property
    def name(self) -> str:
        """Return the checkpoint's name of the tensor."""
        return f"{self.module}.{self.kind}"


@dataclass(frozen=True, slots=True)
class Naming:
    """A naming knows what the names of one model's tensors depend on.

    names: of the family's feed-forwards.
    queries, keys: rows of the projections of queries and of keys.
    turned: whether the architecture has the rows of queries and keys interleaved.
    """

    names: TensorNames
    queries: int
    keys: int
    turned: bool

    def parts(self, info: TensorInfo) -> Iterator[Part]:
        """Yield the parts of a tensor; none if its name says nothing."""
        stem, _, kind = info.name.rpartition(".")
        if stem in _WHOLE and kind == "weight":
            yield Part(_WHOLE[stem], kind, 0, info.shape)
        elif (named := _BLOCK.fullmatch(info.name)) is not None:
            layer, what, kind = named[1], named[2], named[5]
            experts = range(info.shape[0]) if named[3] == "_exps" else None
            if experts is not None and len(info.shape) != 3:
                return
            extents = info.shape if experts is None else info.shape[1:]
            numbers: Iterable[int | str | None] = (named[4],) if experts is None else experts
            for number in numbers:
                first = number * extents[0] if isinstance(number, int) else 0
                for one, rows in self._rows(what, extents[0]):
                    module = self._module(one, number)
                    if module is None:
                        continue
                    turned = self.turned and one in ("attn_q", "attn_k")
                    shape = len(rows), *extents[1:]
                    yield Part(f"model.layers.{layer}.{module}", kind, first + rows.start, shape, turned)

    def _rows(self, what: str, height: int) -> Iterator[tuple[str, range]]:
        """Yield the projections that a tensor of so many rows holds, and their rows."""
        if what not in _FUSED:
            yield what, range(height)
            return
        ends = (
            (self.queries, self.queries + self.keys, height) if what == "attn_qkv" else (height // 2, height)
        )
        start = 0
        for one, end in zip(_FUSED[what], ends, strict=True):
            yield one, range(start, max(start, min(end, height)))
            start = end

    def _module(self, what: str, expert: object) -> str | None:
        """Return the name of a module of a layer; None if there is none."""
        if expert is not None:
            name = _EXPERTS.get(what)
            return None if name is None else str(getattr(self.names, name)).format(expert=expert)
        return self.names.router if what == "ffn_gate_inp" else _LAYER.get(what)

    def spelled(self, tensor: str) -> str:
        """Return the name that a GGUF file has for a checkpoint's tensor; the same if it has none."""
        for stem, module in _WHOLE.items():
            if tensor == f"{module}.weight":
                return f"{stem}.weight"
        if (inside := _INSIDE.fullmatch(tensor)) is None:
            return tensor
        layer, module, kind = inside.groups()
        names = {module: stem for stem, module in _LAYER.items()} | {self.names.router: "ffn_gate_inp"}
        names |= {str(getattr(self.names, field)): f"{stem}_exps" for stem, field in _EXPERTS.items()}
        found = names.get(module) or names.get(_EXPERT.sub("{expert}", module))
        return tensor if found is None else f"blk.{layer}.{found}.{kind}"
