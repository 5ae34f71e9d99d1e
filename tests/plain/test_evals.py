"""Prompts of the evaluation are of the asked length, hide what is asked for where they should, and answers
are scored right."""

import json
import random
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import click
import pytest
from PIL import Image

from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import ConfigError, RequestError
from penstock.cli.commands import eval as cli
from penstock.cli.main import main
from penstock.cli.prompt import SHIPPED_MODEL
from penstock.evals import phrases
from penstock.evals.phrases import facts, generated_text
from penstock.evals.picture import boxes, colour, draw
from penstock.evals.prompts import ANSWER_TOKENS, Dress, Haystack, text_of
from penstock.evals.report import EvalCell, EvalReport, percent, wilson
from penstock.evals.tasks import TASKS, Material, Sample, exact, share

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # scripts, not a package

import needles
import story_words

BLOCK = 32
SHIPPED, STORIES, QWEN = "shipped", "stories260k_hf", "tokenizer_qwen_hf"
DEPTHS = [0.0, 0.1, 0.25, 0.5, 0.8, 1.0]


@cache
def material(model: str = SHIPPED, raw: bool = False, text: str | None = None) -> Material:
    path = (
        SHIPPED_MODEL if model == SHIPPED else Path(__file__).resolve().parents[3] / "shared" / "data" / model
    )
    if not path.is_dir():
        pytest.skip("needs the real material in ../shared/data, which is not here")
    dress = Dress(Tokenizer.from_directory(path), raw)
    return Material(
        dress, Haystack(generated_text(random.Random(1), 100_000) if text is None else text, dress, 4096)
    )


def make(
    task: str, length: int = 1024, depth: float = 0.5, seed: int = 1, of: Material | None = None
) -> Sample:
    return TASKS[task].make(random.Random(seed), length, depth, of or material())


def told(sample: Sample) -> str:
    return material().dress.tokenizer.decode(sample.tokens, skip_special=False)


# -- what is said
# ------------------------------------------------------------------------------------------------------------


def test_facts_and_questions_are_phrased_as_the_shipped_model_was_trained() -> None:
    assert set(phrases.INSTRUCTIONS) <= set(needles.INSTRUCTIONS)
    assert phrases.CHAT_LEAD in needles.QUESTION_LEADS
    assert (phrases.RAW_LEAD, phrases.RAW_ANSWER + "x") in [
        (lead, between + "x") for lead, between in needles.PLAIN_LEADS
    ]
    kinds = Counter()
    for seed in range(20):
        for fact, _ in zip(facts(random.Random(seed)), range(20), strict=False):
            key = "t" + fact.answer_head.removesuffix(" is")[1:]
            words = {"np": key, "Np": "T" + key[1:], "v": fact.value}
            assert fact.statement in [form.format(**words) for form in needles.STATEMENTS]
            assert fact.question in [form.format(**words) for form in needles.QUESTIONS]
            trained = needles.Fact(key, fact.value, fact.statement, fact.question, fact.answer_head)
            assert trained.answer == f"The{key[3:]} is {fact.value}."
            if person := re.fullmatch(r"the (.+) of ([A-Z]\w+)", key):
                assert person[1] in needles.PERSON_LABELS
                assert person[2] in story_words.GIRLS + story_words.BOYS
            else:
                thing = re.fullmatch(r"the (.+) of the (\w+) (\w+)", key)
                assert thing
                assert thing[1] in needles.THING_LABELS
                assert thing[2] in needles.ADJECTIVES
                assert thing[3] in needles.NOUNS
            kinds[bool(person)] += 1
    assert min(kinds[True], kinds[False]) > 100


def test_names_and_numbers_of_facts_occur_once() -> None:
    some = list(facts(random.Random(3)))
    assert len(some) > 300
    assert len({fact.answer_head for fact in some}) == len({fact.value for fact in some}) == len(some)


