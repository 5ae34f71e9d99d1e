"""Turns what goes wrong with the Hub into one line: what was asked, what is there, what to try."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from penstock.base.errors import CheckpointError
from penstock.hub.names import ModelName

OFFLINE = "HF_HUB_OFFLINE"
_BUSY, _FULL = 429, (errno.ENOSPC, errno.EDQUOT)


class HubError(CheckpointError):
    """A model of the Hugging Face Hub cannot be looked up or fetched, or there is no such model."""


class UnreachableError(HubError):
    """The Hub cannot be asked: there is no network, offline mode is on, or it is down."""


def host() -> str:
    """Return the name of the machine that the Hub is asked at, without a password that stands before it."""
    from huggingface_hub import constants  # 60 ms

    return (urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT).rpartition("@")[2]


@contextmanager
def hub_faults(name: ModelName, file: str = "") -> Iterator[None]:
    """Raise HubError for what fails in this `with` block, which asks the Hub for a model or one of its
    files."""
    import httpx2
    from huggingface_hub import errors

    what = f"{file} of {name}" if file else str(name)
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name.repository} is gated: accept its terms at https://{host()}/{name.repository}, then log "
            "in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name.repository} has no revision {name.sort!r} on {host()}; give a branch, tag or commit of "
            "it, or leave @ out"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{what} is not on {host()}; look at the files of {name.repository} there") from error
    except errors.OfflineModeIsEnabled as error:
        raise UnreachableError(
            f"{what} is not in the cache, and {OFFLINE} forbids to fetch it; unset that, or fetch it where "
            "there is a network"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{host()} has no model {name.repository}, or it is private; check the name, or log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refused(what, error.response.status_code) from error
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
        if isinstance(cause, errors.FileMetadataError):
            raise no_hub(what) from error
        raise UnreachableError(
            f"{what} cannot be fetched: {host()} does not answer ({_short(cause or error)}); check the "
            "network, and try again"
        ) from error
    except OSError as error:
        if error.errno in _FULL:
            raise HubError(
                f"{what} cannot be fetched: the disk of the cache is full; free some space, and the same "
                "command goes on where it stopped"
            ) from error
        raise HubError(
            f"{what} cannot be fetched: {_short(error)}; see that HF_HOME is a directory that can be written"
        ) from error


def no_hub(what: str) -> HubError:
    """Return the error for an answer that the Hub does not give."""
    return HubError(f"{host()} does not answer for {what} as the Hub does; see that HF_ENDPOINT is right")


def _refused(what: str, status: int) -> HubError:
    if status in (401, 403):
        return HubError(
            f"{host()} does not let you fetch {what}: it answered {status}; log in with `hf auth login`, or "
            "set HF_TOKEN to a token that may read it"
        )
    if status == _BUSY:
        return HubError(
            f"{host()} answered {status}, too many requests, for {what}; wait some minutes, or set HF_TOKEN, "
            "and try again"
        )
    kind = UnreachableError if status >= 500 else HubError
    return kind(f"{host()} answered {status} for {what}; try again later")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200].rstrip(". ")
    return text or type(error).__name__
