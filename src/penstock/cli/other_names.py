"""Names what other engines call by another name than penstock does."""

from collections.abc import Collection

_OURS = {
    "--max-model-len": "--max-length",
    "--ctx-size": "--max-length",
    "--num-ctx": "--max-length",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--gpu-memory-utilization": "--device-memory, such as 90%",
    "--n-gpu-layers": "--device-memory, such as 16GiB; what does not fit streams",
    "--gpu-layers": "--device-memory, such as 16GiB; what does not fit streams",
    "--cpu-offload-gb": "--device-memory, such as 16GiB; what does not fit streams",
    "--swap-space": "--host-kv-memory",
    "--max-num-seqs": "--max-sequences",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--tensor-parallel-size": "--tensor-parallel",
    "--enable-prefix-caching": "--prefix-cache, which is on by default",
    "--enforce-eager": "--no-graphs",
    "--served-model-name": "--name",
    "--alias": "--name",
    "--speculative-config": "--speculate",
    "--speculative-model": "--speculate",
    "--model-draft": "--speculate",
    "--api-key": "--api-keys, a file; or the variable PENSTOCK_API_KEYS",
}
"""Our options by those of vLLM, llama.cpp and ollama."""


def ours_for(option: str, known: Collection[str]) -> str | None:
    """Return what an option of another engine is called here; None if it is none that we know, or none of
    these options is it."""
    ours = _OURS.get(option)
    return ours if ours and ours.split(",")[0].split(";")[0] in known else None
