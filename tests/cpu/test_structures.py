"""Outputs that are held to a structure: each is what was asked for, whatever else runs, and who asks for too
much is told at once."""

import gc
import json
import math
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers

openai = pytest.importorskip("openai", reason="needs the client that the server is for")

from penstock import LLM, Completion, SamplingParams, Structure  # noqa: E402
from penstock.api import structures as compiled  # noqa: E402
from penstock.api.llm import SHIPPED_MODEL  # noqa: E402
from penstock.api.structures import Structures  # noqa: E402
from penstock.api.text.tokenizer import Tokenizer  # noqa: E402
from penstock.base.errors import RequestError, StructureError  # noqa: E402
from penstock.cli.main import main  # noqa: E402
from penstock.ops.sampling import draw_reference  # noqa: E402
from penstock.server.answers.prompts import read  # noqa: E402
from penstock.server.broker.broker import BusyError  # noqa: E402
from penstock.server.parsing.forms import behind_reasoning, may_be_behind  # noqa: E402
from penstock.server.parsing.output_parser import REASONING_MARKS  # noqa: E402
from penstock.server.wire.decoding import decoded  # noqa: E402
from penstock.server.wire.requests import CompletionRequest  # noqa: E402
from penstock.step.plan import Admission, Row  # noqa: E402
from penstock.step.structure import LONGEST  # noqa: E402
from penstock.worker.runner import Runner  # noqa: E402
from penstock.worker.structures import Masks  # noqa: E402
from servers import FLAGS, Server, serving  # noqa: E402
from streams import LONG  # noqa: E402
from worlds import sampling  # noqa: E402

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 256,
    "block_size": 4,
    "max_sequences": 12,
    "check": True,
}
SCARCE = {"kv_blocks": 32}
"""Room for one request of all its length, and a little more."""
PROMPT = "Once upon a time"
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
"""Without spaces between parts, which this model likes more than anything else."""
PERSON = {
    **TIGHT,
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["old", "né", "a\"b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
NAMES = ["yes", "no", "née 🙂", "say \"hi\"\n"]  # fmt: skip
SUM = r"""
start: term ("+" term){0,4} "="
term: NUMBER | "(" NUMBER "-" (NUMBER | "(" NUMBER "-" NUMBER ")") ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


def is_sum(text: str) -> bool:
    """Of the grammar, and of nothing else."""
    term = r"(?:[1-9][0-9]{0,2})"
    while (shorter := re.sub(rf"\({term}-{term}\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(rf"{term}(?:\+{term}){{0,4}}=", text) is not None


KINDS: dict[str, tuple[Structure, Callable[[str], object]]] = {
    "schema": (Structure.json_schema(PERSON), lambda text: valid(json.loads(text), PERSON)),
    "regex": (
        Structure.regex(r"(\w{1,5} ){2,4}\d{2}:\d{2}"),
        lambda text: re.fullmatch(r"(\w{1,5} ){2,4}\d{2}:\d{2}", text),
    ),
    "choice": (Structure.choice(NAMES), lambda text: text in NAMES),
    "grammar": (Structure.lark(SUM), is_sum),
}


def valid(value: object, schema: Mapping[str, Any]) -> bool:
    """As far as the schemas of these tests go."""
    if "anyOf" in schema:
        return any(valid(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= known.keys()
                and all(valid(one, known[name]) for name, one in value.items())
            )
        case "array":
            size = schema.get("minItems", 0), schema["maxItems"]
            return (
                isinstance(value, list)
                and size[0] <= len(value) <= size[1]
                and all(valid(one, schema["items"]) for one in value)
            )
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case kind:
            return type(value) is {"boolean": bool, "null": type(None)}[kind]


def some_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One whose values are all short."""
    kinds = ["string", "integer", "boolean", "null", "enum", "object", "array", "anyOf"]
    match rng.choice(kinds if depth < 2 else kinds[:5]):
        case "enum":
            return {"enum": rng.sample(["x", "a b", 3, -1, None, True, {"k": [1]}, "\\ü"], 3)}
        case "anyOf":
            return {"anyOf": [some_schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["a", "b c", "ü", '"', "long_name"], rng.randint(1, 3))
            parts = {name: some_schema(rng, depth + 1) for name in names}
            return {
                "type": "object",
                "properties": parts,
                "required": names[: rng.randint(0, 2)],
                "additionalProperties": False,
            }
        case "array":
            return {
                "type": "array",
                "items": some_schema(rng, depth + 1),
                "minItems": rng.randint(0, 1),
                "maxItems": 2,
            }
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 6}
        case "integer":
            low = rng.randint(-200, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case kind:
            return {"type": kind}


@dataclass
class Asked:
    """What is asked at once: each kind of structure in several ways, and others with none between them."""

    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)

    def free(self) -> list[int]:
        return [at for at, one in enumerate(self.params) if one.structure is None]


def asked() -> Asked:
    made = Asked()
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "seed": 3, "n": 2},
        {"temperature": 1.5, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.5},
    ]
    for at, (structure, _) in enumerate(KINDS.values()):
        for way in ways:
            made.prompts.append(f"{PROMPT} {at}")
            made.params.append(SamplingParams(structure=structure, max_tokens=100, **way))
        made.prompts += ["The sea", "A boat"]
        made.params += [
            SamplingParams(temperature=0, max_tokens=9 + at),
            SamplingParams(seed=at, max_tokens=20, repetition_penalty=1.2),
        ]
    return made


