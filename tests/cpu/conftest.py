"""What every test with torch may count on: ranks that it starts here have imported torch before."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import forks
from penstock.parallel import crew


@pytest.fixture(scope="session", autouse=True)
def _quick_followers() -> Iterator[None]:
    """Followers of this process are forked (see forks). Those of processes that tests start are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forks.Popen}))
        yield