def test_generated_text_is_varied_prose_without_numbers() -> None:
    text = generated_text(random.Random(1), 100_000)
    assert len(text) >= 100_000
    assert text == generated_text(random.Random(1), 100_000)
    assert not re.search(r"[\d{}|]|  ", text)
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 200


# -- prompts
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_decided_by_its_seed(task: str) -> None:
    assert make(task, seed=5) == make(task, seed=5) != make(task, seed=6)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("model", [SHIPPED, STORIES, QWEN])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_exact(task: str, model: str, raw: bool) -> None:
    for length in (600, 777, 2048, 4001):
        sample = make(task, length, 0.3, length, material(model, raw))
        assert len(sample.tokens) == length - ANSWER_TOKENS


@pytest.mark.parametrize("task", ["single", "keys", "variables"])
def test_what_is_asked_for_stands_at_its_depth(task: str) -> None:
    tokenizer = material().dress.tokenizer
    for depth in DEPTHS:
        for seed in range(4):
            sample = make(task, 2048, depth, seed)
            text = told(sample)
            value = (
                sample.expected[0]
                if task != "variables"
                else next(iter(re.findall(r"the value (\d+),", text)))
            )
            beside = re.search(r"[^.!?\"]*" + value, text)
            assert beside
            before = len(tokenizer.encode(text[: beside.start()], special=False))
            hidden = len(tokenizer.encode(text[beside.start() : beside.end()], special=False))
            frame = len(tokenizer.encode(text[: text.index(".") + 1], special=False))
            after = len(tokenizer.encode("\n\n" + text.rpartition("\n\n")[2], special=False))
            room = len(sample.tokens) - frame - after
            others = {"single": 0, "keys": 16 * 24, "variables": 9 * 16}[
                task
            ]  # tokens of other statements that may stand before
            low, high = depth * (room - hidden - others), depth * room
            assert low - BLOCK <= before - frame <= high + BLOCK, (depth, seed)


@pytest.mark.parametrize("task", ["single", "keys", "variables"])
def test_prompts_are_tokens_as_the_text_itself_would_be(task: str) -> None:
    sample = make(task)
    assert material().dress.tokenizer.encode(told(sample), special=False) == sample.tokens


def test_a_prompt_wears_the_chat_template_or_what_a_plain_text_does() -> None:
    chat, raw = told(make("single")), told(make("single", of=material(raw=True)))
    assert re.match(
        r"<\|endoftext\|><\|user\|>\w.*\?<\|end\|><\|assistant\|>$|.*\.<\|end\|><\|assistant\|>$",
        chat,
        re.DOTALL,
    )
    assert re.match(r"<\|endoftext\|>\w.*\n\nQuestion: .*[.?]\nAnswer: The .* is$", raw, re.DOTALL)
    assert chat.count("<|endoftext|>") == raw.count("<|endoftext|>") == 1
    assert "<|user|>" not in raw
    without = material(STORIES).dress
    assert not without.chat
    assert make("single", of=material(STORIES)).tokens[0] == without.tokenizer.token_to_id("<s>")


def test_many_keys_are_there() -> None:
    values = re.findall(r"\d+", told(make("keys", 4096)))
    assert len(set(values)) == len(values) == 33
    assert len(re.findall(r"\d+", told(make("single", 4096)))) == 1


def test_variables_lead_to_their_value() -> None:
    for seed in range(5):
        sample = make("variables", seed=seed)
        text = told(sample)
        asked = re.search(r"have the value (\d+)", text)
        assert asked
        values: dict[str, str] = {}
        for name, number, other in re.findall(r"The value of (\w+) is (?:(\d+)|that of (\w+))\.", text):
            values[name] = number or values[other]  # what a name stands for has been told before
        assert {name for name, value in values.items() if value == asked[1]} == set(sample.expected)
        assert {name for name, value in values.items() if value != asked[1]} == set(sample.decoys)
        assert len(sample.expected) == len(sample.decoys) == 5