ASKED = asked()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Begun at once: it loads while other tests run."""
    with serving(tmp_path_factory.mktemp("server"), "--port", "0", *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def llm(server: Server) -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def found(llm: LLM) -> list[Completion]:
    return llm.generate(ASKED.prompts, ASKED.params)


def tokens(completions: Sequence[Completion]) -> list[list[tuple[int, ...]]]:
    return [[output.tokens for output in one.outputs] for one in completions]


def never(text: str) -> dict[int, float]:
    """Of the tokens that begin so."""
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    return {
        token: -math.inf
        for token in range(tokenizer.vocabulary_size)
        if tokenizer.token_text(token).startswith(text)
    }


# ---- what comes of them


def test_every_output_is_what_was_asked_for(llm: LLM, found: list[Completion]) -> None:
    right = dict(KINDS.values())
    outputs = 0
    for one, params in zip(found, ASKED.params, strict=True):
        if params.structure is None:
            continue
        for output in one.outputs:
            outputs += 1
            assert output.finish_reason == "stop"
            assert right[params.structure](output.text), output.text
            assert output.tokens[-1] in (0, 1), "an end token is the last"
            assert (output.logprobs is not None) == (params.logprobs is not None)
    assert outputs == 16
    assert any(entry.rank > 1 for one in found for entry in one.logprobs or ()), (
        "no structure ever kept the model from anything"
    )


def test_who_has_none_says_what_it_would_without_them(llm: LLM, found: list[Completion]) -> None:
    free = ASKED.free()
    alone = llm.generate([ASKED.prompts[at] for at in free], [ASKED.params[at] for at in free])
    assert tokens(alone) == tokens([found[at] for at in free])


def test_a_stream_says_the_same(llm: LLM, found: list[Completion]) -> None:
    for at in (0, 10):
        with llm.stream(ASKED.prompts[at], ASKED.params[at]) as stream:
            pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == found[at].text
        assert pieces[-1].finish_reason == "stop"


def test_any_object_and_the_outputs_of_random_schemas(llm: LLM) -> None:
    rng = random.Random(11)
    schemas = [some_schema(rng) for _ in range(24)]
    params = [
        SamplingParams(
            structure=Structure.json_schema(TIGHT | one), seed=at, temperature=at % 3, max_tokens=240
        )
        for at, one in enumerate(schemas)
    ]
    for one, schema in zip(llm.generate([PROMPT] * len(schemas), params), schemas, strict=True):
        assert one.finish_reason == "stop", (one.text, schema)
        assert valid(json.loads(one.text), schema), (one.text, schema)
    wished = {
        token: 30.0
        for text in ("}", '"}', "{}")
        if len(ids := llm.tokenizer.encode(text, special=False)) == 1
        for token in ids
    }
    any_object = SamplingParams(structure=Structure.json_object(), logit_bias=wished, seed=1, max_tokens=100)
    assert isinstance(json.loads(llm.generate(PROMPT, any_object)[0].text), dict)


def test_they_are_the_same_where_requests_push_each_other_out_and_steps_run_ahead(
    found: list[Completion],
) -> None:
    with patch.object(Runner, "ahead", True), LLM(**SETTINGS | SCARCE) as llm:
        assert tokens(llm.generate(ASKED.prompts, ASKED.params)) == tokens(found)
        assert llm.stats().preemptions > 0


def test_two_ranks_say_what_one_does(found: list[Completion]) -> None:
    with patch.object(Runner, "ahead", True), LLM(**SETTINGS | {"check": False}, tensor_parallel=2) as llm:
        few = slice(0, 5)
        assert tokens(llm.generate(ASKED.prompts[few], ASKED.params[few])) == tokens(found[few])
        assert tokens(llm.generate(ASKED.prompts[0], ASKED.params[0])) == tokens(found[:1]), (
            "it likes what is no JSON better, on each rank"
        )


def test_a_mask_that_does_not_know_the_newest_token_would_show(llm: LLM) -> None:
    """Were it not waited for, or not taken."""
    structure, right = KINDS["schema"]
    with patch.object(Masks, "drawn", lambda *_: None):
        [one] = llm.generate(PROMPT, SamplingParams(structure=structure, seed=1, max_tokens=30))
    with pytest.raises(json.JSONDecodeError):
        right(one.text)


def test_what_it_allows_comes_even_where_all_of_that_was_forbidden(llm: LLM) -> None:
    never = dict.fromkeys(range(llm.spec.vocab_size - 3), -math.inf)
    for temperature in (0, 1):
        params = SamplingParams(
            structure=Structure.choice(["blue"]), logit_bias=never, temperature=temperature, max_tokens=9
        )
        assert llm.generate(PROMPT, params)[0].text == "blue"


def test_an_output_that_cannot_be_followed_ends_and_says_so(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Its structure grows with every token, beyond what the library does in a step. The others go on."""
    hard = SamplingParams(structure=Structure.regex("((a|b){1,100}){500}"), temperature=0, max_tokens=100)
    free = SamplingParams(temperature=0, max_tokens=60)
    alone = llm.generate("The sea", free)
    with patch.object(Runner, "ahead", True):
        broken, other = llm.generate([PROMPT, "The sea"], [hard, free])
    assert broken.finish_reason == "error"
    assert re.fullmatch("[ab]+", broken.text)
    assert len(broken.tokens) < 100
    assert "llguidance cannot follow its schema or grammar any further" in caplog.text
    assert tokens([other]) == tokens(alone)


