"""Checkpoints of every family, written by transformers, come out byte for byte; whatever is wrong with one is
said in one line."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import specs
from penstock import LLM, SamplingParams
from penstock.api.text.tokenizer import Tokenizer
from penstock.arch.families import FAMILIES, read_spec
from penstock.arch.formats.format import TensorSlice
from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.mixers.attention import Attention
from penstock.arch.spec import Activation
from penstock.base.errors import CheckpointError, PenstockError, UnsupportedModelError
from penstock.weights.checkpoint import shards
from penstock.weights.checkpoint.identity import STEP_BYTES
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.tensors import SERIAL, STAGE_BYTES
from penstock.weights.pieces import PIECE_BYTES
from safetensor_files import entry, flip, sealed

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_bias": True,
    "mlp_bias": True,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [1],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def written(family: str, path: Path, dtype: str = "float32", **keys: object) -> transformers.PreTrainedModel:
    """A random model of a family, its checkpoint in `path` in shards of 100 KB."""
    default = transformers.AutoConfig.for_model(family)
    names = {"head_dim", *default.attribute_map, *default.to_dict()}
    config = transformers.AutoConfig.for_model(
        family, **{key: value for key, value in SMALL.items() if key in names} | keys
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape))
    model.to(DTYPES[dtype]).save_pretrained(path, max_shard_size="100KB")
    return model


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp(request.param)
    written(request.param, path)
    return request.param, path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small sound checkpoint in one file, to be damaged."""
    written("llama", tmp_path, tie_word_embeddings=True)
    change_tensors(tmp_path, lambda tensors: None)
    return tmp_path


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the checkpoint's tensors, changed, into a single file."""
    tensors = stored(path)
    change(tensors)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")


