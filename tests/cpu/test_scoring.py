"""Scores of rerankers, against transformers: classifiers, models that answer yes or no, and embeddings."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch

from penstock import LLM, AsyncLLM, PenstockError, SamplingParams
from penstock.api.scoring import Pairs
from penstock.base.errors import CheckpointError, RequestError, UnsupportedModelError
from penstock.cli.main import main
from penstock.weights.checkpoint.scoring import ScoreHead
from rerankers import (
    DOCUMENTS,
    INSTRUCTION,
    QUERY,
    SETTINGS,
    answered,
    answering,
    classified,
    classifying,
    copied,
    near,
    put,
)

ROLES = (
    "{% for one in messages %}[{{ one['role'] }}{{ one['content'] }}]{% endfor %}"
    "{% if messages[-2]['role'] == 'query' and messages[-1]['role'] == 'document' %}!{% endif %}"
)


def sigmoid(logits: list[float]) -> list[float]:
    return torch.tensor(logits, dtype=torch.float64).sigmoid().tolist()


def scores(model: Path, *asked: object, **more: object) -> list[float]:
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        return [one.score for one in llm.score(*asked, **more)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rerankers")


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Path:
    return answering(folder / "Qwen3-Reranker-tiny")


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Path:
    return classifying(folder / "classifier", "qwen3")


def test_the_probability_of_yes_against_no(qwen: Path) -> None:
    expected = answered(qwen, [put(QUERY, one) for one in DOCUMENTS])
    assert max(expected) - min(expected) > 0.05
    with LLM(qwen, **SETTINGS) as llm:  # type: ignore[arg-type]
        found = llm.score(QUERY, DOCUMENTS)
        assert near([one.score for one in found], expected)
        assert [(one.query, one.document) for one in found] == [(QUERY, one) for one in DOCUMENTS]
        assert llm.decode(found[0].prompt_tokens).startswith("system\nJudge whether")
        own = llm.score(QUERY, DOCUMENTS[0], instruction="Find pipes")
        assert near([own[0].score], answered(qwen, [put(QUERY, DOCUMENTS[0], "Find pipes")]))
        written = put(QUERY, DOCUMENTS[1])
        at = written.index("<Document>")  # A client that has written all of it out itself, as for vLLM.
        assert near([llm.score(written[:at], written[at:])[0].score], expected[1:2])
        several = llm.score([QUERY, "Is there bread?"], DOCUMENTS[:2])
        assert near([several[0].score], expected[:1])
        assert near([several[1].score], answered(qwen, [put("Is there bread?", DOCUMENTS[1])]))
        assert llm.generate("no", SamplingParams(max_tokens=2, temperature=0))[0].tokens


def test_tied_embeddings_and_tokens_that_config_names(folder: Path) -> None:
    tied = answering(folder / "qwen2", "qwen2")
    config = json.loads((tied / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    named = copied(tied, folder / "named", classifier_from_token=["no", "yes"])
    found = scores(named, "A", ["B", "C yes"])
    assert near(found, answered(tied, ["AB", "AC yes"]))


def test_tokens_that_modules_name_and_a_template_of_roles(folder: Path) -> None:
    model = answering(folder / "roles", template=ROLES)
    (model / "modules.json").write_text(
        json.dumps(
            [
                {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
                {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
            ]
        )
    )
    (model / "1_LogitScore").mkdir()
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        no, yes = (llm.tokenizer.token_to_id(word) for word in ("no", "yes"))
    told = {"true_token_id": yes, "false_token_id": no}
    (model / "1_LogitScore" / "config.json").write_text(json.dumps(told))
    assert near(scores(model, "A", ["B"]), answered(model, ["[queryA][documentB]!"]))
    asked = scores(model, "A", "B", instruction="C")
    assert near(asked, answered(model, ["[systemC][queryA][documentB]!"]))
    (model / "1_LogitScore" / "config.json").write_text(json.dumps(told | {"false_token_id": None}))
    alone, both = ScoreHead.of(model), answering_head(model)
    assert alone is not None
    assert alone.weights != both.weights


def answering_head(model: Path) -> ScoreHead:
    """The head of a model that answers yes or no, without regard to its modules."""
    (model / "modules.json").unlink()
    head = ScoreHead.of(copied(model, model.with_name("Qwen3-Reranker-of-roles")))
    assert head is not None
    return head


@pytest.mark.parametrize("case", ["qwen3", "llama", "mistral", "qwen2", "qwen3_moe", "mixtral"])
def test_classifiers_agree_with_transformers(folder: Path, case: str) -> None:
    model = classifying(folder / f"classifier-{case}", case, pairs=case == "llama")
    expected = classified(model, [(QUERY, one) for one in DOCUMENTS])
    assert max(expected) - min(expected) > 0.1
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        found = llm.score(QUERY, DOCUMENTS)
        assert near([one.score for one in found], sigmoid(expected))
        pairs = Pairs.of(QUERY, DOCUMENTS)
        made = llm._complete(llm.reader.read_pairs(pairs))
        raw = llm.reader.scorer.scores(pairs, made, activated=False)
        assert near([one.score for one in raw], expected)


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_the_activation_that_config_names(classifier: Path, tmp_path: Path, key: str) -> None:
    def named(which: str) -> object:
        name = f"torch.nn.modules.{which}"
        return {"activation_fn": name} if key == "sentence_transformers" else name

    plain = copied(classifier, tmp_path / "plain", **{key: named("linear.Identity")})
    assert near(scores(plain, QUERY, DOCUMENTS), classified(classifier, [(QUERY, one) for one in DOCUMENTS]))
    other = copied(classifier, tmp_path / "other", **{key: named("activation.Tanh")})
    with pytest.raises(UnsupportedModelError, match=r"Tanh.*supported: Sigmoid, Identity"):
        ScoreHead.of(other)


def test_a_classifier_made_of_qwen3_reranker_is_asked_like_it(classifier: Path, tmp_path: Path) -> None:
    model = copied(classifier, tmp_path / "Qwen3-Reranker-0.6B-seq-cls")
    expected = classified(model, [(put(QUERY, one), "") for one in DOCUMENTS])
    assert near(scores(model, QUERY, DOCUMENTS), sigmoid(expected))


@pytest.mark.parametrize("place", ["hub", "_name_or_path", "card", "list", "key"])
def test_a_qwen3_reranker_is_known_by_its_name(qwen: Path, tmp_path: Path, place: str) -> None:
    hub = tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "0123"
    changed = {
        "_name_or_path": {"_name_or_path": "Qwen/Qwen3-Reranker-0.6B"},
        "key": {"is_original_qwen3_reranker": True},
    }.get(place, {})
    model = copied(qwen, hub if place == "hub" else tmp_path / "model", **changed)
    made_of = {"card": " Qwen/Qwen3-Reranker-0.6B", "list": "\n- Qwen/Qwen3-Reranker-0.6B"}.get(place)
    if made_of is not None:
        (model / "README.md").write_text(f"---\nbase_model:{made_of}\n---\n")
    head = ScoreHead.of(model)
    assert head is not None
    assert head.instructs


def test_prompts_in_several_steps_agree(classifier: Path) -> None:
    expected = sigmoid(classified(classifier, [(QUERY, one) for one in DOCUMENTS]))
    with LLM(classifier, **SETTINGS, max_step_tokens=7) as llm:  # type: ignore[arg-type]
        assert near([one.score for one in llm.score(QUERY, DOCUMENTS)], expected)


def test_packs_keep_the_head(qwen: Path, classifier: Path, tmp_path: Path) -> None:
    for model, name in ((qwen, "pack"), (classifier, "other")):
        out = tmp_path / name
        assert main(["pack", str(model), "--out", str(out), "--dtype", "float32"]) == 0
        assert near(scores(out, QUERY, DOCUMENTS), scores(model, QUERY, DOCUMENTS))
    (tmp_path / "pack" / "score.json").write_text('{"weights": 3}')
    with pytest.raises(CheckpointError, match="not a head that scores; pack the model again"):
        ScoreHead.of(tmp_path / "pack")
    (tmp_path / "pack" / "score.json").write_bytes(ScoreHead((1.0, 2.0)).written())
    with pytest.raises(CheckpointError, match="scores with 2 numbers, but its hidden states have"):
        scores(tmp_path / "pack", QUERY, DOCUMENTS)


def test_embeddings_score_by_their_cosine(qwen: Path, tmp_path: Path) -> None:
    model = copied(qwen, tmp_path / "embedding")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    kinds = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (model / "modules.json").write_text(json.dumps(kinds))
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        query, *documents = (torch.tensor(one.embedding) for one in llm.embed([QUERY, *DOCUMENTS]))
        expected = [float(torch.cosine_similarity(query, one, dim=0)) for one in documents]
        found = llm.score(QUERY, DOCUMENTS)
        assert near([one.score for one in found], expected)
        assert len(found[0].prompt_tokens) == len(llm.encode(QUERY)) + len(llm.encode(DOCUMENTS[0]))
        each = llm.score(DOCUMENTS, DOCUMENTS[::-1])
        mirrored = [
            float(torch.cosine_similarity(*two, dim=0))
            for two in zip(documents, documents[::-1], strict=True)
        ]
        assert near([one.score for one in each], mirrored)
        with pytest.raises(RequestError, match="takes no instruction"):
            llm.score("A", "B", instruction="C")


def test_documents_are_cut_where_that_is_asked_for(qwen: Path) -> None:
    long = "water " * 200
    with LLM(qwen, **SETTINGS) as llm:  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="context holds 512"):
            llm.score(QUERY, long)
        read = llm.reader.read_pairs
        by_document = read(Pairs((QUERY,), (long,), document_tokens=5))[0]
        assert by_document.prompt == put(QUERY, "water")
        by_prompt = read(Pairs((QUERY,), (long,), prompt_tokens=500))[0]
        assert len(by_prompt.tokens) == 500
        assert by_prompt.prompt is not None
        assert by_prompt.prompt.endswith("</think>\n\n")
        with pytest.raises(RequestError, match="20 have no room for any of its document"):
            read(Pairs((QUERY,), (long,), prompt_tokens=20))
        for long in ("\u6c34" * 90, "a\u0301" * 90, "\U0001f600" * 60):  # Of which a token is but a part.
            for most in range(480, 489):
                cut = read(Pairs((QUERY,), (long,), prompt_tokens=most))[0]
                assert most - 4 < len(cut.tokens) <= most
                assert cut.prompt is not None
                kept = cut.prompt.partition("<Document>: ")[2].partition("<|im_end|>")[0]
                assert kept
                assert long.startswith(kept)
            cut = read(Pairs((QUERY,), (long,), document_tokens=5))[0]
            assert cut.prompt == put(QUERY, long[: {3: 1, 4: 1}.get(len(long[0].encode()), 3)])


@pytest.mark.parametrize(
    ("queries", "documents", "said"),
    [
        (["A", "B"], ["C"], "2 queries for 1 document;"),
        ("A", [], "documents is empty"),
        ([], "A", "queries is empty"),
        (3, "A", "queries is of type int"),
        ("A", b"B", "documents is of type bytes"),
        ("A", ["B", 3], "documents has a value of type int"),
    ],
)
def test_pairs_that_are_none(queries: object, documents: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Pairs.of(queries, documents)  # type: ignore[arg-type]


def test_what_is_no_reranker_says_so(folder: Path, qwen: Path, classifier: Path, tmp_path: Path) -> None:
    with LLM(device="cpu", device_memory="300MiB", max_length=256) as llm:
        with pytest.raises(UnsupportedModelError, match=r"is no reranker: it has no head.*Qwen3-Reranker"):
            llm.score("A", "B")
        assert not llm.stats().steps
    plain = copied(qwen, tmp_path / "plain")
    two = classifying(tmp_path / "two", "llama", labels=2)
    lost = copied(plain, tmp_path / "lost", architectures=["Qwen3ForSequenceClassification"])
    odd = copied(plain, tmp_path / "odd", classifier_from_token="yes")
    absent = copied(plain, tmp_path / "absent", classifier_from_token=["no", "perhaps"])
    cases: list[tuple[Path, type[PenstockError], str]] = [
        (plain, UnsupportedModelError, "is no reranker: it has no head"),
        (two, UnsupportedModelError, "2 labels"),
        (lost, CheckpointError, "lacks tensor score.weight"),
        (odd, CheckpointError, "must be a list of two tokens"),
        (absent, UnsupportedModelError, "no token 'perhaps'"),
    ]
    for model, error, said in cases:
        with pytest.raises(error, match=said):
            ScoreHead.of(model)


def test_a_head_without_a_place_for_its_row(qwen: Path, tmp_path: Path) -> None:
    model = copied(qwen, tmp_path / "model")
    kinds = [{"path": "1_LogitScore", "type": "x.LogitScore"}]
    (model / "modules.json").write_text(json.dumps(kinds))
    (model / "1_LogitScore").mkdir()
    for told, said in (
        ({"true_token_id": 999}, "no row 999"),
        ({"true_token_id": "yes"}, "names the tokens"),
    ):
        (model / "1_LogitScore" / "config.json").write_text(json.dumps(told))
        with pytest.raises(CheckpointError, match=said):
            ScoreHead.of(model)


def test_sums_far_from_zero_have_scores() -> None:
    head = ScoreHead((1000.0,))
    assert (head.score((1.0,)), head.score((-1.0,)), head.score((0.0,))) == (1.0, 0.0, 0.5)
    assert math.isclose(ScoreHead((1.0,)).score((-2.0,)), 1 / (1 + math.exp(2.0)))


def test_async_scores_are_the_same(qwen: Path) -> None:
    async def main() -> list[float]:
        async with AsyncLLM(qwen, **SETTINGS) as llm:  # type: ignore[arg-type]
            return [one.score for one in await llm.score(QUERY, DOCUMENTS, instruction=INSTRUCTION)]

    assert near(asyncio.run(main()), answered(qwen, [put(QUERY, one) for one in DOCUMENTS]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_heads_of_other_dtypes_are_read_exactly(classifier: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = copied(classifier, tmp_path / "model")
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].to(dtype)
    safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
    head = ScoreHead.of(model)
    assert head is not None
    assert list(head.weights) == tensors["score.weight"][0].double().tolist()
    tensors["score.weight"] = tensors["score.weight"].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="dtype F8_E4M3, and scores are read of F32"):
        ScoreHead.of(model)
