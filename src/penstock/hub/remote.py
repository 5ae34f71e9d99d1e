"""Asks the Hub about a model, and fetches parts of its files; all of it by huggingface_hub, which finds
token, endpoint and proxies by itself.

Importing that takes 0.3 to 0.6 s, so this file is imported only where the Hub has to be asked.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, tqdm

from penstock.hub.faults import hub_faults, no_hub
from penstock.hub.names import ModelName, is_inside

constants.HF_HUB_DISABLE_TELEMETRY = True  # It would ask for a list of programs, and tell what is installed.
_GIT, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
_LIBRARY: Mapping[str, Any] = {"library_name": "penstock"}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file is on the Hub.

    sha256: empty for one that git itself keeps, which is small. blob: its name in git, a digest too.
    """

    path: str
    size: int
    blob: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class HubContents:
    """Lists the files of a commit by path. licence: as the model's card names it; empty if it does not."""

    commit: str
    files: Mapping[str, RemoteFile]
    licence: str


class _Silent(tqdm):
    """Shows nothing: progress is shown for all files together."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **(more | {"disable": True}))  # type: ignore[no-untyped-call]


def contents_of(name: ModelName) -> HubContents:
    """Ask what the revision of a name holds now. Raises HubError."""
    with hub_faults(name):
        try:
            info = HfApi(**_LIBRARY).model_info(
                name.repository,
                revision=name.sort,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
                files_metadata=True,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # Not of JSON, or of other JSON.
            if isinstance(error, OSError):
                raise
            raise no_hub(str(name)) from error
    files = {}
    for one in info.siblings or ():
        sha256, blob = one.lfs.sha256 if one.lfs else "", one.blob_id or ""
        files[one.rfilename] = RemoteFile(
            one.rfilename,
            one.size or 0,
            blob if _GIT.fullmatch(blob) else "",  # They become names of files.
            sha256 if _SHA256.fullmatch(sha256) else "",
        )
    commit = info.sha or ""
    if not (_GIT.fullmatch(commit) and all(map(is_inside, files))):  # They become names, too.
        raise no_hub(str(name))
    licence = getattr(info.card_data, "license", None)
    return HubContents(commit, files, licence if isinstance(licence, str) else "")


def link(name: ModelName, commit: str, file: RemoteFile) -> Path:
    """Give a file its name in the cache, and fetch it unless its content is there. Raises HubError."""
    with hub_faults(name, file.path):
        return Path(
            hf_hub_download(name.repository, file.path, revision=commit, tqdm_class=_Silent, **_LIBRARY)
        )


@contextmanager
def stream(name: ModelName, commit: str, file: RemoteFile, wanted: range) -> Iterator[httpx2.Response]:
    """Ask for bytes of a file. Raises the errors of huggingface_hub and httpx2.

    A server that gives no parts answers 200 with the whole file.
    """
    headers = build_hf_headers(**_LIBRARY) | {
        "Range": f"bytes={wanted.start}-{wanted.stop - 1}",
        "Accept-Encoding": "identity",
    }
    url = hf_hub_url(name.repository, file.path, revision=commit)
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as answer:
        hf_raise_for_status(answer)
        yield answer