def change_config(path: Path, **keys: object) -> None:
    """Change keys of config.json; one that becomes `...` is taken out."""
    config = json.loads((path / "config.json").read_text()) | keys
    (path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def refusal(call: Callable[[], object], kind: type[PenstockError] = CheckpointError) -> str:
    with pytest.raises(PenstockError) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def alone(code: str, *arguments: str) -> str:
    """What a process of its own prints when it runs this code."""
    environment = os.environ | {
        "PYTHONHASHSEED": "12345",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def verify(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        checkpoint.verify(group_layouts(checkpoint.spec, checkpoint.names, "float32"))


def check_groups(path: Path, dtype: str) -> None:
    """Every field of every group holds its sources, one below the other, converted as torch converts; the
    rest is zero."""
    tensors = stored(path)
    with Checkpoint.open(path) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, dtype)
        checkpoint.verify(layouts)
        for layout in layouts:
            found = torch.full((layout.size,), 0xEE, dtype=torch.uint8)
            checkpoint.read_piece(layout, 0, found)
            assert torch.equal(found, expected(layout, tensors, dtype))


def expected(layout: GroupLayout, tensors: dict[str, torch.Tensor], dtype: str) -> torch.Tensor:
    group = torch.zeros(layout.size, dtype=torch.uint8)
    for field in layout.fields:
        exact = field.dtype == "float32" and field.name in ("router", "correction")
        assert exact or field.dtype == dtype
        whole = torch.cat([part_of(tensors, source) for source in field.sources])
        whole = whole.to(DTYPES[field.dtype]).contiguous()
        assert whole.shape == field.shape
        group[field.offset : field.offset + whole.nbytes] = whole.view(-1).view(torch.uint8)
    return group


def part_of(tensors: dict[str, torch.Tensor], source: TensorSlice) -> torch.Tensor:
    tensor = tensors[source.tensor]
    tensor = tensor if source.index is None else tensor[source.index]
    tensor = tensor.t() if source.transposed else tensor
    return tensor if source.rows is None else tensor[source.rows.start : source.rows.stop : source.rows.step]


# ---- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_field_of_every_family(family: tuple[str, Path], dtype: str) -> None:
    _, path = family
    assert len(list(path.glob("model-*.safetensors"))) > 1
    check_groups(path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("file", ["bfloat16", "float16"])
def test_files_of_half_precision(tmp_path: Path, file: str, dtype: str) -> None:
    written("qwen3", tmp_path, file)
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {DTYPES[file]}
    check_groups(tmp_path, dtype)


def test_spec_means_the_model_that_transformers_builds(family: tuple[str, Path]) -> None:
    name, path = family
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with Checkpoint.open(path) as checkpoint:
        spec = checkpoint.spec
    config = model.config
    assert spec.family == name
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (3, 4, 2, 24)
    assert (spec.norm_eps, spec.max_length, spec.tied_embeddings) == (
        config.rms_norm_eps,
        32 * 4096 if name == "gpt_oss" else 64,
        config.tie_word_embeddings,
    )
    layers = model.model.layers
    for layer in layers:
        attention = layer.self_attn
        mixer = spec.stack[0].mixer
        assert isinstance(mixer, Attention)
        assert mixer.qkv_bias == (attention.k_proj.bias is not None)
        assert mixer.out_bias == (attention.o_proj.bias is not None)
        assert mixer.qk_norm == hasattr(attention, "q_norm")
        assert mixer.sinks == hasattr(attention, "sinks")
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if name in ("mistral", "mixtral"):
        windows = [config.sliding_window] * 3
    assert list(spec.windows) == windows
    everywhere = name in ("llama", "glm4_moe", "minimax_m2")
    assert set(windows) == (
        {None} if everywhere else {None, 16} if name in ("qwen2", "qwen3", "qwen2_moe", "gpt_oss") else {16}
    )
    assert [spec.is_moe(number) for number in range(3)] == [hasattr(layer.mlp, "experts") for layer in layers]
    if spec.moe is not None:
        assert (spec.moe.experts, spec.moe.top_k) == (4, 2)


def test_defaults_of_configs_that_leave_keys_out(family: tuple[str, Path]) -> None:
    """What transformers takes for a key that is not there, the spec takes as well."""
    name, _ = family
    shape = {
        "vocab_size": 64,
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
    }
    config = transformers.AutoConfig.for_model(name, **shape)
    spec = read_spec({"model_type": name, **shape})
    assert spec.kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 128)
    assert spec.max_length == config.max_position_embeddings
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.rope.dim == spec.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)
    assert spec.tied_embeddings == config.tie_word_embeddings
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    assert list(spec.windows) == (
        [window] * 40
        if types is None
        else [window if kind == "sliding_attention" else None for kind in types]
    )
    if spec.moe is not None:
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        assert (spec.moe.experts, spec.moe.top_k) == (experts, config.num_experts_per_tok)
        assert spec.moe.intermediate_size == getattr(
            config, "moe_intermediate_size", config.intermediate_size
        )
        router = spec.moe.router
        assert router.normalise == getattr(config, "norm_topk_prob", name != "gpt_oss")
        assert router.groups == getattr(config, "n_group", 1)
        assert router.top_groups == getattr(config, "topk_group", 1)
        assert router.scale == getattr(config, "routed_scaling_factor", 1.0)
        shared = getattr(config, "n_shared_experts", 0) * spec.moe.intermediate_size
        assert spec.shared_size == getattr(config, "shared_expert_intermediate_size", shared)
        dense = getattr(config, "first_k_dense_replace", 0)
        assert list(spec.moe_layers) == [layer >= dense for layer in range(40)]
        if name == "gpt_oss":
            assert spec.moe.activation == Activation(config.swiglu_alpha, 1.0, config.swiglu_limit)
            assert (spec.rope.kind, spec.rope.truncate, spec.rope.factor) == ("yarn", False, 32)


@pytest.mark.parametrize(
    ("file", "dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16"), ("float32", "float32")],
)
def test_tensors_beyond_every_border(tmp_path: Path, file: str, dtype: str) -> None:
    """A matrix of several requests, several stages in each and a rest smaller than one call converts."""
    shape = {
        "vocab_size": 2 * (3 * STAGE_BYTES + SERIAL + 5),
        "hidden_size": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    written("llama", tmp_path, file, **shape, head_dim=2, num_hidden_layers=1, tie_word_embeddings=True)
    check_groups(tmp_path, dtype)


def test_trained_checkpoint(shared_data: Path) -> None:
    path = shared_data / "stories260k_hf"
    for dtype in DTYPES:
        check_groups(path, dtype)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.path == path
        assert checkpoint.config["num_hidden_layers"] == 5
        assert checkpoint.generation.temperature == 0
        assert checkpoint.generation.eos_tokens == (1, 2)


def test_generation_defaults_and_their_absence(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"eos_token_id": [130, 131], "top_k": 5}')
    with Checkpoint.open(llama) as checkpoint:
        assert (checkpoint.generation.eos_tokens, checkpoint.generation.top_k) == ((130, 2), 5)
    (llama / "generation_config.json").unlink()
    with Checkpoint.open(llama) as checkpoint:
        assert (checkpoint.generation.eos_tokens, checkpoint.generation.bos_token) == ((2,), 1)
    (llama / "generation_config.json").symlink_to("nowhere")
    assert "generation_config.json" in refusal(lambda: Checkpoint.open(llama))


def test_dtype_of_the_files_where_the_config_names_none(tmp_path: Path) -> None:
    written("llama", tmp_path, "bfloat16")
    change_config(tmp_path, dtype=...)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.spec.dtype == "bfloat16"
    for key in ("torch_dtype", "dtype"):
        change_config(tmp_path, torch_dtype=...)
        change_config(tmp_path, **{key: "float16"})
        with Checkpoint.open(tmp_path) as checkpoint:
            assert checkpoint.spec.dtype == "float16"
    change_config(tmp_path, dtype=...)
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.spec.dtype == "float32"


def test_tensors_of_the_wanted_dtype_are_taken_as_they_are(tmp_path: Path) -> None:
    """Conversion would refuse what is not finite."""
    written("llama", tmp_path, "float16")
    change_tensors(tmp_path, lambda tensors: tensors["model.norm.weight"][0].fill_(float("inf")))
    check_groups(tmp_path, "float16")


def test_rounds_to_nearest_even_and_refuses_what_float16_cannot_hold(llama: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(
        llama,
        lambda tensors: (
            tensors[name].view(-1)[:4].copy_(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 65504, -1e-8]))
        ),
    )
    check_groups(llama, "bfloat16")
    check_groups(llama, "float16")
    for worst in (65520.0, -65520.0, float("nan")):
        change_tensors(llama, lambda tensors, worst=worst: tensors[name].view(-1)[-1].fill_(worst))
        assert f"tensor {name} has values beyond float16" in refusal(lambda: check_groups(llama, "float16"))
    for most in (1e30, float("inf")):
        change_tensors(llama, lambda tensors, most=most: tensors[name].view(-1)[-1].fill_(most))
        check_groups(llama, "bfloat16")


