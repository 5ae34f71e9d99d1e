"""Small random rerankers, written by transformers, and what transformers computes with them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers

import tiny

QUERY = "What is a penstock?"
DOCUMENTS = ["A pipe to a turbine.", "no", "Bread is made of flour; \u00e9t\u00e9.\n", "It is a yes."]
MORE = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
VOCAB = 280
SETTINGS = {"device": "cpu", "dtype": "float32", "device_memory": "200MiB", "max_length": 512}


def add_tokenizer(folder: Path, *, pairs: bool = False, template: str | None = None) -> None:
    """Bytes, yes and no, and the marks of a conversation. pairs: it puts <s> before each text of a pair."""
    words = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate([*words, "ye", "yes", "no"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("y", "e"), ("ye", "s"), ("n", "o")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(MORE)
    if pairs:
        first = made.token_to_id("<s>")
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", first)]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def answering(folder: Path, case: str = "qwen3", *, template: str | None = None) -> Path:
    """A model for texts that answers yes or no; it is known by its name."""
    tiny.write(tiny.CASES[case], folder, vocab_size=VOCAB)
    add_tokenizer(folder, template=template)
    return folder


def classifying(folder: Path, case: str, *, labels: int = 1, pairs: bool = False) -> Path:
    """A model that ends in a classifier."""
    kind = tiny.CASES[case]
    tiny.write(kind, folder, vocab_size=VOCAB)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=labels)
    (folder / "model.safetensors").unlink()
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    tiny.randomise(model, 3, embedding=1.0)
    model.float().save_pretrained(folder)
    add_tokenizer(folder, pairs=pairs)
    return folder


def copied(folder: Path, to: Path, **changed: object) -> Path:
    """The same checkpoint, with other keys in config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | changed
    (to / "config.json").write_text(json.dumps(config))
    return to


def put(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    """A pair as the model card of Qwen3-Reranker has it."""
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@torch.inference_mode()
def answered(folder: Path, texts: Sequence[str]) -> list[float]:
    """The probability of yes against no behind each text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    found = list[float]()
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        found.append(float(model(ids).logits[0, -1, words].softmax(-1)[1]))
    return found


@torch.inference_mode()
def classified(folder: Path, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The logit of each pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    found = list[float]()
    for query, document in pairs:
        ids = tokenizer(query, document, return_tensors="pt").input_ids
        found.append(float(model.eval()(ids).logits[0, 0]))
    return found


def near(found: Sequence[float], true: Sequence[float]) -> bool:
    return len(found) == len(true) and all(
        abs(one - other) < 1e-4 for one, other in zip(found, true, strict=True)
    )
