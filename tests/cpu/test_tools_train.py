"""The tools that make the shipped model: stories, hidden facts, and a training run small enough for a CPU."""

import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))  # the tools are scripts, not a package

import corpus  # noqa: E402
import needles  # noqa: E402
import rows  # noqa: E402
import small_llama  # noqa: E402
import stories  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return corpus.train_tokenizer(corpus.tokenizer_texts([], 3, 150), 800)


def test_stories_are_deterministic_and_varied() -> None:
    first, again = ([stories.make_story(random.Random(i)).text for i in range(300)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 300
    words = set(re.findall(r"[a-z']+", " ".join(first).lower()))
    assert len(words) > 1000
    lengths = [len(text.split()) for text in first]
    assert min(lengths) > 80
    assert max(lengths) < 450
    assert not [text for text in first if re.search(r"[\[\]{}<>|]|\. [a-z]|  | a [aei]", text)]


def test_stories_follow_the_request() -> None:
    for plot in stories.PLOTS:
        story = stories.make_story(random.Random(plot), kind="otter", name="Nora", plot=plot)
        assert story.kind == "otter"
        assert "Nora" in story.text
        assert "otter" in story.text
        assert story.theme == stories.TITLES[plot]


def test_chat_template_is_what_render_chat_gives() -> None:
    jinja2 = pytest.importorskip("jinja2")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello\n"},
        {"role": "assistant", "content": "Hi!"},
    ]
    for generate in (True, False):
        given = {"messages": messages, "add_generation_prompt": generate, "bos_token": needles.END_OF_TEXT}
        rendered = jinja2.Template(needles.CHAT_TEMPLATE).render(**given)
        assert rendered == needles.render_chat(messages, generate)


@pytest.mark.parametrize("style", ["chat", "plain", "passkey"])
def test_samples_have_the_length_the_depth_and_the_answer(tok: Tokenizer, style: str) -> None:
    text = "\n\n".join(stories.make_story(random.Random(i)).text for i in range(60))
    for depth in (0.0, 0.3, 0.7, 1.0):
        sample = needles.make_sample(2000, depth, random.Random(f"{depth}{style}"), tok, text, style)
        assert 1900 < sample.tokens <= 2000
        assert sample.value in sample.answer
        assert abs(sample.prompt.index(sample.value) / len(sample.prompt) - depth) < 0.12
        again = needles.make_sample(2000, depth, random.Random(f"{depth}{style}"), tok, text, style)
        assert again == sample
        whole = tok.encode(sample.prompt + sample.answer, add_special_tokens=False).ids
        apart = (
            tok.encode(sample.prompt, add_special_tokens=False).ids
            + tok.encode(sample.answer, add_special_tokens=False).ids
        )
        assert whole == apart


def test_rows_have_the_tokens_of_their_text(tok: Tokenizer) -> None:
    book = "\n\n".join(stories.make_story(random.Random(i)).text.replace(". ", ".\n") for i in range(40))
    made = corpus.build_corpus(tok, [book], 1, 200, multiprocessing.get_context("spawn"), 0)
    assembler = rows.Assembler(made)
    for length in (512, 2048):
        batch = assembler.fact_batch(6, length, seed=length)
        for ids, spans, weights in zip(batch.tokens.tolist(), batch.spans, batch.weights, strict=True):
            text = tok.decode(ids, skip_special_tokens=False)
            assert tok.encode(text, add_special_tokens=False).ids == ids
            for number in range(1, spans.max() + 1):
                value = tok.decode([i for i, s in zip(ids, spans, strict=True) if s == number]).strip(" .")
                assert text.count(value) >= 2  # in the text and in the answer
            assert (weights[spans > 0] == corpus.VALUE).all()


def run(*args: str) -> str:
    """A tool in a process of its own: it forks."""
    done = subprocess.run(
        [sys.executable, str(TOOLS / args[0]), *args[1:]],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_train_resume_export_and_load_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    common = ["train_model.py", "--tiny", "--processes", "1", "--documents", "60", "--log-every", "2"]
    common += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "model")]
    run(*common, "--steps", "3", "--until", "0.5")
    assert json.loads((tmp_path / "model" / "train_state.json").read_text())["progress"] == 0.5
    printed = run(*common, "--steps", "2")
    assert "'step': 3" in printed
    summary = json.loads((tmp_path / "model" / "train_state.json").read_text())
    assert (summary["step"], summary["progress"]) == (5, 1.0)

    folder = tmp_path / "model"
    shape, weights = small_llama.load(folder, torch.device("cpu"), torch.float32)
    ours = small_llama.SmallLlama(shape, weights, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the passkey? It is 48213."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == needles.render_chat(messages)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (
        tokenizer(text.removeprefix(needles.END_OF_TEXT))["input_ids"] == ids
    )  # the tokenizer puts it before a text
    digits = [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).strip().isdigit()]
    assert digits == list("48213")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(
            ours.logits(ours.hidden(torch.tensor([ids]))), expected, atol=1e-4, rtol=1e-4
        )
    greedy = theirs.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)[
        0, len(ids) :
    ].tolist()
    assert ours.generate(ids, 6, set()) == greedy