# ---- what is refused ---------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} does not exist" in refusal(lambda: Checkpoint.open(tmp_path / "none"))
    assert "does not exist" in refusal(lambda: Checkpoint.open(Path("a\0b")))
    (tmp_path / "file").touch()
    assert "is a file" in refusal(lambda: Checkpoint.open(tmp_path / "file"))
    assert f"{tmp_path} has no config.json; give a model's directory" in refusal(
        lambda: Checkpoint.open(tmp_path)
    )


def test_config_that_is_none(llama: Path) -> None:
    for text, fault in (("", "not JSON"), ("[]", "not a JSON object"), ('{"a": 1, "a": 2}', "twice")):
        (llama / "config.json").write_text(text)
        assert fault in refusal(lambda: Checkpoint.open(llama))
    with (llama / "config.json").open("r+b") as file:
        file.truncate(10_000_001)
    assert "more than" in refusal(lambda: Checkpoint.open(llama))


def test_model_of_something_else(llama: Path) -> None:
    change_config(llama, model_type="gpt2")
    assert f"{llama / 'config.json'}: key 'model_type'" in refusal(
        lambda: Checkpoint.open(llama), UnsupportedModelError
    )


def test_config_far_beyond_the_files(tmp_path: Path) -> None:
    """Nothing is laid out for layers and experts that the files cannot have."""
    written("mixtral", tmp_path)
    for keys in ({"num_hidden_layers": 2**16}, {"num_local_experts": 2**16}):
        change_config(tmp_path, **keys)
        assert "tensors; " in refusal(lambda: Checkpoint.open(tmp_path))
        change_config(tmp_path, num_hidden_layers=3, num_local_experts=4)
    verify(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_link_out_of_the_directory_is_refused(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """As of a checkpoint, and as of a tokenizer's directory."""
    elsewhere, file = tmp_path_factory.mktemp("elsewhere"), llama / name
    if not file.exists():
        file.write_text("{}")
    shutil.move(file, elsewhere / name)
    file.symlink_to(elsewhere / name)
    assert f"{file} is a link to" in refusal(lambda: Checkpoint.open(llama))
    with pytest.raises(CheckpointError, match="is a link to"):
        Tokenizer.from_directory(llama)


def test_more_tensors_than_any_model_has(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(stored(llama))
    monkeypatch.setattr(shards, "MAX_TENSORS", count)
    verify(llama)
    monkeypatch.setattr(shards, "MAX_TENSORS", count - 1)
    assert f"more than {count - 1} tensors" in refusal(lambda: verify(llama))


def test_missing_tensors(llama: Path) -> None:
    change_tensors(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert f"{llama} lacks tensor model.layers.1.mlp.up_proj.weight that" in refusal(lambda: verify(llama))
    with Checkpoint.open(llama) as checkpoint:
        layout = next(
            one
            for one in group_layouts(checkpoint.spec, checkpoint.names, "float32")
            if str(one.id) == "ffn.1"
        )
        message = refusal(
            lambda: checkpoint.read_piece(layout, 0, torch.empty(layout.size, dtype=torch.uint8))
        )
    assert "lacks tensor model.layers.1.mlp.up_proj.weight" in message
    change_tensors(llama, lambda tensors: tensors.pop("model.norm.weight"))
    message = refusal(lambda: verify(llama))
    assert "(and 1 more)" in message
    assert "tie_word_embeddings" not in message


def test_head_that_is_missing(llama: Path) -> None:
    change_config(llama, tie_word_embeddings=False)
    message = refusal(lambda: verify(llama))
    assert "lacks tensor lm_head.weight" in message
    assert "tie_word_embeddings" in message


def test_unexpected_tensors(llama: Path) -> None:
    change_tensors(
        llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.scale": torch.ones(1)})
    )
    message = refusal(lambda: verify(llama))
    assert (
        f"{llama / 'model.safetensors'} holds tensor 'model.layers.0.self_attn.q_proj.scale' that" in message
    )
    change_tensors(llama, lambda tensors: tensors.update({"v_head.weight": torch.ones(1)}))
    assert "(and 1 more)" in refusal(lambda: verify(llama))


def test_extra_tensors_that_do_no_harm(llama: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12),
        "model.rotary_emb.inv_freq": torch.ones(12),
    }
    change_tensors(llama, lambda tensors: tensors.update(extra))
    verify(llama)
    change_config(llama, num_hidden_layers=2)
    verify(llama)
    change_tensors(llama, lambda tensors: tensors.update({"inv_freq": torch.ones(12)}))
    assert "'inv_freq'" in refusal(lambda: verify(llama))


def test_tensors_of_layers_that_predict_several_tokens_are_left_for_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As GLM-4.5 has them, behind its last layer, and Qwen3-Next, in a module of their own."""
    written("glm4_moe", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.left_for_drafts == ()
    mtp = {
        name: torch.ones(4, 4)
        for name in (
            "model.layers.3.eh_proj.weight",
            "model.layers.3.mlp.experts.0.up_proj.weight",
            "model.layers.3.shared_head.norm.weight",
            "model.mtp.layers.0.enorm.weight",
            "mtp.fc.weight",
        )
    }
    change_tensors(tmp_path, lambda tensors: tensors.update(mtp))
    verify(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.left_for_drafts == tuple(sorted(mtp))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    caplog.set_level(logging.INFO, "penstock")
    with LLM(tmp_path, device="cpu", dtype="float32") as llm, torch.inference_mode():
        [found] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert found.tokens[0] == int(model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
    assert any(
        one.message.startswith("left for drafts: 5 tensors behind the last layer") for one in caplog.records
    )
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(4)}))
    assert "eh_proj" in refusal(lambda: verify(tmp_path))
    change_tensors(tmp_path, lambda tensors: [tensors.pop("model.layers.2.eh_proj.weight")])
    change_tensors(tmp_path, lambda tensors: tensors.update({"mtpx.weight": torch.ones(4)}))
    assert "mtpx" in refusal(lambda: verify(tmp_path))


def test_head_beside_a_tied_embedding(llama: Path) -> None:
    embedding = "model.embed_tokens.weight"
    change_tensors(llama, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    verify(llama)
    for other in (lambda tensor: -tensor, lambda tensor: tensor.half(), lambda tensor: tensor.view(-1)):
        change_tensors(
            llama,
            lambda tensors, other=other: tensors.update(
                {"lm_head.weight": other(tensors[embedding]).clone()}
            ),
        )
        assert "set tie_word_embeddings to false" in refusal(lambda: verify(llama))
    change_config(llama, tie_word_embeddings=False)
    change_tensors(llama, lambda tensors: tensors.update({"lm_head.weight": -tensors[embedding]}))
    verify(llama)


def test_wrong_shapes_and_dtypes(llama: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    change_tensors(llama, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    message = refusal(lambda: verify(llama))
    assert (
        f"{llama / 'model.safetensors'}: tensor {name} has shape [96, 64]; config.json calls for [64, 96]"
        in message
    )
    change_tensors(
        llama, lambda tensors: tensors.update({name: tensors[name].T.contiguous().to(torch.float8_e4m3fn)})
    )
    message = refusal(lambda: verify(llama))
    assert f"{llama / 'model.safetensors'}: tensor {name} has dtype F8_E4M3" in message
    assert "dtype F8_E4M3" in refusal(lambda: check_groups(llama, "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_file_that_shrinks_after_it_was_opened(llama: Path, dtype: str) -> None:
    file = llama / "model.safetensors"
    with Checkpoint.open(llama) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, dtype)
        os.truncate(file, 20_000)
        message = refusal(
            lambda: [
                checkpoint.read_piece(layout, 0, torch.empty(layout.size, dtype=torch.uint8))
                for layout in layouts
            ]
        )
        assert f"cannot read {file} at byte" in message
        assert "it ends there" in message
        assert f"{file} changed while it was read" in refusal(checkpoint.fingerprint)


def test_every_file_is_given_back(family: tuple[str, Path], llama: Path) -> None:
    _, path = family
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint.open(path) as checkpoint:
        assert len(os.listdir("/proc/self/fd")) > before
        checkpoint.fingerprint()
    change_config(llama, num_hidden_layers=1000)
    refusal(lambda: Checkpoint.open(llama))
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the fingerprint ---------------------------------------------------------------------------------------


def fingerprint(path: Path) -> bytes:
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.fingerprint()


def test_fingerprint_is_the_same_in_every_process_and_place(tmp_path: Path) -> None:
    written("mixtral", tmp_path / "here")
    (tmp_path / "there").mkdir()
    for file in (tmp_path / "here").iterdir():
        shutil.copy(file, tmp_path / "there" / file.name)
    code = "import sys, pathlib; from penstock.weights.checkpoint.reader import Checkpoint as C; "
    code += "print(C.open(pathlib.Path(sys.argv[1])).fingerprint().hex())"
    found = alone(code, str(tmp_path / "there"))
    assert found == fingerprint(tmp_path / "here").hex()
    assert len(found) == 32


def test_fingerprint_tells_models_apart(llama: Path) -> None:
    name, found = "model.embed_tokens.weight", [fingerprint(llama)]
    change_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    found.append(fingerprint(llama))
    for change in (
        lambda tensors: tensors[name].view(-1)[0].add_(1),
        lambda tensors: tensors[name].view(-1)[-1].add_(1),
        lambda tensors: tensors["model.norm.weight"].mul_(1.5),
        lambda tensors: tensors.update({name: tensors[name].to(torch.bfloat16)}),
    ):
        change_tensors(llama, change)
        found.append(fingerprint(llama))
    assert len(set(found)) == len(found) == 6
    (llama / "generation_config.json").write_text('{"top_k": 5}')
    assert fingerprint(llama) == found[-1]


def test_fingerprint_sees_one_bit_anywhere(tmp_path: Path) -> None:
    """In every tensor, in the header, and wherever in a file of several pieces: first, last, middle, and any
    byte."""
    rng, seen = random.Random(4), set[bytes]()
    written("qwen3_moe", tmp_path / "mixture")
    written("llama", tmp_path / "large", vocab_size=40_000, tie_word_embeddings=True)
    change_tensors(tmp_path / "large", lambda tensors: None)
    assert (tmp_path / "large" / "model.safetensors").stat().st_size > PIECE_BYTES
    tried = 0
    for path in (tmp_path / "mixture", tmp_path / "large"):
        seen.add(before := fingerprint(path))
        with Checkpoint.open(path) as checkpoint:
            entries = [
                (stored.file.path, stored.entry.offset, stored.entry.size)
                for stored in checkpoint._shards.tensors.values()
            ]
        few = path.name == "large"  # Each try hashes 10 MiB.
        for file, first, size in entries:
            for at in (
                {rng.choice((first, first + size - 1))}
                if few
                else {first, first + size // 2, first + size - 1, first + rng.randrange(size)}
            ):
                flip(file, at, bit := rng.randrange(8))
                seen.add(fingerprint(path))
                flip(file, at, bit)
                tried += 1
        for at in (PIECE_BYTES - 1, PIECE_BYTES, STEP_BYTES - 1, STEP_BYTES, 9 << 20) if few else ():
            flip(entries[0][0], at, 3)
            seen.add(fingerprint(path))
            flip(entries[0][0], at, 3)
            tried += 1
        assert fingerprint(path) == before
    assert len(seen) == tried + 2


def test_fingerprint_sees_every_value_of_the_spec(llama: Path) -> None:
    """Also those that no tensor's shape tells of."""
    with Checkpoint.open(llama) as checkpoint:
        seen, spec = {checkpoint.fingerprint()}, checkpoint.spec
        others = list(specs.neighbours(spec))
        for other in others:
            checkpoint.spec = other
            seen.add(checkpoint.fingerprint())
    assert len(seen) == len(others) + 1


def test_what_no_weight_depends_on_is_no_part_of_it(llama: Path) -> None:
    before = fingerprint(llama)
    (llama / "tokenizer.json").write_text("{}")
    (llama / "generation_config.json").write_text('{"temperature": 0.5}')
    change_config(llama, _name_or_path="elsewhere")
    os.utime(llama / "model.safetensors", ns=(1, 1))
    assert fingerprint(llama) == before


def test_a_tied_head_is_compared_to_the_last_bit(tmp_path: Path) -> None:
    written("llama", tmp_path, vocab_size=20_000, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, vocab_size=20_000, tie_word_embeddings=True)
    assert config["tie_word_embeddings"]
    verify(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        head = checkpoint._shards.tensors["lm_head.weight"].entry
    rng = random.Random(5)
    for at in (0, head.size // 2 + 777, head.size - 1, STEP_BYTES, rng.randrange(head.size)):
        flip(file, head.offset + at, 0)
        assert "set tie_word_embeddings to false" in refusal(lambda: verify(tmp_path))
        flip(file, head.offset + at, 0)
    verify(tmp_path)


# ---- memory ------------------------------------------------------------------------------------------------

PEAK = """
import sys, torch, pathlib
from penstock.arch.layout import group_layouts
from penstock.weights.checkpoint.reader import Checkpoint
def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
for dtype in ("float32", "bfloat16"):
    with Checkpoint.open(pathlib.Path(sys.argv[1])) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, dtype)
        checkpoint.verify(layouts)
        layout = max(layouts, key=lambda one: one.size)
        place = torch.ones(layout.size, dtype=torch.uint8)
        checkpoint.read_piece(layouts[-1], 0, torch.empty(layouts[-1].size, dtype=torch.uint8))
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        checkpoint.read_piece(layout, 0, place)
        checkpoint.fingerprint()
        print(dtype, layout.size, memory("VmHWM") - before)
"""


def test_reading_takes_a_few_mebibytes_beside_the_destination(tmp_path: Path) -> None:
    """A group of 64 MiB as float32, from a sparse file; whole copies, or mapped pages, would show."""
    rows, columns = 2**18, 64
    written("llama", tmp_path, num_hidden_layers=1, vocab_size=8, tie_word_embeddings=True)
    change_config(tmp_path, vocab_size=rows)
    shapes = {name: list(tensor.shape) for name, tensor in stored(tmp_path).items()} | {
        "model.embed_tokens.weight": [rows, columns]
    }
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = entry("F32", shape, at, at + 4 * prod(shape))
        at += 4 * prod(shape)
    file = tmp_path / "model.safetensors"
    file.write_bytes(sealed(json.dumps(header).encode()))
    os.truncate(file, file.stat().st_size + at)
    found = alone(PEAK, str(tmp_path)).splitlines()
    assert len(found) == 2
    for line in found:
        dtype, size, grown = line.split()
        assert int(size) == rows * columns * DTYPES[dtype].itemsize
        assert int(grown) < 16 << 20, dtype
