"""LoRA adapters: what they compute is what PEFT and merged weights compute, in any mixture of requests,
wherever the base model's weights rest; and KV is of one adapter alone, by its bytes."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import adapters
import tiny
from penstock import LLM, AsyncLLM, Completion, SamplingParams
from penstock.arch.lora import LoraRoom
from penstock.arch.shards import WHOLE
from penstock.base.errors import BudgetError, ConfigError, EngineClosedError, RequestError
from penstock.engine import measuring
from penstock.kv.store.blocks import BlockStore
from penstock.memory.device import peak_of
from penstock.models import decoder
from penstock.ops.lora import GroupedRows, LoraMatrix, RunRows, StackedRows
from penstock.server.broker.backend import LocalBackend
from penstock.step.plan import Admission
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.worker import adapters as worker_adapters
from penstock.worker.adapters import RowAdapters
from quantised import SCHEMES, checkpoints
from worlds import sampling

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 24,
    "block_size": 4,
    "max_sequences": 7,
}
ALL = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = tiny.prompts()
PROMPT = PROMPTS[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def base() -> Path:
    return tiny.checkpoint("llama")


@pytest.fixture(scope="module")
def some(folder: Path, base: Path) -> dict[str, Path]:
    """Adapters of several ranks, of some and of all modules, in both scalings."""
    return {
        "one": adapters.write(folder / "one", base, 1, ["q_proj", "down_proj"], seed=1),
        "eight": adapters.write(folder / "eight", base, 8, seed=2, dtype=torch.bfloat16),
        "large": adapters.write(folder / "large", base, 64, seed=3, use_rslora=True, lora_alpha=4),
        "values": adapters.write(folder / "values", base, 4, ["v_proj", "up_proj"], seed=4),
    }


@pytest.fixture(scope="module")
def llm(base: Path, some: dict[str, Path]) -> Iterator[LLM]:
    with LLM(base, **SETTINGS, lora_modules=some) as llm:
        yield llm


def close(found: Completion, model: torch.nn.Module) -> None:
    expected = adapters.logprobs(model, found.prompt_tokens, found.tokens)
    assert found.logprobs is not None
    for one, row in zip(found.logprobs, expected, strict=True):
        mine = torch.tensor([logprob for _, logprob in sorted(one.top)], dtype=torch.float64)
        assert (mine - row).abs().max() < tiny.LIMIT * row.abs().max()


def test_every_request_is_answered_as_by_its_own_merged_model(
    llm: LLM, base: Path, some: dict[str, Path]
) -> None:
    """Several adapters and none in the same steps, with prompts that take several of them."""
    names = [*some, None]
    found = llm.generate([PROMPT] * len(names), ALL, lora=names)
    for name, completion in zip(names, found, strict=True):
        close(completion, tiny.load(base) if name is None else adapters.merged(base, some[name]))
    assert len({completion.tokens for completion in found}) == len(names)


def test_prompts_of_all_lengths_in_one_batch_say_what_each_says_alone(llm: LLM) -> None:
    scored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    names = ["one", "eight", None, "large", "values", "eight"]
    llm.clear_prefix_cache()
    few = llm.generate(PROMPTS, GREEDY, lora=names)  # Of each prompt, the last layer computes one position.
    together = llm.generate(PROMPTS, scored, lora=names)
    for prompt, name, mixed, one in zip(PROMPTS, names, together, few, strict=True):
        [alone] = llm.generate(prompt, scored, lora=name)
        assert alone.tokens == mixed.tokens == one.tokens
        pairs = zip(alone.prompt_logprobs[1:], mixed.prompt_logprobs[1:], strict=True)  # type: ignore[index]
        assert all(abs(one.logprob - other.logprob) < 1e-3 for one, other in pairs)  # type: ignore[union-attr]


def test_a_prompt_is_scored_beside_a_longer_one_that_is_not(llm: LLM) -> None:
    """In the same step: its last layer computes all positions of the one, and a single one of the other."""
    scored = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    settings, prompts, names = [scored, GREEDY], [PROMPTS[1], PROMPTS[5][:19]], ["eight", "large"]
    llm.clear_prefix_cache()
    together = llm.generate(prompts, settings, lora=names)
    llm.clear_prefix_cache()
    alone = [llm.generate(*one, lora=name)[0] for *one, name in zip(prompts, settings, names, strict=True)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    pairs = zip(together[0].prompt_logprobs[1:], alone[0].prompt_logprobs[1:], strict=True)  # type: ignore[index]
    assert all(abs(one.logprob - other.logprob) < 1e-3 for one, other in pairs)  # type: ignore[union-attr]


def test_all_outputs_of_a_prompt_have_its_adapter(llm: LLM) -> None:
    drawn = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=3)
    [found] = llm.generate(PROMPT, drawn, lora="eight")
    [one] = llm.generate(PROMPT, GREEDY, lora="eight")
    assert [output.tokens for output in found.outputs] == [one.tokens] * 3


def test_feed_forwards_that_pass_in_pieces_know_their_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = said(llm, NAMES)
    monkeypatch.setattr(decoder, "_WIDE_ROWS", 5)
    llm.clear_prefix_cache()
    assert said(llm, NAMES) == whole


def test_peft_says_the_same_of_what_it_has_written_itself(folder: Path, base: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        use_rslora=True,
        target_modules=list(adapters.EVERY),
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 7},
        alpha_pattern={"layers.0.self_attn.o_proj": 3, "down_proj": 24},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        model = peft.get_peft_model(tiny.load(base), config).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        model.save_pretrained(folder / "peft")
    with LLM(base, **SETTINGS, lora_modules={"peft": folder / "peft"}) as llm:
        [found] = llm.generate(PROMPT, ALL, lora="peft")
    close(found, model)


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama_biases", adapters.EVERY), ("qwen3", adapters.EVERY), ("glm4_moe", adapters.ATTENTION)],
)
def test_other_families(name: str, targets: Sequence[str], tmp_path: Path) -> None:
    """With biases, with norms of heads, and where feed-forwards are mixtures."""
    base = tiny.checkpoint(name)
    adapter = adapters.write(tmp_path / "a", base, 6, targets)
    with LLM(base, **SETTINGS, lora_modules={"a": adapter}) as llm:
        [mine, plain] = llm.generate([PROMPT] * 2, ALL, lora=["a", None])
    close(mine, adapters.merged(base, adapter))
    close(plain, tiny.load(base))


# ---- where weights rest, and how


def said(llm: LLM, names: Sequence[str | None]) -> list[tuple[int, ...]]:
    return [one.tokens for one in llm.generate(PROMPTS[: len(names)], GREEDY, lora=names)]


NAMES = ["one", "large", None, "eight", "values"]


def test_with_weights_that_stream_it_says_the_same(
    llm: LLM, base: Path, some: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the disk, and from host memory."""
    # What is measured depends on the memory that the tests before have left.
    monkeypatch.setattr(measuring, "peak_of", lambda device, run: 0 * peak_of(device, run))
    few = SETTINGS | {"kv_blocks": 64, "lora_modules": some, "cache": tmp_path}
    with LLM(base, **few) as whole:
        budget = whole.memory.budget
    beside = budget.activations + budget.kv
    disk, least = beside + int(0.85 * budget.weights), beside + int(0.6 * budget.weights)
    for memory in (
        {"device_memory": disk},
        {"device_memory": least, "host_memory": least + 2 * budget.weights},
    ):
        with LLM(base, **few, **memory) as streaming:
            assert streaming.memory.weights.streams
            assert said(streaming, NAMES) == said(llm, NAMES)