@pytest.mark.parametrize("length", [200, 512, 4096])
def test_frequent_words_are_the_most_frequent(length: int) -> None:
    sample = make("words", length)
    counts = Counter(told(sample).split("\n\n")[0].split()[6:])
    ranked = counts.most_common()
    assert {word for word, _ in ranked[:3]} == set(sample.expected)
    assert ranked[2][1] > ranked[3][1]
    assert set(list(counts)[:-1]) <= {*sample.expected, *sample.decoys}


def test_what_has_no_room_is_refused() -> None:
    for task in TASKS:
        with pytest.raises(RequestError, match=r"; give longer --lengths$"):
            make(task, 90)
    with pytest.raises(ConfigError, match="is empty"):
        material(text=" \n\n ")


@pytest.mark.parametrize("text", ["One.", "word " * 50, "äöü" * 200, "A short text. With two sentences."])
def test_any_text_will_do(text: str) -> None:
    sample = make("single", 300, 0.5, 1, material(text=text))
    assert len(sample.tokens) == 300 - ANSWER_TOKENS
    assert sample.expected[0] in told(sample)


def test_texts_of_a_folder_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("Zwei.")
    (tmp_path / "a.txt").write_text("\ufeffEins.")
    (tmp_path / "c.md").write_text("Drei.")
    assert text_of(tmp_path) == "Eins.\n\nZwei."
    assert text_of(tmp_path / "c.md") == "Drei."
    with pytest.raises(ConfigError, match=r"has no \.txt files"):
        text_of(Path(__file__).parent)
    (tmp_path / "d.md").write_bytes(b"Vier\xff")
    with pytest.raises(ConfigError, match=r"d\.md is not valid UTF-8"):
        text_of(tmp_path / "d.md")


# -- scores
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The code of Lily is 12345.", 1),
        ("12,345", 1),
        ("It is 12345, not 99.", 1),
        ("It is 99, not 12345.", 0),
        ("The code of Lily is 1234.", 0),
        ("The code of Lily is 123456.", 0),
        ("I do not know.", 0),
        ("", 0),
    ],
)
def test_an_exact_answer_has_the_number_first(answer: str, score: float) -> None:
    assert exact(answer, Sample([], ("12345",))) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("They are Kalo, Mira, Venka and Torsha.", 1),
        ("- kalo\n- mira\n- venka\n- torsha", 1),
        ("Kalo and Mira", 0.5),
        ("Kalo, Kalo, Kalo", 0.25),
        ("Kalora", 0),
        ("Kalo, Mira, Venka, Torsha, Dodo", 0.8),
        ("Kalo, Dodo, Lyku, Anro, Silva", 0.125),
        ("", 0),
    ],
)
def test_a_share_counts_what_is_found_and_what_is_named_wrongly(answer: str, score: float) -> None:
    assert (
        share(answer, Sample([], ("Kalo", "Mira", "Venka", "Torsha"), ("Dodo", "Lyku", "Anro", "Silva")))
        == score
    )


@pytest.mark.parametrize(("share", "count"), [(0.0, 8), (0.3, 10), (0.5, 1), (0.95, 88), (1.0, 8)])
def test_the_interval_holds_the_shares_that_lie_within_so_many_deviations(share: float, count: int) -> None:
    low, high = wilson(share, count)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if end not in (0, 1):
            assert abs(share - end) == pytest.approx(1.959964 * (end * (1 - end) / count) ** 0.5)
    assert low > 0 or share == 0
    assert high < 1 or share == 1


# -- what is shown
# -----------------------------------------------------------------------------------------------------------


def report() -> EvalReport:
    scores = {
        ("single", length, depth): length * depth / 1024
        for length in (256, 512, 1024)
        for depth in (0.0, 0.5, 1.0)
    }
    scores |= {("words", 512, None): 0.999}
    cells = [
        EvalCell(task, length, depth, 8, score, *wilson(score, 8), ())
        for (task, length, depth), score in scores.items()
    ]
    return EvalReport("ruler", "a/model", "generated", True, "float32", "cpu", 1, 8, 80, 5, 1.5, tuple(cells))


