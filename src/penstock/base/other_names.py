"""Names what other engines call by another name than penstock does: options, and arguments in Python."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

Made = TypeVar("Made", bound=type)
P = ParamSpec("P")
R = TypeVar("R")

_OURS = {
    "--max-model-len": "--max-length",
    "--ctx-size": "--max-length",
    "--num-ctx": "--max-length",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--temp": "--temperature",
    "-c": "--max-length",
    "-m": "--model",
    "-t": "--threads",
    "-s": "--seed",
    "-np": "--max-sequences",
    "--parallel": "--max-sequences",
    "-b": "--max-step-tokens",
    "-ub": "--max-step-tokens",
    "--batch-size": "--max-step-tokens",
    "--ubatch-size": "--max-step-tokens",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--tool-call-parser": "--tool-parser",
    "--repeat-penalty": "--repetition-penalty",
    "--gpu-memory-utilization": "--device-memory, such as 90%",
    "--n-gpu-layers": "--device-memory, such as 16GiB; what does not fit streams",
    "--gpu-layers": "--device-memory, such as 16GiB; what does not fit streams",
    "-ngl": "--device-memory, such as 16GiB; what does not fit streams",
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
    "-md": "--speculate",
    "--data-parallel-size": "--replicas",
    "--api-key": "--api-keys, a file; or the variable PENSTOCK_API_KEYS: all users of a machine see "
    "what is typed",
}
"""Our options by those of vLLM, llama.cpp and ollama."""
_ARGUMENTS = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, of the output alone",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids, beside the model's own end tokens",
    "suppress_tokens": "logit_bias, minus infinity for each token",
    "top_logprobs": "logprobs",
    "guided_decoding": "structure, a Structure",
    "guided_json": "structure, a Structure",
    "guided_regex": "structure, a Structure",
    "guided_choice": "structure, a Structure",
    "guided_grammar": "structure, a Structure",
    "response_format": "structure, a Structure",
    "structured_outputs": "structure, a Structure",
    "include_stop_str_in_output": "include_stop",
    "torch_dtype": "dtype",
    "model_path": "model",
    "context_length": "max_length",
    "n_ctx": "max_length",
    "max_memory": "device_memory, and host_memory for the host",
    "enable_lora": "lora_modules, or max_loras",
}
"""Arguments of other engines in Python that are no options of their command lines."""
_BEAMS = "there is no beam search", "{n} is for independent outputs"
_WORDS = "no words are forbidden", "{logit_bias} of minus infinity forbids a token"
_BITS = "weights are as the checkpoint has them", "penstock pack --to int4 quantises it"
_KV_TYPE = "KV on the device has the model's dtype", "{host_kv_dtype} is that of KV in host memory"
_TEMPLATE = "conversations are written by the checkpoint's own template, chat_template.jinja", ""
_FLASH = "attention is always computed in tiles, without a switch", ""
_FORCED = "no token is forced", "{structure} gives an output its form"
_ABSENT = {
    "quantization": ("a checkpoint's config.json says how it is quantised", ""),
    "trust_remote_code": ("no code of a checkpoint is ever run", ""),
    "disable_log_stats": ("nothing is logged with each step", ""),
    "best_of": ("outputs are not ranked", "{n} and {logprobs} give several to choose from"),
    "use_beam_search": _BEAMS,
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "diversity_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "length_penalty": (
        "there is no beam search, which weighs outputs by it",
        "{min_tokens} and {max_tokens} bound an output's length",
    ),
    "min_length": ("the least length is one of the output alone", "{min_tokens} sets it"),
    "allowed_token_ids": ("no list of tokens is allowed alone", _FORCED[1]),
    "forced_bos_token_id": _FORCED,
    "forced_eos_token_id": _FORCED,
    "bad_words": _WORDS,
    "bad_words_ids": _WORDS,
    "no_repeat_ngram_size": (
        "no repetition is forbidden",
        "{repetition_penalty} makes it less likely",
    ),
    "repetition_detection": (
        "no output ends because it repeats itself",
        "{repetition_penalty} makes that less likely",
    ),
    "encoder_repetition_penalty": (
        "tokens of the prompt have no penalty of their own",
        "{repetition_penalty} counts them too",
    ),
    "detokenize": ("an output has both its text and its tokens", ""),
    "flat_logprobs": ("log-probabilities have one form", ""),
    "pad_token_id": ("nothing is padded", ""),
    "max_time": ("no time ends an output", "{max_tokens} bounds its length"),
    "data_parallel_size": ("an engine is one replica", "penstock serve --replicas starts several"),
    "kv_cache_dtype": _KV_TYPE,
    "cache_type_k": _KV_TYPE,
    "cache_type_v": _KV_TYPE,
    "ctk": _KV_TYPE,
    "ctv": _KV_TYPE,
    "chat_template": _TEMPLATE,
    "chat_template_file": _TEMPLATE,
    "jinja": _TEMPLATE,
    "flash_attn": _FLASH,
    "fa": _FLASH,
    "load_format": ("the form of a checkpoint is known by its files", ""),
    "tokenizer": ("a checkpoint's own tokenizer is used", ""),
    "mlock": ("weights are not locked in memory", "{host_memory} bounds what they take of it"),
    "no_mmap": ("weights are read into memory in any case", ""),
    "enable_auto_tool_choice": ("a model whose chat template takes tools can call them", ""),
    "load_in_4bit": _BITS,
    "load_in_8bit": _BITS,
}
"""Options and arguments for what is not needed or does not exist here: what is true instead, and what does
something similar, with ours in braces."""
_KEYWORDS = {
    "sampling_params": "params",
    "prompt_token_ids": "prompts, which may be lists of token ids",
    "lora_request": "lora, the name of an adapter",
    "conversation": "messages",
}
"""Keywords of other engines' methods."""
_NO_KEYWORDS = {
    "stream": "LLM.stream gives out pieces as they come, of a conversation too",
    "streaming": "LLM.stream gives out pieces as they come, of a conversation too",
    "stream_options": "LLM.stream gives out pieces as they come, and its completion counts tokens",
    "use_tqdm": "LLM(progress=...) shows or hides the bar",
    "tool_choice": "the model chooses; a server's /v1/chat/completions has tool_choice",
    "response_format": "SamplingParams(structure=...) gives an output its form",
    "chat_template": "conversations are written by the checkpoint's own template",
    "add_generation_prompt": "chat is always answered",
    "continue_final_message": "generate goes on with a text",
    "model": "LLM(...) names it",
}
"""Keywords of other engines' methods that have no like here, and what does something similar."""
_STANDING = {
    "model": ("--model", "-m", "--model-path", "--hf-repo", "-hf"),
    "prompt": ("--prompt", "-p"),
}
"""Options of other engines for what stands here without one, by its name."""
_COMMANDS = {
    "download": "pull",
    "ps": "list",
    "ls": "list",
    "models": "list",
    "remove": "rm",
    "delete": "rm",
    "info": "show",
    "generate": "run",
    "complete": "run",
    "server": "serve",
    "quantize": "pack --to",
    "convert": "pack",
}
"""Our commands by those of other engines."""
_NEAR = 0.75
"""A slip of the pen is at least so similar to what was meant: names of other things share words, too."""


