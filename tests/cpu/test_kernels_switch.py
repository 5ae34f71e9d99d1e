"""Our kernels can be done without: every function then finds its reference in plain torch, on every thread
that computes."""

from collections.abc import Callable, Iterator
from threading import Thread
from unittest.mock import patch

import pytest
import torch

import penstock.models.decoder as decoder
import penstock.models.mixers as mixers
import tiny
from penstock import LLM, SamplingParams
from penstock.ops import kernels
from penstock.ops.attention.attend import reads_pages
from penstock.ops.kernels import kernels_of, plain_torch
from penstock.weights.checkpoint.shape import Shape
from penstock.worker.sizes import graph_blocker

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    """Kernels that can be found, also where there is no Triton, and without the time that it takes to load
    them."""
    with (
        patch.object(kernels, "_loaded", lambda name: name),
        patch.object(kernels, "find_spec", lambda name: name),
    ):
        yield


def there() -> list[bool]:
    """Of each group of kernels, whether it would be launched here and now."""
    return [kernels.triton_kernels(name) is not None for name in kernels._MODULES]


def test_nothing_of_ours_is_found_meanwhile_and_all_of_it_afterwards() -> None:
    elsewhere: list[bool] = []
    assert all(there())
    with plain_torch():
        assert not any(there())
        with plain_torch(False):
            assert not any(there()), "what is switched off stays so within"
        other = Thread(target=lambda: elsewhere.extend(there()))
        other.start()
        other.join()
        assert not reads_pages(CUDA)
        assert kernels_of(CUDA) == ()
        spec = Shape.open(tiny.checkpoint("llama")).spec
        reads = reads_pages(CUDA)
        why = graph_blocker(spec, cuda=True, kernels=reads, host_decides=False)
        assert why == "no kernel of our own reads pages"
    assert all(elsewhere), "another thread's kernels are none of ours"
    assert all(there())
    assert reads_pages(CUDA)
    assert "attention" in kernels_of(CUDA)
    assert kernels_of(torch.device("cpu")) == ()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_computes_by_what_it_was_asked_for(wanted: bool, ranks: int) -> None:
    """While its largest step is measured, in steps, and while tokens are drawn. Of several ranks this process
    sees the first."""
    seen: dict[str, set[bool]] = {"attend": set(), "linear": set()}

    def noting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **more: object) -> object:
            seen[name] |= set(there())
            return function(*given, **more)

        return call

    with (
        patch.object(mixers, "attend", noting("attend", mixers.attend)),
        patch.object(decoder, "linear", noting("linear", decoder.linear)),
    ):
        settings = {
            "device": "cpu",
            "kernels": wanted,
            "kv_blocks": 16,
            "max_step_tokens": 64,
            "tensor_parallel": ranks,
        }
        with LLM(tiny.checkpoint("llama"), **settings) as llm:  # type: ignore[arg-type]
            llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3))
    assert seen == {"attend": {wanted}, "linear": {wanted}}
    assert all(there()), "the caller's thread is left as it was"