def test_a_base_model_of_four_bits_says_what_the_same_dense_one_says(tmp_path: Path) -> None:
    """For few rows its kernels compute whole halves of a layer, and then all layers at once, which leave no
    place for an adapter."""
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES["packed"])
    adapter = adapters.write(tmp_path / "a", dense, 8)
    found = []
    for path in (few, dense):
        with LLM(path, **SETTINGS, lora_modules={"a": adapter}) as llm:
            found.append([said(llm, names) for names in (["a", None, "a"], [None], ["a"])])
            llm.clear_prefix_cache()
            found[-1].append(said(llm, ["a"]))
    assert found[0] == found[1]
    assert found[0][2] == found[0][3] == found[0][0][:1] != found[0][1]


def test_requests_that_are_sent_back_keep_their_adapters(base: Path, some: dict[str, Path], llm: LLM) -> None:
    names, long = (
        ["eight", None, "one", "large"],
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    )
    asked = PROMPTS[1:5]
    with LLM(base, **SETTINGS, lora_modules=some, kv_blocks=26, max_length=80, prefix_cache=False) as few:
        found = few.generate(asked, long, lora=names)
        assert few.stats().preemptions
    assert [one.tokens for one in found] == [one.tokens for one in llm.generate(asked, long, lora=names)]