def ours_for(option: str, known: Collection[str]) -> str | None:
    """Return what an option of another engine is called here; None if it is none that we know, or none of
    these options is it."""
    ours = _OURS.get(option)
    return ours if ours and ours.split(",")[0].split(";")[0] in known else None


def absent(theirs: str, known: Collection[str]) -> str | None:
    """Return what is true instead of an option or argument of another engine that has no like here; None if
    it is none that we know. known: the names that may be told instead of it."""
    dashed = theirs.startswith("-")
    if (found := _ABSENT.get(theirs.lstrip("-").replace("-", "_"))) is None:
        return None
    why, instead = found
    ours = {name: _flag(name) if dashed else name for name in re.findall(r"{(\w+)}", instead)}
    if not instead or not {*ours.values()} <= {*known}:
        instead = "leave it out"
    return f"{why}; {instead.format_map(ours)}"


def standing(option: str, arguments: Iterable[str]) -> bool:
    """Tell whether an option of another engine is for one of these arguments, which stand without one."""
    return any(option in _STANDING.get(name, ()) for name in arguments)


def command_for(name: str) -> str | None:
    """Return what a command of another engine is called here; None if it is none that we know."""
    return _COMMANDS.get(name)


def is_foreign(option: str) -> bool:
    """Tell whether it is an option of another engine, of one dash and several letters."""
    if not re.fullmatch(r"-[a-z]{2,4}", option):
        return False
    return option in _OURS or option[1:] in _ABSENT or option in _STANDING["model"]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was meant, if it differs by a slip of the pen."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=_NEAR)), None)


