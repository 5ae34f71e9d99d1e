"""Names of models of the Hub: what is one, what of it is what, and which files it means."""

import pytest

from penstock.hub.choice import choose_gguf, gguf_models, is_checkpoint, shown_quants, side_files
from penstock.hub.faults import HubError
from penstock.hub.names import ModelName, looks_like_model, quant_of


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", "", "")),
        ("https://hf.co/Qwen/Qwen3-8B/", ("Qwen/Qwen3-8B", "", "")),
        ("a/b@main", ("a/b", "main", "")),
        ("a/b@refs/pr/1", ("a/b", "refs/pr/1", "")),
        ("a/b:m.gguf", ("a/b", "", "m.gguf")),
        ("a/b/m.gguf", ("a/b", "", "m.gguf")),
        ("a/b/sub/m.GGUF", ("a/b", "", "sub/m.GGUF")),
        ("a/b:Q4_K_M", ("a/b", "", "Q4_K_M")),
        ("a/b@v1:Q4_K_M", ("a/b", "v1", "Q4_K_M")),
        ("a/b:Q4_K_M@v1", ("a/b", "v1", "Q4_K_M")),
        ("a/b@v1/m.gguf", ("a/b", "v1", "m.gguf")),
        ("hf.co/a/b:q8_0", ("a/b", "", "q8_0")),
        ("huggingface.co/a/b", ("a/b", "", "")),
        ("hf://a/b@x", ("a/b", "x", "")),
        ("https://huggingface.co/a/b", ("a/b", "", "")),
        ("https:/huggingface.co/a/b", ("a/b", "", "")),
        ("https://huggingface.co/a/b/tree/main", ("a/b", "", "")),
        ("https://huggingface.co/a/b/tree/v1", ("a/b", "v1", "")),
        ("https://huggingface.co/a/b/blob/v1/x/m.gguf", ("a/b", "v1", "x/m.gguf")),
        ("https://hf.co/a/b/resolve/main/m.gguf", ("a/b", "", "m.gguf")),
        ("https://huggingface.co/a/b/resolve/main/m.gguf?download=true", ("a/b", "", "m.gguf")),
        ("https://huggingface.co/a/b?library=vllm#files", ("a/b", "", "")),
        (f"a/{'b' * 96}", (f"a/{'b' * 96}", "", "")),
    ],
)
def test_what_a_name_means(text: str, parts: tuple[str, str, str]) -> None:
    name = ModelName.parse(text)
    assert name == ModelName(*parts)
    assert ModelName.parse(str(name)) == name
    assert looks_like_model(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "gpt2", "a", "a b/c", "/a/b", "./a/b", "../a/b", "~/a", "a/..", "../b", "a/b/c",
        "a/b/c/d", "a//b", "a/b@", "a/b:", "a/b@../x", "a/b:../m.gguf", "a/b:x/../../m.gguf",
        "a/b:/m.gguf", "a/b c", "a/b\n", "a/b@x@y", "-a/b", "a/b--c", "a/.b", "a/b/tree/main",
        "https://example.com/a/b", "https://huggingface.co/a/b/blob/main/x.py", "models/llama/",
        "a/b:Q4 K", "a/b@x:", "a/b.git", f"a/{'b' * 97}", "a/b?download=true",
    ],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    assert ModelName.parse(text) is None


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen3-8B", True), ("qwen3:8b", True), ("llama3.2", True), ("Llama-3.1-8B-Instruct", True),
        ("gpt-oss:20b", True), ("mistral:latest", True), ("smollm2:135m-instruct-q4_K_M", True),
        ("Hello", False), ("llama", False), ("Note:this", False), ("10:30", False), ("B-52", False),
        ("Once upon a time", False), ("qwen3:8b is", False), ("", False), ("1-2b", False),
    ],
)  # fmt: skip
def test_a_name_without_its_owner_is_told_from_a_word(text: str, model: bool) -> None:
    assert looks_like_model(text) == model


QUANTS = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-UD-Q4_K_M.gguf", "m-BF16-00001-of-00002.gguf", "mmproj-F16.gguf")
MODELS = gguf_models(("README.md", *QUANTS, "m-BF16-00002-of-00002.gguf", "m.imatrix.gguf"))


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("", ("m-Q4_K_M.gguf",)),
        ("q4_k_m", ("m-Q4_K_M.gguf",)),
        ("Q8_0", ("m-Q8_0.gguf",)),
        ("m-Q8_0.gguf", ("m-Q8_0.gguf",)),
        ("ud-q4_k_m", ("m-UD-Q4_K_M.gguf",)),
        ("BF16", ("m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf")),
    ],
)
def test_which_files_a_quant_is(file: str, found: tuple[str, ...]) -> None:
    assert choose_gguf(MODELS, ModelName("a/b", "", file)) == found


def test_a_quant_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(HubError, match=r"a/b@v has no GGUF file 'Q3_K'; name one of :BF16, :Q4_K_M, :Q8_0"):
        choose_gguf(MODELS, ModelName("a/b", "v", "Q3_K"))
    two = gguf_models(("m-Q8_0.gguf", "m-Q6_K.gguf"))
    with pytest.raises(HubError, match="several GGUF files, and none in Q4_K_M; name one of :Q6_K, :Q8_0"):
        choose_gguf(two, ModelName("a/b"))
    assert choose_gguf(gguf_models(["x/only.gguf"]), ModelName("a/b")) == ("x/only.gguf",)
    assert shown_quants(["a.gguf", "b.gguf"]) == ":a.gguf, :b.gguf"


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("x/m.IQ2_XXS.gguf", "IQ2_XXS"),
        ("m-UD-Q6_K_XL-00001-of-00003.gguf", "UD-Q6_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-f16.gguf", "F16"),
        ("Q8/model.gguf", "Q8"),
        ("model.gguf", ""),
    ],
)
def test_the_quant_in_a_name(file: str, quant: str) -> None:
    assert quant_of(file) == quant


def test_which_files_of_a_checkpoint_are_read() -> None:
    paths = [
        "config.json", "tokenizer.json", "tokenizer.model", "modeling_x.py", "model.safetensors",
        "x/config.json", "pytorch_model.bin", "chat_template.jinja",
        "additional_chat_templates/tool.jinja", "README.md",
        "generation_config.json", "onnx/model.onnx", "tf_model.h5", "additional_chat_templates/evil.py",
        "modules.json", "1_Pooling/config.json", "1_Pooling/x.py",
    ]  # fmt: skip
    assert is_checkpoint(paths)
    assert side_files(paths) == (
        "1_Pooling/config.json",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "modules.json",
        "tokenizer.json",
    )
    assert not is_checkpoint(["config.json", "pytorch_model.bin"])