# ---- whose KV it is


def cached(llm: LLM, name: str | None, prompt: Sequence[int] = PROMPT) -> int:
    return llm.generate(prompt, GREEDY, lora=name)[0].cached_tokens


def test_a_prefix_is_found_by_requests_of_the_same_adapter_alone(base: Path, some: dict[str, Path]) -> None:
    with LLM(base, **SETTINGS, lora_modules=some) as llm:
        for name in ("one", "eight", None):
            assert cached(llm, name) == 0
        for name in ("one", "eight", None):
            assert cached(llm, name) == 28


def test_an_adapter_is_known_by_its_bytes_and_not_by_its_name(
    base: Path, some: dict[str, Path], tmp_path: Path
) -> None:
    """Another one of the same name finds nothing, and the same one by another name, from elsewhere, all."""
    path = shutil.copytree(some["eight"], tmp_path / "a")
    with LLM(base, **SETTINGS, max_loras=3, max_lora_rank=8) as llm:
        llm.load_lora_adapter("a", path)
        assert cached(llm, "a") == 0
        adapters.change(path, lora_alpha=17)
        llm.load_lora_adapter("a", path, load_inplace=True)
        assert cached(llm, "a") == 0
        name = f"{adapters.PREFIX}model.layers.2.mlp.down_proj.lora_A.weight"
        adapters.change(path, {name: torch.zeros(8, 80)}, lora_alpha=16)
        llm.load_lora_adapter("a", path, load_inplace=True)
        assert cached(llm, "a") == 0
        llm.load_lora_adapter("b", some["eight"])
        assert cached(llm, "b") == 28


def test_on_disk_too(
    base: Path, some: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        BlockStore, "noted", lambda _: b""
    )  # What is found does not depend on how fast it was.
    kept = SETTINGS | {
        "max_step_tokens": 64,
        "block_size": 16,
        "max_length": 256,
        "host_kv_memory": "4MiB",
        "disk_kv_memory": "16MiB",
        "kv_directory": tmp_path,
        "cache": tmp_path / "cache",
    }
    prompt = [3 + (7 * at) % 89 for at in range(100)]
    found = {}
    for modules in ({"a": some["one"]}, {"a": some["eight"], "other": some["one"]}):
        with LLM(base, **kept, lora_modules=modules) as llm:
            for name in modules:
                found[name, modules[name]] = llm.generate(prompt, GREEDY, lora=name)[0]
            if len(modules) == 1:
                assert llm.generate(prompt, GREEDY)[0].cached_disk == 0
    with LLM(base, **kept) as llm:  # Another engine, since how fast the disk was is not known yet.
        assert llm.generate(prompt, GREEDY)[0].cached_disk == 96
    assert found["a", some["eight"]].cached_tokens == 0
    first, again = found["a", some["one"]], found["other", some["one"]]
    assert (first.cached_tokens, again.cached_disk) == (0, 96)
    assert first.tokens == again.tokens != found["a", some["eight"]].tokens


# ---- loading and unloading


def test_a_request_goes_on_with_the_adapter_that_it_began_with(
    base: Path, some: dict[str, Path], llm: LLM
) -> None:
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [right] = llm.generate(PROMPT, long, lora="one")
    with LLM(base, **SETTINGS, lora_modules={"a": some["one"]}, max_loras=2, max_lora_rank=64) as two:
        with two.stream(PROMPT, long, lora="a") as stream:
            next(stream)
            two.unload_lora_adapter("a")
            with pytest.raises(RequestError, match="the LoRA adapter 'a' is not loaded; there is none"):
                two.generate(PROMPT, long, lora="a")
            two.load_lora_adapter("a", some["eight"])
            with pytest.raises(RequestError, match="all 2 places for LoRA adapters are taken; unload one"):
                two.load_lora_adapter("b", some["large"])
            [other] = two.generate(PROMPT, long, lora="a")
            rest = list(stream)
        assert rest
        assert stream.completion.tokens == right.tokens
        assert other.tokens == llm.generate(PROMPT, long, lora="eight")[0].tokens
        two.load_lora_adapter("b", some["large"])
        assert [*two.lora_adapters] == ["a", "b"]
        assert (
            two.generate(PROMPT, long, lora="b")[0].tokens
            == llm.generate(PROMPT, long, lora="large")[0].tokens
        )