def test_the_table_has_every_score() -> None:
    lines = str(report()).splitlines()
    assert lines[0] == "a/model, float32 on cpu: 80 prompts, 5 tokens in 2 s"
    assert [line.split()[:5] for line in lines if line.startswith("  ")] == [
        ["tokens", "0", "50", "100", "all"],
        ["256", "0", "12", "25", "12.5%"],
        ["512", "0", "25", "50", "25.0%"],
        ["1,024", "0", "50", "100", "50.0%"],
        ["tokens", "all", "95", "%", "interval"],
        ["512", "99.9%", *lines[-1].split()[2:]],
    ]
    assert [percent(share) for share in (0, 0.001, 0.5, 0.999, 1)] == ["0", "1", "50", "99", "100"]


def test_the_line_has_every_cell() -> None:
    line = json.loads(report().line(machine={"cores": 2}))
    assert line["machine"] == {"cores": 2}
    assert len(line["cells"]) == 10
    assert line["cells"][5] == {
        "task": "single",
        "length": 512,
        "depth": 1.0,
        "samples": 8,
        "score": 0.5,
        "misses": [],
    } | dict(zip(("low", "high"), wilson(0.5, 8), strict=True))


def test_the_picture_has_a_cell_for_every_score_in_its_colour(tmp_path: Path) -> None:
    draw(report(), tmp_path / "map.png")
    found = list(boxes(report()))
    assert Counter((cell.task, cell.length, cell.depth) for cell, _ in found) == Counter(
        (cell.task, cell.length, cell.depth) for cell in report().cells
    )
    with Image.open(tmp_path / "map.png") as image:
        assert image.format == "PNG"
        paper = image.getpixel((0, 0))
        for cell, (left, top, right, bottom) in found:
            corners = [(left, top), (right - 1, top), (left, bottom - 1), (right - 1, bottom - 1)]
            assert [image.getpixel(corner) for corner in corners] == [colour(cell.score)] * 4
            assert image.getpixel((right, bottom)) == paper
            inside = image.crop((left, top, right, bottom)).getcolors(100_000)
            assert len(inside) > 1, "there is no number in the cell"
    places = {(cell.task, cell.length, cell.depth): box for cell, box in found}
    assert places["single", 256, 0.0][0] < places["single", 512, 0.0][0]  # longer to the right, deeper below
    assert places["single", 256, 0.0][1] < places["single", 256, 0.5][1] < places["words", 512, None][1]
    assert len({colour(part / 10) for part in range(11)}) == 11
    with pytest.raises(ConfigError, match="cannot write"):
        draw(report(), tmp_path)


# -- flags
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["needle", "--lengths", "512,many"],
            "'512,many' is not a list of token counts; write one like 4096,32K,1M",
        ),
        (["needle", "--lengths", "0"], "'0' is not a list of token counts"),
        (["needle", "--depths", "0"], "'--depths'"),
        (["needle", "--tasks", "keys"], "no such option"),
        (
            ["ruler", "--tasks", "keys,singing"],
            "'singing' is no task; give some of single,keys,variables,words",
        ),
        (["ruler", "--text", "/nowhere"], "'/nowhere' does not exist"),
        (["ruler", "--out", "/nowhere/a.json"], "cannot write /nowhere/a.json: its directory does not exist"),
        (
            ["ruler", "--picture", "/nowhere/a.png"],
            "cannot write /nowhere/a.png: its directory does not exist",
        ),
        (["needle", "--device-memory", "much"], "much"),
        (["needle", "--dtype", "int3"], "int3"),
        (["haystack"], "no such command 'haystack'"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("name", ["needle", "ruler"])
def test_every_option_is_explained_in_a_section(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\S.*):$", out, re.MULTILINE) == [
        "Work",
        "Output",
        "Engine",
        "Other options",
        "Examples",
    ]
    command = cli.command.commands[name]
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_the_tasks_of_the_flag_are_those_there_are() -> None:
    assert tuple(TASKS) == cli.TASKS