# ---- who asks for what cannot be


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (
            "json_schema",
            {"properties": {"a": {"items": {"type": "text"}}}},
            "Invalid type: text; at /properties/a/items",
        ),
        (
            "json_schema",
            {"$defs": {"a": {"not": {}}}, "anyOf": [{}, {"$ref": "#/$defs/a"}]},
            r'Unimplemented keys: \["not"\]; at /\$defs/a',
        ),
        ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "is greater than maximum"),
        ("json_schema", {"type": "strin"}, "Invalid type: strin; at the root of the schema"),
        (
            "json_schema",
            {"properties": {"a": {"properties": {"b": 5}}}},
            "must be an object or boolean; at /properties/a/properties/b",
        ),
        ("json_schema", {"$ref": "#"}, "no text matches it"),
        ("json_schema", {"items": {"multipleOf": 9999999}}, "multipleOf comes to 9999999"),
        ("json_schema", '{"multipleOf": 1' + "0" * 400 + "}", "multipleOf comes to more than can be shown"),
        (
            "json_schema",
            '{"multipleOf": [{"multipleOf": %s}, {"multipleOf": %s}]}' % (("9" * 4300,) * 2),
            "comes to more than can be shown",
        ),
        (
            "json_schema",
            {"type": "integer", "multipleOf": 9973, "allOf": [{"multipleOf": 9967}]},
            "has a common multiple of 99400891",
        ),
        ("json_schema", '{"items":' * 600 + "{}" + "}" * 600, "601 values deep; 400 are allowed"),
        (
            "json_schema",
            {"type": "object", "properties": {f"p{at}": {} for at in range(1500)}},
            "make it simpler",
        ),
        ("json_schema", {"x-guidance": 3}, "the JSON schema cannot be followed"),
        ("json_schema", '{"a":', "the JSON schema is not JSON: Expecting value: line 1 column 6"),
        ("json_schema", "[" * 50_000, "the JSON schema is not JSON"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", {"const": math.nan}, "not JSON"),
        ("json_schema", {"const": "x" * LONGEST}, f"{LONGEST} are allowed"),
        ("json_schema", {"const": "\udc80"}, "not valid Unicode"),
        ("regex", "a(b", "the regex cannot be followed: unclosed group, at character 2"),
        ("regex", "a(?=b)", "look-around, .* is not supported, at character 2"),
        ("regex", "a{1000000}", "make it simpler"),
        ("regex", "(" * 5000 + ")" * 5000, "exceed the maximum number of nested"),
        ("regex", 3, "must be text; got int"),
        ("choice", [], "at least one"),
        ("choice", "yes", "must be a list with at least one string"),
        ("lark", 'start: x\ny: "y"', 'line 1, column 8: unknown name: "x"'),
        ("lark", "start: start", "no text matches it"),
        ("lark", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "too deeply nested"),
        ("lark", "start: " + "a{" * 9000 + '"a"' + "}" * 9000, "not supported"),
        ("lark", r'start: %json {"multiple\u004ff": 9999999}', "multipleOf comes to 9999999"),
        (
            "lark",
            "start: " + '%json {"type": "integer", "multipleOf": 9001} ' * 20,
            "multipleOf comes to 180020",
        ),
        ("lark", "start: %json {", "what follows %json is not JSON"),
        (
            "lark",
            '{"grammars": [{"json_schema": {"multipleOf": 9999999}}]}',
            "the grammar cannot be followed",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_structure_or_too_much_is_refused(llm: LLM, kind: str, text: object, why: str) -> None:
    with pytest.raises(StructureError, match=why):
        llm.generate([PROMPT, PROMPT], [None, SamplingParams(structure=getattr(Structure, kind)(text))])
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_rules_that_lead_one_to_the_next_by_thousands_take_no_process_down(llm: LLM) -> None:
    rules = "\n".join(f"a{at}: a{at + 1}" for at in range(4500))
    parts = {f"d{at}": {"properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(1000)} | {
        "d1000": {}
    }
    for structure in (
        Structure.lark(f'start: a0\n{rules}\na4500: "x"'),
        Structure.lark(f'start: A0\n{rules.upper()}\nA4500: "x"'),
        Structure.json_schema({"$ref": "#/$defs/d0", "$defs": parts}),
    ):
        assert llm.generate(PROMPT, SamplingParams(structure=structure, max_tokens=2))[0].tokens


def test_a_schema_in_a_grammar_may_speak_of_others(llm: LLM) -> None:
    grammar = Structure.lark('start: %json {"const": "%json is none"} %json {"const": 1}')
    text = llm.generate(PROMPT, SamplingParams(structure=grammar, max_tokens=60))[0].text
    assert re.fullmatch(r'"%json is none"\s*1', text), text


def test_forms_behind_reasoning_are_what_they_are_alone(llm: LLM) -> None:
    for form, text in (
        (Structure.choice(["%json {"]), "%json {"),
        (Structure.regex("%json/\\/\n\\\\"), "%json//\n\\"),
        (Structure.json_schema({"const": "%json {"}), '"%json {"'),
    ):
        assert may_be_behind(form)
        params = SamplingParams(
            structure=behind_reasoning(form, REASONING_MARKS["think"], llm.tokenizer, opened=False),
            max_tokens=60,
        )
        assert llm.generate(PROMPT, replace(params, logit_bias=never("<")))[0].text == text
    assert not may_be_behind(Structure.regex("(?ix) a # the end of the line matters\n b"))


def test_what_was_compiled_is_there_for_as_long_as_who_asked_for_it(llm: LLM) -> None:
    """However many others come, nothing is compiled where steps are computed. Then it is given back."""
    with patch.object(compiled, "_KEPT", compiled._WEIGHT * 2 + 40), LLM(**SETTINGS) as llm:
        texts = [f"{word} {word}" for word in ("one", "two", "three", "four", "five")]
        ready = [
            llm.reader.read(PROMPT, SamplingParams(structure=Structure.choice([text]), max_tokens=60, n=2))
            for text in texts
        ]
        with patch.object(
            compiled._Vocabulary, "compile", side_effect=AssertionError("it is compiled again")
        ) as again:
            jobs = [llm.driver.begin(one) for one in ready]
            llm.reader.read(PROMPT, SamplingParams(structure=Structure.choice(texts[:1])))
            while not all(job.done for job in jobs):
                llm.driver.advance()
        assert [job.completion().text for job in jobs] == texts
        assert again.call_count == 0
        structures = llm.reader._structures
        assert len(structures._alive) == len(structures._held) == 5
        del ready, jobs
        llm.generate([PROMPT] * 12, SamplingParams(max_tokens=1))  # Rows are others' now.
        gc.collect()
        assert not structures._rows
        assert (len(structures._held), len(structures._alive), len(structures._known)) == (0, 2, 2)
    assert not structures._known


def test_requests_hold_no_more_than_there_is_room_for(llm: LLM) -> None:
    small = compiled._WEIGHT + 20
    with patch.object(compiled, "_KEPT", small), patch.object(compiled, "_HELD", 3 * small):
        structures = Structures(lambda: llm.tokenizer, llm.spec.vocab_size, (1,))
        forms = [Structure.choice([f"form {at}"]) for at in range(6)]
        for form in forms:
            structures.check(form, {1})
            assert len(structures._alive) <= 4
        structures.begin(Row(0), replace(sampling(end=frozenset({1})), structure=forms[-1]))
        assert llm.decode(walk(structures, 0, 1, frozenset({1}))) == "form 5"
        structures.close()


def test_what_takes_the_library_too_long_is_refused_and_holds_up_nobody(llm: LLM) -> None:
    """It cannot be told to stop: some are left to themselves, and while they go on nothing new is
    compiled."""
    structures, going, easy = (
        Structures(lambda: llm.tokenizer, llm.spec.vocab_size, (1,)),
        threading.Event(),
        Structure.regex("a"),
    )
    structures.check(easy, {1})
    assert structures._vocabulary is not None
    real, structures._vocabulary._matcher = structures._vocabulary._matcher, lambda *_, **__: going.wait(LONG)  # type: ignore[assignment]
    try:
        with patch.object(compiled, "_PATIENCE", 0.01):
            for at in range(compiled._MOST_LATE):
                with pytest.raises(StructureError, match=r"more than 0\.01 seconds") as slow:
                    structures.check(Structure.json_schema({"items": {"minLength": at}}), {1})
                assert not isinstance(slow.value, compiled.CrowdedError)
        with pytest.raises(compiled.CrowdedError, match="send the request again in a few seconds"):
            structures.check(Structure.regex("b"), {1})
        structures.check(easy, {1})
        busy: Any = SimpleNamespace(
            read=lambda *_: structures.check(Structure.regex("b"), {1}), tokenizer=llm.tokenizer
        )
        with pytest.raises(BusyError, match="send the request again in a few seconds") as refused:
            read(busy, decoded(b'{"model": "a", "prompt": "b"}', CompletionRequest))
        assert refused.value.seconds > 0
    finally:
        structures._vocabulary._matcher = real
        going.set()
        for thread in list(compiled._LATE):
            thread.join(LONG)
    structures.check(Structure.regex("b"), {1})
    assert not compiled._LATE
    structures.close()


def test_a_structure_is_sent_without_what_was_compiled(llm: LLM) -> None:
    form = Structure.regex("a")
    llm.reader.read(PROMPT, SamplingParams(structure=form))
    assert pickle.loads(pickle.dumps(form)) == form


def test_settings_that_are_against_its_end_are_refused(llm: LLM) -> None:
    form = Structure.regex("a")
    for more in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(RequestError, match=f"{next(iter(more))} .* does not work with structured output"):
            SamplingParams(structure=form, **more)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be a Structure"):
        SamplingParams(structure="[a-z]")  # type: ignore[arg-type]
    with (
        pytest.raises(StructureError, match=r"pip install 'penstock\[grammar\]'"),
        patch.dict(sys.modules, {"llguidance": None}),
    ):
        Structures(lambda: llm.tokenizer, llm.spec.vocab_size, ()).check(form, {1})
    with pytest.raises(StructureError, match=r"needs a tokenizer.*tokenizer\.json"):
        Structures(lambda: None, 97, ()).check(form, {1})
    with pytest.raises(StructureError, match="the model's files name none; give stop_token_ids"):
        Structures(lambda: llm.tokenizer, llm.spec.vocab_size, ()).check(form, ())


# ---- the tokens and masks


def spaced() -> Tokenizer:
    """As sentencepiece makes them: a space before each text, a token for each byte, some twice."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *'▁{}":,a1ba',
        "▁a",
        'a"',
        "▁1",
        "ab",
        "}}",
    ]
    merges = [("▁", "a"), ("a", "b"), ("}", "}")]
    inner = tokenizers.Tokenizer(
        models.BPE({word: at for at, word in enumerate(dict.fromkeys(words))}, merges, byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # type: ignore[assignment]
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner, {}, {})


def walk(structures: Structures, row: int, seed: int, ends: frozenset[int], most: int = 200) -> list[int]:
    """What a model says that likes all tokens alike; without the end, and with it if it came."""
    rng, said = random.Random(seed), list[int]()
    for _ in range(most):
        [mask], broken = structures.masks([Row(row)], [()], [()])
        assert not broken
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed[allowed < structures._size]))
        structures.take(Row(row), [token])
        if token in ends:
            [mask], _ = structures.masks([Row(row)], [()], [()])
            assert (
                set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
                - {structures._size}
                == ends
            )
            return said
        said.append(token)
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    ("make", "size", "end"),
    [
        (spaced, 300, 2),
        (spaced, 270, 2),
        (spaced, 280, 266),
        (lambda: Tokenizer.from_directory(SHIPPED_MODEL), 4200, 4199),
    ],
)
def test_other_tokenizers_and_vocabularies(make: Callable[[], Tokenizer], size: int, end: int) -> None:
    """One with a space before each text; ids that the tokenizer does not know, and one of them is the end; an
    end that is written "1"."""
    tokenizer, ends = make(), frozenset({end})
    structures = Structures(lambda: tokenizer, size, ends)
    form = Structure.json_schema(
        TIGHT
        | {
            "type": "object",
            "properties": {"a b": {"const": 'a"}'}, "</s>": {"enum": [1, 11, 1111]}},
            "required": ["a b", "</s>"],
            "additionalProperties": False,
        }
    )
    structures.check(form, ends)
    for seed in range(5):
        structures.begin(Row(0), replace(sampling(end=ends), structure=form))
        said = walk(structures, 0, seed, ends)
        stream = tokenizer.detokenizer(continues=True)
        value = json.loads(stream.push(said) + stream.finish())
        assert value["a b"] == 'a"}'
        assert value["</s>"] in (1, 11, 1111)
    structures.close()


def test_room_that_outputs_share_and_fill_is_made_anew(llm: LLM) -> None:
    """One structure over and over, of which the library learns more each time."""
    with patch.dict(compiled._LIMITS, max_lexer_states=700):
        structures = Structures(lambda: llm.tokenizer, llm.spec.vocab_size, (1,))
        form, ends = Structure.regex(r"(\p{L}{1,9}[ ,]){1,6}"), frozenset({1})
        structures.check(form, ends)
        first = structures._compiled(form)._first
        for seed in range(12):
            structures.begin(Row(seed), replace(sampling(end=ends), structure=form))
            text = llm.decode(walk(structures, seed, seed, ends))
            assert re.fullmatch(r"([^\W\d_]{1,9}[ ,]){1,6}", text), text
        assert structures._compiled(form)._first is not first, "there was room for all"
        structures.close()


def test_a_text_that_there_is_no_choice_of_comes_in_the_tokens_that_the_model_knows() -> None:
    """Not in others of the same bytes, nor with a space that a tokenizer puts before every text."""
    for tokenizer, size in ((spaced(), 273), (Tokenizer.from_directory(SHIPPED_MODEL), 4096)):
        structures, ends = Structures(lambda tokenizer=tokenizer: tokenizer, size, ()), frozenset({2})
        text = 'a"}}11,ab' + "ba" * 600
        form = replace(sampling(end=ends), structure=Structure.choice([text]))
        structures.begin(Row(0), form)
        said = walk(structures, 0, 1, ends, 1300)
        assert (
            said[: len(said) // 2]
            == tokenizer.encode(f"\n{text}", special=False)[-len(said) :][: len(said) // 2]
        )
        structures.close()


@dataclass
class Said:
    """A guide that allows what it is told to, and notes what it is asked."""

    allowed: np.ndarray
    heard: list[object] = field(default_factory=list)
    wrong: frozenset[int] = frozenset()

    def begin(self, row: Row, sampling: object) -> None:
        self.heard.append("begin")

    def end(self, row: Row) -> None:
        self.heard.append("end")

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        self.heard.append(tuple(tokens))

    def masks(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, frozenset[int]]:
        count = len(rows) + sum(map(len, drafts))
        bits = np.zeros((count, 128), dtype=bool)
        bits[:, : self.allowed.shape[1]] = self.allowed[:count]
        bits[:, 125:] = True  # No logits have these.
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32), frozenset({1})

    def read(self) -> list[int]:
        self.heard.append("read")
        return [70, 71, 72]


def test_masks_on_logits_and_when_tokens_are_waited_for() -> None:
    rng = np.random.default_rng(3)
    count, vocab = 20, 117
    allowed = rng.random((count, vocab)) < 0.1
    allowed[:, 5] = True
    guide = Said(allowed)
    masks = Masks(guide, torch.device("cpu"))
    logits = torch.randn(count + 3, vocab)
    logits[4] = -torch.inf
    # The fourth of them verifies a draft of three tokens.
    places = [2, 3, 4, 5, *range(9, count + 2)]
    before, rows = logits.clone(), {at: (Row(at), (70, 71, 72) if at == 5 else (), ()) for at in places}
    for row, *_ in rows.values():
        masks.admit(
            Admission(
                row, replace(sampling(), structure=Structure.regex("a")), (1,), (8, 9) if row == 2 else ()
            )
        )
    assert guide.heard == [], "nothing is made of a structure before a pass is under way"
    assert masks.put(logits, rows) == {3}
    for share, row in enumerate(allowed, 2):
        expected = torch.where(torch.from_numpy(row), before[share].nan_to_num(neginf=0.0), -torch.inf)
        assert torch.equal(logits[share], expected)
    for share in (0, 1, count + 2):
        assert torch.equal(logits[share], before[share])
    assert guide.heard[:4] == ["begin", (8, 9), "begin", ()]
    guide.heard.clear()
    two = {0: (Row(2), (), ()), 1: (Row(3), (), ())}
    masks.drawn({1: (Row(2), (), ())}, guide)
    assert guide.heard == [], "what is under way is waited for when it is needed"
    masks.put(logits[:2], two)
    assert guide.heard == ["read", (71,), ()]
    # Of a draft that which was accepted is said, and the token behind it.
    for draft, said in (((70, 71), (70, 71, 72)), ((70, 72), (70, 71)), ((71,), (70,)), ((), (70,))):
        guide.heard.clear()
        masks.drawn({0: (Row(2), draft, ())}, guide)
        masks.put(logits[:2], two)
        assert guide.heard == ["read", said, ()]
    # What is no token is not said, nor what follows it.
    guide.wrong = frozenset({1})
    for first, draft, said in ((1, (), ()), (0, (70, 71), (70,)), (0, (72,), (70,))):
        guide.heard.clear()
        masks.drawn({first: (Row(2), draft, ())}, guide)
        masks.put(logits[:2], two)
        assert guide.heard == ["read", said, ()]


def test_draws_where_nearly_nothing_is_possible() -> None:
    """As the kernels do it, interpreted."""
    triton_sampling = pytest.importorskip("penstock.ops.triton.sampling", reason="needs triton")
    logits = torch.full((3, 150), -torch.inf)
    logits[0, 140], logits[1, 3], logits[2, [7, 100]] = -1e4, 0.0, torch.tensor([2.0, 2.0])
    for top_k, top_p, min_p in ((0, 0.3, 0.0), (40, 0.9, 0.1)):
        wishes = torch.tensor(
            [[row, 0.7, top_k, top_p, min_p, 5, 6, 1] for row in range(3)], dtype=torch.float64
        )
        drawn = torch.zeros(3, dtype=torch.int64)
        triton_sampling.draw(logits, wishes, drawn)
        assert (
            drawn.tolist() == draw_reference(logits, wishes).tolist() == [140, 3, 7 if top_p == 0.3 else 100]
        )


# ---- over HTTP, and on the command line


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    server.wait()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


TALK = [{"role": "user", "content": "Who is it?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def test_the_official_client_gets_answers_of_a_form(client: Any) -> None:
    usual = {"model": "shipped", "messages": TALK, "max_tokens": 300, "seed": 5}
    whole = client.chat.completions.create(**usual, response_format=FORMAT).choices[0]
    assert whole.finish_reason == "stop"
    assert valid(json.loads(whole.message.content), PERSON)
    stream = client.chat.completions.create(**usual, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content
    cut = client.chat.completions.create(
        **usual | {"max_tokens": 5}, response_format={"type": "json_object"}
    ).choices[0]
    assert (cut.finish_reason, cut.message.content[0]) == ("length", "{")
    plain = client.chat.completions.create(
        **usual | {"max_tokens": 5}, response_format={"type": "text"}
    ).choices[0]
    assert not plain.message.content.startswith("{")
    for wish, (_, right) in zip(
        (
            {"json": PERSON},
            {"regex": r"(\w{1,5} ){2,4}\d{2}:\d{2}"},
            {"choice": NAMES},
            {"grammar": SUM},
            {"json": json.dumps(PERSON)},
        ),
        [*KINDS.values(), KINDS["schema"]],
        strict=True,
    ):
        asked = {
            "model": "shipped",
            "prompt": PROMPT,
            "max_tokens": 300,
            "seed": 3,
            "extra_body": {"structured_outputs": wish},
        }
        assert right(client.completions.create(**asked).choices[0].text)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have json_schema.schema"),
        (
            {"response_format": FORMAT | {"type": "json_object"}},
            "response_format",
            "must have json_schema.schema",
        ),
        ({"response_format": FORMAT | {"more": 1}}, "more", "unknown field"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}},
            "response_format",
            "Invalid type: text",
        ),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "leave one of them out",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"xml": "a"}}, "xml", "unknown field"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a{1000000}"}}, "structured_outputs", "make it simpler"),
        ({"structured_outputs": {"json": {"const": "x" * LONGEST}}}, "structured_outputs", "are allowed"),
        (
            {"structured_outputs": {"choice": ["a"]}, "ignore_eos": True},
            "ignore_eos",
            "does not work with structured output",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_is_a_400_that_names_the_field(
    server: Server, client: Any, fields: dict[str, Any], param: str, why: str
) -> None:
    status, _, said = server.ask(
        "POST", "/v1/chat/completions", {"model": "shipped", "messages": TALK, **fields}
    )
    assert (status, said["error"]["type"], said["error"]["param"]) == (400, "invalid_request_error", param)
    assert why in said["error"]["message"]


def test_the_command_line(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text(json.dumps(PERSON))
    grammar.write_text(SUM)
    usual = ["run", PROMPT, "-q", "--no-echo", "--device", "cpu", "--max-tokens", "300"]
    assert main([*usual, "--json-schema", str(schema)]) == 0
    assert valid(json.loads(capsys.readouterr().out), PERSON)
    for flags, why in (
        (["--regex", "a", "--grammar", str(grammar)], "--regex and --grammar exclude each other"),
        (["--grammar", str(tmp_path)], "is a directory"),
        (["--json-schema", str(grammar)], "the JSON schema is not JSON"),
    ):
        assert main([*usual, *flags]) == 2
        assert why in capsys.readouterr().err