def test_tasks_of_an_event_loop(base: Path, some: dict[str, Path], llm: LLM) -> None:
    async def work() -> list[tuple[int, ...]]:
        room = {"lora_modules": {"one": some["one"]}, "max_loras": 2, "max_lora_rank": 8}
        async with AsyncLLM(base, **SETTINGS, **room) as tasks:
            await tasks.load_lora_adapter("eight", some["eight"])
            found = await tasks.generate([PROMPT] * 3, GREEDY, lora=["one", None, "eight"])
            async with tasks.stream(PROMPT, GREEDY, lora="eight") as stream:
                streamed = tuple([token async for delta in stream for token in delta.tokens])
            await tasks.unload_lora_adapter("one")
            assert [*await tasks.lora_adapters()] == ["eight"]
            return [*(one.tokens for one in found), streamed]

    found = asyncio.run(work())
    right = [one.tokens for one in llm.generate([PROMPT] * 3, GREEDY, lora=["one", None, "eight"])]
    assert found == [*right, right[2]]


def test_a_slot_keeps_nothing_of_the_adapter_before(base: Path, some: dict[str, Path], llm: LLM) -> None:
    with LLM(base, **SETTINGS, lora_modules={"a": some["large"]}) as one:
        one.unload_lora_adapter("a")
        one.load_lora_adapter("a", some["values"])
        assert said(one, ["a"]) == said(llm, ["values"])


def test_adapters_are_the_same_after_a_sleep_or_refused(
    base: Path, some: dict[str, Path], tmp_path: Path
) -> None:
    """One engine stays, another one is started: with the same bytes or without, but never with others."""
    first, changed = (shutil.copytree(some["eight"], tmp_path / name) for name in ("first", "changed"))
    names = ["a", "changed", "kept", None]
    with LLM(base, **SETTINGS, lora_modules={"a": first, "gone": some["large"]}, max_loras=4) as llm:
        llm.unload_lora_adapter("gone")
        llm.load_lora_adapter("changed", changed)
        llm.load_lora_adapter("kept", some["large"])
        before = said(llm, names)
        for level in (1, 2):
            llm.sleep(level)
            assert [*llm.lora_adapters] == names[:3]
            for change in (lambda: llm.load_lora_adapter("b", first), lambda: llm.unload_lora_adapter("a")):
                with pytest.raises(EngineClosedError, match="is asleep; wake it up"):
                    change()
            llm.wake_up()
            assert said(llm, names) == before
        adapters.change(changed, lora_alpha=17)
        shutil.rmtree(first)
        llm.sleep(2)
        llm.wake_up()
        assert [*llm.lora_adapters] == ["kept"]
        for name, why in (
            ("a", "first is no LoRA adapter: it has no adapter_config.json;"),
            ("changed", "the files in .*changed have changed; load it anew"),
        ):
            with pytest.raises(RequestError, match=f"'{name}' could not be loaded again .*, since .*{why}"):
                llm.generate(PROMPT, GREEDY, lora=name)
        assert said(llm, [None, None, "kept", None])[2:] == before[2:]
        llm.load_lora_adapter("a", some["eight"])
        llm.unload_lora_adapter("changed")
        assert said(llm, ["a"]) == before[:1]
        with pytest.raises(RequestError, match="'changed' is not loaded; there is kept, a"):
            llm.generate(PROMPT, GREEDY, lora="changed")


def test_forecasts_count_the_kv_of_the_adapter_alone(base: Path, some: dict[str, Path]) -> None:
    with LLM(base, **SETTINGS, lora_modules={"one": some["one"]}) as llm:
        found = LocalBackend(llm).forecaster._found
        ready = llm.reader.read(PROMPT, GREEDY)
        llm.generate(PROMPT, GREEDY, lora="one")
        assert [found(ready.adapted(name)) for name in ("one", None, "none")] == [28, 0, 0]
        with pytest.raises(RequestError, match="'none' is not loaded; there is one"):
            llm.forecast(PROMPT, GREEDY, lora="none")
        assert llm.forecast(PROMPT, GREEDY, lora="one").place == 0
        llm.sleep(2)
        llm.wake_up()
        assert found(ready.adapted("one")) == 0
        llm.generate(PROMPT, GREEDY, lora="one")
        assert found(ready.adapted("one")) == 28


