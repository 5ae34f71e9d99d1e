"""Names the machine that a measurement was made on, so that its numbers mean something later and
elsewhere."""

import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock import __version__
from penstock.base.config import source_commit
from penstock.base.cores import processor, usable_cores
from penstock.memory.device import free_memory, total_memory


@dataclass(frozen=True, slots=True)
class Device:
    """A device that an engine could run on; sizes are in bytes."""

    device: str
    name: str
    memory: int
    free: int


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Hardware, software and date, which every report has.

    threads: those of torch.
    commit: of the source tree, from PENSTOCK_COMMIT or from git. None if neither knows it.
    """

    system: str
    processor: str
    cores: int
    threads: int
    memory: int
    free: int
    devices: tuple[Device, ...]
    python: str
    torch: str
    cuda: str | None
    triton: str | None
    penstock: str
    commit: str | None
    date: str


def machine() -> MachineInfo:
    """Return what is known of this machine."""
    cpu = torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return MachineInfo(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memory=total_memory(cpu),
        free=free_memory(cpu),
        devices=tuple(_cuda_device(index) for index in range(count)),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=_version("triton"),
        penstock=__version__,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cuda_device(index: int) -> Device:
    device = torch.device("cuda", index)
    return Device(str(device), torch.cuda.get_device_name(device), total_memory(device), free_memory(device))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the source tree, with a plus sign if files differ from it. PENSTOCK_COMMIT says
    it, or else git: a copy of the tree may lie in a repository that stands at an earlier commit."""
    if (said := source_commit()) is not None:
        return said
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        # An installed package may lie inside some other project's repository: only where git knows this very
        # file is it ours.
        known = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10
        )
        if known.returncode:
            return None
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
