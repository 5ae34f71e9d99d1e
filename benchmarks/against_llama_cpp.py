"""Time tokens and prompts of a GGUF file on a CPU by penstock and llama.cpp, in turns, with as many threads.

    PYTHONPATH=src python3 benchmarks/against_llama_cpp.py FILE.gguf --python /tmp/llama/bin/python

llama.cpp is built from the source of its Python package for the processor at hand, in its own environment:

    python3 -m venv /tmp/llama
    CMAKE_ARGS=-DGGML_NATIVE=ON /tmp/llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python

The file of tests/cpu/test_gguf_real.py is SmolLM2-135M-Instruct, which others made. Each round is a process
of one system and then one of the other. In a process, a prompt of random tokens, and decode steps behind a
shorter one, are run until they stop falling, then measured three times. llama.cpp rounds activations to eight
bits before products. penstock keeps them in 16 bits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

CONTEXT, STEPS, PROMPT, VOCABULARY = 128, 64, 512, 30_000


def llama_cpp(path: str, threads: int) -> dict[str, object]:
    """Measure llama.cpp in this process, by its functions in C."""
    import llama_cpp as c

    quiet = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(quiet, None)
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    asked = c.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_ubatch = 1024, PROMPT, PROMPT
    asked.n_threads = asked.n_threads_batch = threads
    context = c.llama_init_from_model(model, asked)
    memory = c.llama_get_memory(context)

    def run(tokens: list[int]) -> None:
        kept = (c.llama_token * len(tokens))(*tokens)  # A batch has only its address.
        if c.llama_decode(context, c.llama_batch_get_one(kept, len(tokens))):
            sys.exit("llama.cpp does not decode")
        c.llama_synchronize(context)

    def begin() -> None:
        c.llama_memory_clear(memory, True)

    def decode(prompt: list[int]) -> list[float]:
        begin()
        run(prompt)
        return [timed(partial(run, [token])) for token in prompt[:STEPS]]

    def whole(prompt: list[int]) -> float:
        begin()
        return timed(lambda: run(prompt))

    return measured(decode, whole) | {"system": c.llama_print_system_info().decode().strip()}


def ours(path: str, threads: int) -> dict[str, object]:
    """Measure penstock in this process."""
    import torch

    from penstock.base.config import Config
    from penstock.bench.speed.measure import sampling, step
    from penstock.bench.speed.setup import Target, opened

    torch.set_num_threads(threads)
    config = Config(Path(path), device="cpu", dtype="bfloat16", max_length=1024, max_step_tokens=PROMPT)
    with opened(Target(path, Path(path), config)) as model:
        engine = model.boot(config, lambda _: None).engine

    def end() -> None:
        while engine.busy:
            engine.step()

    def decode(prompt: list[int]) -> list[float]:
        request = engine.submit(prompt, sampling(), None)
        got = {request: 0}
        while got[request] < 2:
            step(engine, got)
        seconds = [timed(lambda: step(engine, got)) for _ in range(STEPS)]
        engine.stop(request)
        end()
        return seconds

    def whole(prompt: list[int]) -> float:
        engine.submit(prompt, sampling(), 1)
        return timed(end)

    found = measured(decode, whole)
    engine.close()
    return found


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measured(
    decode: Callable[[list[int]], list[float]], whole: Callable[[list[int]], float]
) -> dict[str, object]:
    """Run both kinds of work until neither gets faster, at most eight times, then three times more."""
    drawn = iter(range(1 << 30))
    tokens = lambda count: [next(drawn) * 7919 % VOCABULARY for _ in range(count)]  # noqa: E731
    found: dict[str, object] = {}
    for name, once in (
        ("decode", lambda: statistics.median(decode(tokens(CONTEXT)))),
        ("prompt", lambda: whole(tokens(PROMPT))),
    ):
        warming = [once(), once()]
        while len(warming) < 8 and warming[-1] < 0.98 * min(warming[:-1]):
            warming.append(once())
        found[name] = [once() for _ in range(3)]
        found[f"{name}_warming"] = warming
    return found


def main() -> None:
    """Run rounds of both systems for each number of threads, print them, and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", default="/tmp/llama/bin/python", help="interpreter that has llama_cpp")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["penstock", "llama.cpp"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.only:
        one = ours if given.only == "penstock" else llama_cpp
        print(json.dumps(one(str(given.file), int(given.threads))))
        return
    from recording import Recording

    there = (
        subprocess.run([given.python, "-c", "import llama_cpp"], capture_output=True)
        if Path(given.python).exists()
        else None
    )
    if there is None or there.returncode:
        sys.exit(f"{given.python} has no llama_cpp; the top of this script says how to build it")
    recording = Recording(given.out, file=given.file.name, context=CONTEXT, prompt=PROMPT)
    for threads in map(int, given.threads.split(",")):
        runs: dict[str, list[dict[str, object]]] = {"penstock": [], "llama.cpp": []}
        for _ in range(given.rounds):
            for name, of in runs.items():
                command = [sys.executable if name == "penstock" else given.python, __file__, str(given.file),
                           "--only", name, "--threads", str(threads)]  # fmt: skip
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True,
                    env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                )  # fmt: skip
                of.append(json.loads(done.stdout.splitlines()[-1]))
        said = {}
        for name, of in runs.items():
            for kind, tokens in (("decode", 1), ("prompt", PROMPT)):
                rates = sorted(tokens / s for run in of for s in run[kind])  # type: ignore[attr-defined]
                said[f"{name} {kind}"] = {
                    "median": statistics.median(rates),
                    "least": rates[0],
                    "most": rates[-1],
                }
                print(f"{threads} threads, {name}, {kind}: {statistics.median(rates):.1f} tokens/s "
                      f"({rates[0]:.1f} to {rates[-1]:.1f})", flush=True)  # fmt: skip
        recording.part(f"{threads} threads", {"tokens_per_second": said, "runs": runs})


if __name__ == "__main__":
    main()
