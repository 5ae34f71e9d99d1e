"""Reads a model's name on the Hugging Face Hub: owner/name, with a revision, and a GGUF file or its quant.

The forms are those that other programs take: `owner/name`, `owner/name@revision`, `owner/name:file.gguf`,
`owner/name/file.gguf`, `owner/name:Q4_K_M`, any of them behind `hf.co/`, and the addresses of pages. Nothing
here looks at the disk.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

MAIN = "main"
"""The revision of a name without one."""
_PREFIX = re.compile(r"(?:hf://|(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/)(?=.)", re.IGNORECASE)
"""It stands before a name that can only be the Hub's. A Path has one slash where an address has two."""
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"({_PART}/{_PART})(.*)", re.DOTALL)
_REVISION, _FILE = r"@([^\s:@]+?)", r"(?::([^\s:@]+?)|/([^\s:@]+?\.gguf))"
_REST = re.compile(rf"(?:{_REVISION})?(?:{_FILE})?", re.IGNORECASE)
_TURNED = re.compile(rf"{_FILE}{_REVISION}", re.IGNORECASE)
_PAGE = re.compile(r"/(?:tree|blob|resolve)/([^/\s]+)(?:/(\S+?))?/?")
_QUERY = re.compile(r"[?#]\S*\Z")
"""It stands behind addresses that are copied from pages, such as `?download=true`."""
_QUANT = re.compile(r"[A-Za-z0-9_-]+")
_NICKNAME = re.compile(
    r"(?:[a-z][\w.-]*[:-](?:\d+(?:\.\d+)?[bm]|latest)(?:[-_.:][\w.:-]*)?"
    r"|(?:llama|qwen|mistral|mixtral|gemma|phi|deepseek|gpt-oss|glm|minimax|smollm)-?\d[\w.:-]*)",
    re.IGNORECASE | re.ASCII,
)
"""Others name models so, without an owner: Qwen3-8B, llama3.2, qwen3:8b."""
GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class ModelName:
    """Names a model of the Hub.

    repository: its owner and name. revision: a branch, tag or commit; empty for the main branch. file: a GGUF
    file, or the quant in its name; empty for a checkpoint, or for whichever GGUF file is usual.
    """

    repository: str
    revision: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return what a text names; None if it is no name of a model of the Hub."""
        prefix = _PREFIX.match(text)
        found = _REPOSITORY.fullmatch(_QUERY.sub("", text[prefix.end() :]) if prefix else text)
        if found is None or ".." in found[1] or "--" in found[1] or found[1].endswith(".git"):
            return None
        repository, rest = found[1], found[2].removesuffix("/") if prefix else found[2]
        if prefix and (page := _PAGE.fullmatch(rest)):
            revision, file = "" if page[1] == MAIN else page[1], page[2] or ""
        elif turned := _TURNED.fullmatch(rest):
            file, revision = turned[1] or turned[2], turned[3]
        elif plain := _REST.fullmatch(rest):
            revision, file = plain[1] or "", plain[2] or plain[3] or ""
        else:
            return None
        return cls(repository, revision, file) if _is_file(file) and _is_revision(revision) else None

    @property
    def sort(self) -> str:
        """Return the revision, also where none was given."""
        return self.revision or MAIN

    @property
    def is_quant(self) -> bool:
        """Tell whether the file is given by the quant in its name."""
        return bool(self.file) and not self.file.lower().endswith(GGUF)

    def with_file(self, file: str) -> "ModelName":
        """Return the name of a file in the same revision."""
        return replace(self, file=file)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")


def _is_file(file: str) -> bool:
    """Tell whether a GGUF file or a quant may be called so."""
    return not file or (is_inside(file) if file.lower().endswith(GGUF) else bool(_QUANT.fullmatch(file)))


def _is_revision(revision: str) -> bool:
    return not revision or is_inside(revision)


def is_inside(path: str) -> bool:
    """Tell whether a path leads nowhere but into the directory that it is taken from."""
    return all(part not in ("", ".", "..") for part in path.split("/"))


def looks_like_model(text: str) -> bool:
    """Tell whether a word is rather a model than a prompt: a name of the Hub, also without its owner, a path,
    or a GGUF file."""
    if not text or any(character.isspace() for character in text):
        return False
    return (
        text.startswith(("/", "./", "../", "~/"))
        or text.lower().endswith(GGUF)
        or _PREFIX.match(text) is not None
        or ModelName.parse(text) is not None
        or _NICKNAME.fullmatch(text) is not None
    )


def must_be_hub(text: str) -> bool:
    """Tell whether a text can be nothing else than a name of the Hub, since it has its address."""
    return _PREFIX.match(text) is not None


def quant_of(file: str) -> str:
    """Return the quant in a GGUF file's name, such as Q4_K_M; empty if there is none."""
    found = _QUANT_NAME.findall(stem_of(file))
    return found[-1].upper() if found else ""


_QUANT_NAME = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[0-9](?:_[A-Z0-9]+)*|TQ[0-9]_[0-9]|MXFP4(?:_[A-Z0-9]+)*|BF16|F16|F32))(?=$|[-._/])",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})", re.DOTALL)


def stem_of(file: str) -> str:
    """Return a GGUF file's path without its ending, and without its number if it is one of several."""
    stem = str(Path(file).with_suffix("")) if file.lower().endswith(GGUF) else file
    split = _SPLIT.fullmatch(stem)
    return split[1] if split else stem


def part_of(file: str) -> tuple[int, int]:
    """Return a GGUF file's number, from 1, and how many it was split into; 1 and 1 if it was not."""
    split = _SPLIT.fullmatch(str(Path(file).with_suffix("")))
    return (int(split[2]), int(split[3])) if split else (1, 1)