def test_what_there_is_no_room_for(base: Path, some: dict[str, Path], llm: LLM) -> None:
    with pytest.raises(RequestError, match="the LoRA adapter 'x' is not loaded; there is one, eight"):
        llm.generate(PROMPT, GREEDY, lora="x")
    with pytest.raises(RequestError, match="there are 1 prompts but 2 names of adapters"):
        llm.generate(PROMPT, GREEDY, lora=["one", "one"])
    with pytest.raises(RequestError, match="'one' is loaded already; unload it first"):
        llm.load_lora_adapter("one", some["one"])
    with (
        LLM(base, **SETTINGS) as without,
        pytest.raises(RequestError, match="start the engine with max_loras"),
    ):
        without.load_lora_adapter("one", some["one"])
    with pytest.raises(ConfigError, match="lora_modules names 4 adapters, but max_loras is 2"):
        LLM(base, **SETTINGS, lora_modules=some, max_loras=2)
    small = {"device_memory": "64MiB", "max_loras": 1, "max_lora_rank": 1 << 16}
    with pytest.raises(
        BudgetError, match=r"for the largest step and LoRA adapters; .*, max_loras or max_lora_rank"
    ):
        LLM(base, **SETTINGS, **small)
    with pytest.raises(RequestError, match="has rank 64, and there is room for 8; start the engine with"):
        LLM(base, **SETTINGS, lora_modules=some, max_lora_rank=8)


# ---- as recorded steps compute it


def test_a_row_whose_slot_did_not_reach_the_device_is_sent_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs out of memory there, or is interrupted, is admitted again, to the same row."""
    with Checkpoint.open(base) as opened:
        rows = RowAdapters(opened.spec, WHOLE, LoraRoom(2, 1), 3, torch.empty(0))
    admissions = tuple(Admission(row, sampling(), (1,), (), row) for row in (1, 2))

    def full(*_: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(worker_adapters, "send", full)
        with pytest.raises(MemoryError):
            rows.admit(admissions)
    rows.admit(admissions)
    assert rows.on_device.tolist() == [0, 1, 2, 0]
    rows.admit((Admission(2, sampling(), (1,), ()), Admission(0, sampling(), (1,), (), 2)))
    assert rows.on_device.tolist() == [2, 1, 0, 0]


def test_all_slots_at_once_are_each_adapter_with_its_own_rows() -> None:
    """Numbers that overflow in another row's slot change nothing."""
    torch.manual_seed(0)
    matrix = LoraMatrix([6, 3], 5, slots=3, rank=4, like=torch.empty(0))
    for slot, ranks in ((1, (4, 2)), (2, (0, 3))):
        for part, (rank, height) in enumerate(zip(ranks, (6, 3), strict=True)):
            matrix.put(slot, part, torch.randn(rank, 5), torch.randn(rank, height))
    matrix.put(3, 0, torch.full((1, 5), 3e38), torch.full((1, 6), 3e38))
    slots = torch.tensor([0, 2, 1, 1, 2, 0, 1])
    x, before = torch.randn(7, 5), torch.randn(7, 9)
    found, right = before.clone(), before.clone()
    StackedRows(slots, 3).add(x, found, matrix)
    for row, slot in enumerate(slots.tolist()):
        for part, columns in enumerate((slice(6), slice(6, 9)) if slot else ()):
            right[row, columns] += x[row] @ matrix.a[part, slot - 1].T @ matrix.b[part][slot - 1]
    torch.testing.assert_close(found, right)
    grouped = before.clone()
    rows = GroupedRows(slots.numpy(), torch.from_numpy)
    rows.add(x[:3], grouped[:3], matrix)
    rows.add(x[3:], grouped[3:], matrix, first=3)
    torch.testing.assert_close(grouped, right)
    of_run, expected = before.clone(), before.clone()
    RunRows(torch.tensor([2, 2, 0])).add(x, of_run, matrix)
    for part, columns in enumerate((slice(6), slice(6, 9))):
        expected[:, columns] += x @ matrix.a[part, 1].T @ matrix.b[part][1]
    torch.testing.assert_close(of_run, expected)
