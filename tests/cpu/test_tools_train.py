"""The tools that make the shipped model: stories, hidden facts, and a training run small enough for a CPU."""

import json
import multiprocessing
import os
import random
import re
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

import forks  # noqa: E402
from penstock import LLM, SamplingParams  # noqa: E402
from penstock.base.config import Config  # noqa: E402
from penstock.bench.routing.experts import RoutingWork, record  # noqa: E402
from penstock.bench.routing.recording import Recording  # noqa: E402


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


PATH = os.pathsep.join([str(TOOLS), *sys.path])
TOOL = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

HERE = """
import subprocess, sys
from penstock.cli.main import main
start = subprocess.run
def run(words, **more):
    if words[:3] != [sys.executable, "-m", "penstock"]:
        return start(words, **more)
    return subprocess.CompletedProcess(words, main(words[3:]))
subprocess.run = run
"""
"""Commands of penstock that a tool starts are run by its own process, which has imported torch."""


def run(*args: str) -> str:
    """A tool in a process of its own: it forks."""
    done = forks.run(
        [sys.executable, "-c", HERE + TOOL, str(TOOLS / args[0]), *args[1:]],
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
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


def test_a_small_mixture_learns_is_read_by_both_and_has_its_routing_recorded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = tmp_path / "texts" / "tales"
    texts.mkdir(parents=True)
    (texts / "tales.txt").write_text(
        "\n\n".join(stories.make_story(random.Random(i)).text for i in range(140))
    )
    folder, routings = tmp_path / "model", tmp_path / "routings"
    command = ["small_moe.py", "--tiny", "--experts", "16", "--steps", "14", "--documents", "40"]
    command += ["--processes", "1", "--log-every", "1", "--text", str(tmp_path / "texts"), "--work"]
    command += [str(tmp_path / "work"), "--out", str(folder), "--routings", str(routings)]
    flags = "--sequences 2 --prompt 40 --output 8 --device cpu --dtype float32"
    printed = run(*command, f"--bench={flags}")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 14
    assert losses[-1] < losses[0] - 0.5
    assert all(float(balance) >= 0.99 for balance in re.findall(r"balance ([\d.]+)", printed))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(folder, device="cpu", dtype="float32", max_length=128) as ours:
        ids = ours.encode((tmp_path / "work" / "tales.txt").read_text())[:40]
        scores = ours.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    seen: list[torch.Tensor] = []  # What each layer has before its feed-forward's norm.
    layers = theirs.model.layers
    for layer in layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        found = theirs(torch.tensor([ids]), output_router_logits=True)
    expected = found.logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert scores.prompt_logprobs is not None
    got = torch.tensor([one.logprob for one in scores.prompt_logprobs[1:] if one is not None])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

    # The first sequence is the beginning of the text that was held back.
    recording = Recording.read(routings / "tales.npz")
    assert recording.lengths.tolist() == [48, 48]
    assert recording.prompts.tolist() == [40, 40]
    assert (recording.model.experts, recording.model.top_k) == (16, 4)
    for layer, logits in enumerate(found.router_logits):
        assert recording.chosen[:40, layer].tolist() == logits.topk(4).indices.tolist()
    with torch.no_grad():
        early = layers[1].mlp.gate.weight @ layers[1].post_attention_layernorm(seen[0]).T
    assert recording.foretold[:40, 0].tolist() == early.T.topk(8).indices.tolist()
    # However a prompt is divided, its tokens are routed alike and stand in their order.
    config = Config(
        folder, device="cpu", dtype="float32", max_length=64, max_step_tokens=16, prefix_cache=False
    )
    text = (tmp_path / "work" / "tales.txt").read_text()
    again = record(config, RoutingWork(text, "tales.txt", 2, 40, 8), "model")
    assert (again.chosen[:40] == recording.chosen[:40]).all()
    assert (again.foretold[:40] == recording.foretold[:40]).all()
    report = json.loads((routings / "stories.json").read_text())
    assert [curve["batch"] for curve in report["curves"]] == [1, 16]
