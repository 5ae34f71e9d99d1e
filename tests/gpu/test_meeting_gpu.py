"""Ranks meet on a device, for which one is enough here: what they meet by is closed in the end, and one that
is lost there is not waited for."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import torch

from crews import work
from penstock.parallel.launch import launch
from streams import LONG

CUDA = torch.device("cuda", 0)
LOST = """
import torch
from crews import children, lost
from penstock.base.errors import DeviceError
from penstock.parallel.launch import launch
crew = launch(2, lost)
try:
    crew.group(torch.device("cuda", 0))
except DeviceError as fault:
    print(fault)
crew.close()
print(len(children()), flush=True)
"""


def files() -> list[str]:
    """Of stores, that are open here."""
    return [
        name
        for one in Path("/proc/self/fd").iterdir()
        if os.path.lexists(one) and "penstock store" in (name := os.readlink(one))
    ]


def test_what_ranks_meet_by_is_closed_with_their_group() -> None:
    """Made on one thread, used on another, and ended."""
    with closing(launch(1, work)) as crew:
        group, x = crew.group(CUDA), torch.arange(8.0, device=CUDA)
        assert files()
        group.all_reduce(x)
        group.check()
        assert torch.equal(group.gather(x.view(1, 8), [8])[0].cpu(), torch.arange(8.0))
        group.close()
    assert not files()


def test_a_rank_that_is_lost_while_devices_meet_is_not_waited_for() -> None:
    """Nor by the process's end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-c", LOST],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * LONG,
        check=False,
    )
    assert (result.returncode, result.stdout) == (
        0,
        "rank 1 of 2 was killed by SIGKILL; the other ranks were ended too\n0\n",
    ), result.stderr