def unknown_argument(name: str, known: Collection[str]) -> str:
    """Say what may have been meant by an argument in Python that is not known, behind what is wrong."""
    option = "--" + name.replace("_", "-")
    ours = _ARGUMENTS.get(name) or _argument_of(_OURS.get(option, ""))
    if ours and re.split("[,;= ]", ours)[0] in known:
        return f"; here it is {ours}"
    if why := absent(name, known):
        return f"; {why}"
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else "; help() names those that there are"


def named_keywords(settings: Collection[str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator by which a method says what may have been meant by a keyword that it does not know.

    settings: keywords of SamplingParams, which many engines' methods take themselves.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        known = [*inspect.signature(method).parameters]

        def check(names: Iterable[str]) -> None:
            for name in names:
                if name not in known:
                    meant = _unknown_keyword(name, known, settings)
                    raise TypeError(
                        f"{method.__qualname__}() got an unexpected keyword argument {name!r}{meant}"
                    )

        @functools.wraps(method)
        def told(*args: P.args, **kwargs: P.kwargs) -> R:
            check(kwargs)
            return method(*args, **kwargs)

        @functools.wraps(method)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> object:
            check(kwargs)
            return await method(*args, **kwargs)  # type: ignore[misc]

        return awaited if inspect.iscoroutinefunction(method) else told  # type: ignore[return-value]

    return decorate


def unknown_setting(name: str, known: Collection[str], requests: Collection[str]) -> str:
    """Say what may have been meant by a setting of the engine that is not known, behind what is wrong.

    requests: settings that requests have.
    """
    if name in requests:
        return f"; requests have it: SamplingParams({name}=...)"
    why = _NO_KEYWORDS.get(name)
    return f"; {why}" if why else unknown_argument(name, known)


def _unknown_keyword(name: str, known: Collection[str], settings: Collection[str]) -> str:
    ours = _KEYWORDS.get(name, "")
    if re.split("[, ]", ours)[0] in known:
        return f"; here it is {ours}"
    setting = name if name in settings else re.split("[, ]", _ARGUMENTS.get(name, ""))[0]
    if setting in settings and "params" in known:
        return f"; it is a setting: give params=SamplingParams({setting}=...)"
    if why := _NO_KEYWORDS.get(name):
        return f"; {why}"
    return unknown_argument(name, known)


def _flag(name: str) -> str:
    """Return an argument as it is written on a command line."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def _argument_of(option: str) -> str:
    """Return an option as it is written in Python."""
    name, rest = re.match(r"([\w-]*)(.*)", option, re.DOTALL).groups()  # type: ignore[union-attr]  # It matches all.
    if name.startswith("--no-"):
        return f"{name[5:].replace('-', '_')}=False{rest}"
    return f"{name.removeprefix('--').replace('-', '_')}{rest}"


def named_arguments(made: Made) -> Made:
    """Let a class say what may have been meant by an argument that it does not know."""
    init: Callable[..., None] = made.__init__  # type: ignore[misc]  # Nobody derives from it.
    known = [*inspect.signature(init).parameters][1:]
    names = frozenset(known)

    @functools.wraps(init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        for name in kwargs.keys() - names:
            meant = unknown_argument(name, known)
            raise TypeError(f"{made.__name__}() got an unexpected keyword argument {name!r}{meant}")
        init(self, *args, **kwargs)

    def __setattr__(self: object, name: str, value: object) -> None:
        meant = "" if name in known else unknown_argument(name, known)
        raise FrozenInstanceError(f"{made.__name__} cannot be changed; make another one{meant}")

    made.__init__ = __init__  # type: ignore[misc]
    if getattr(made, "__dataclass_params__", None) and made.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        made.__setattr__ = __setattr__  # type: ignore[assignment]
    return made
