"""A trained model end to end: its recorded greedy tokens, its text, stop strings, streams of text,
conversations."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=200)
OTHERS = [
    "Once upon a time",
    "Tom and his dog",
    "The end",
    "Lily",
    "One day, a big bear saw a little red bird in the park and",
]
TEMPLATE = """\
{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@dataclass(frozen=True)
class Golden:
    path: Path
    prompt: list[int]
    tokens: list[int]
    text: str


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> Golden:
    path = shared_data / "stories260k_hf"
    recorded = json.loads((path / "golden_greedy_200.json").read_text())
    prompt, all_of_it = recorded["prompt_ids"], recorded["greedy_ids"]
    assert all_of_it[: len(prompt)] == prompt
    assert len(all_of_it) == len(prompt) + 200
    return Golden(path, prompt, all_of_it[len(prompt) :], recorded["text"])


def engine(golden: Golden, **settings: object) -> LLM:
    return LLM(golden.path, device="cpu", dtype="float32", check=True, **settings)


@pytest.fixture(scope="module")
def llm(golden: Golden) -> Iterator[LLM]:
    with engine(golden) as llm:
        yield llm


def test_the_recorded_tokens_and_text(golden: Golden, llm: LLM) -> None:
    [completion] = llm.generate(golden.prompt, GREEDY)
    assert list(completion.tokens) == golden.tokens
    assert completion.text == golden.text
    assert completion.finish_reason == "length"


def test_the_checkpoint_itself_says_greedy(golden: Golden, llm: LLM) -> None:
    [completion] = llm.generate(golden.prompt, SamplingParams(max_tokens=20))
    assert list(completion.tokens) == golden.tokens[:20]
    [without] = llm.generate(golden.prompt)
    assert list(without.tokens[:200]) == golden.tokens
    assert without.finish_reason in ("stop", "length")


def test_in_a_batch_with_others(golden: Golden, llm: LLM) -> None:
    hot = SamplingParams(temperature=1.0, seed=0, max_tokens=60)
    completions = llm.generate([*OTHERS, golden.prompt, *OTHERS], [hot] * 5 + [GREEDY] + [hot] * 5)
    assert list(completions[5].tokens) == golden.tokens
    assert [completion.prompt for completion in completions] == [*OTHERS, None, *OTHERS]
    assert [completion.tokens for completion in completions[:5]] == [
        completion.tokens for completion in completions[6:]
    ]


@pytest.mark.parametrize("size", [1, 32])
def test_chunked_after_a_prefix_hit_and_preempted(golden: Golden, size: int) -> None:
    """The story so far is the prompt, in steps of seven tokens, beside requests that take the blocks away
    from each other."""
    begun = golden.prompt + golden.tokens[:100]
    with engine(golden, block_size=size, max_step_tokens=7, max_sequences=5, kv_blocks=256 // size) as llm:
        [alone] = llm.generate(begun, replace(GREEDY, max_tokens=100))
        assert list(alone.tokens) == golden.tokens[100:]
        assert alone.cached_tokens == 0
        rest, others = (
            SamplingParams(temperature=0, max_tokens=100),
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        )
        completions = llm.generate(
            [begun, golden.prompt, begun, *OTHERS], [rest, GREEDY, rest] + [others] * 5
        )
        assert list(completions[0].tokens) == list(completions[2].tokens) == golden.tokens[100:]
        assert list(completions[1].tokens) == golden.tokens
        assert completions[0].cached_tokens == 100 // size * size
        assert llm.stats().preemptions > 0


def test_prompt_as_text(golden: Golden, llm: LLM) -> None:
    """Text in, and the text that follows it out: put together they are the story."""
    whole = len(golden.tokens) + 1
    for begun, most in (
        ("Once upon a time", 40),
        ("Once upon a time,", 40),
        ("Once upon a time, there was a little girl named Lily. She", whole),
    ):
        tokens = llm.encode(begun)
        assert tokens == (golden.prompt + golden.tokens)[: len(tokens)]
        assert llm.decode(tokens) == begun
        [completion] = llm.generate(begun, replace(GREEDY, max_tokens=most - len(tokens)))
        assert completion.prompt == begun
        assert list(completion.prompt_tokens) == tokens
        assert list(completion.tokens) == golden.tokens[len(tokens) - 1 : most - 1]
        assert begun + completion.text == (
            golden.text if most == whole else llm.decode(golden.prompt + golden.tokens[: most - 1])
        )


@pytest.mark.parametrize(
    ("stop", "include"),
    [
        ("Lily", False),
        ("Lily", True),
        ("park", True),
        ("play outside", False),
        (". She", True),
        (["ball", "big, r"], False),
        (["ball", "big, r"], True),
        (["zebra", "\n"], False),
        ("big, red ball.", True),
    ],
)
def test_stop_strings(golden: Golden, llm: LLM, stop: str | list[str], include: bool) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    end, string = min(
        (golden.text.find(string) + len(string), string) for string in strings if string in golden.text
    )
    expected = golden.text[: end if include else end - len(string)]
    params = replace(GREEDY, stop=stop, include_stop=include)
    [completion] = llm.generate(golden.prompt, params)
    assert (completion.text, completion.finish_reason) == (expected, "stop")
    assert list(completion.tokens) == golden.tokens[: len(completion.tokens)]
    assert len(llm.decode(completion.tokens)) >= end
    assert len(llm.decode(completion.tokens[:-1])) < end
    deltas = list(llm.stream(golden.prompt, params))
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason == "stop"
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_a_stop_token_is_a_token_but_no_text(golden: Golden, llm: LLM) -> None:
    full_stop = next(token for token in golden.tokens if llm.decode([token]) == ".")
    params = replace(GREEDY, stop_token_ids=[full_stop])
    [completion] = llm.generate(golden.prompt, params)
    assert (completion.text, completion.finish_reason) == (golden.text[: golden.text.index(".")], "stop")
    assert completion.tokens[-1] == full_stop
    assert "".join(delta.text for delta in llm.stream(golden.prompt, params)) == completion.text


def test_outputs_stop_each_for_themselves(golden: Golden, llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=4, max_tokens=120, stop=["."], include_stop=True)
    [completion] = llm.generate(golden.prompt, params)
    assert len({output.text for output in completion.outputs}) == 4
    for output in completion.outputs:
        assert output.text.endswith(".") == (output.finish_reason == "stop")
        assert output.text.count(".") <= 1
    assert any(output.finish_reason == "stop" for output in completion.outputs)


def test_a_stop_string_that_never_comes(golden: Golden, llm: LLM) -> None:
    [completion] = llm.generate(golden.prompt, replace(GREEDY, stop=["zebra", golden.text[-9:] + "#"]))
    assert (completion.text, completion.finish_reason) == (golden.text, "length")


def test_streams_of_text(golden: Golden, llm: LLM) -> None:
    deltas = list(llm.stream(golden.prompt, GREEDY))
    assert "".join(delta.text for delta in deltas) == golden.text
    assert [token for delta in deltas for token in delta.tokens] == golden.tokens
    assert sum(bool(delta.text) for delta in deltas) > 150
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]

    hot = SamplingParams(temperature=1.3, seed=4, max_tokens=40, ignore_eos=True)
    streams = [llm.stream(prompt, hot) for prompt in OTHERS]
    texts = [""] * len(OTHERS)
    left = dict(enumerate(streams))
    while left:
        for at, stream in list(left.items()):
            delta = next(stream, None)
            if delta is None:
                del left[at]
            else:
                texts[at] += delta.text
    assert texts == [completion.text for completion in llm.generate(OTHERS, hot)]


@pytest.fixture(scope="module")
def chatty(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model with a chat template beside it."""
    path = tmp_path_factory.mktemp("chatty")
    for file in golden.path.iterdir():
        shutil.copyfile(file, path / file.name)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(path, device="cpu", dtype="float32", check=True) as llm:
        yield llm


def test_chat(chatty: LLM) -> None:
    messages = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "Of a bird"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = chatty.tokenizer.encode("<system>Tell a story.\n<user>Of a bird\n<assistant>", special=False)
    completion = chatty.chat(messages, params)
    assert list(completion.prompt_tokens) == expected
    [plain] = chatty.generate(expected, params)
    assert (completion.tokens, completion.text) == (plain.tokens, plain.text)
    assert [other.tokens for other in chatty.generate([messages, "Lily", messages], params)][::2] == [
        completion.tokens
    ] * 2
    [single] = chatty.generate(messages, params)
    assert single.tokens == completion.tokens


def test_chat_without_a_template(golden: Golden, llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])
    assert list(llm.generate(golden.prompt, GREEDY)[0].tokens) == golden.tokens
