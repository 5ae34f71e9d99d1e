"""The container image, built from deploy/Dockerfile and run: what it answers, as whom, and how it stops.

It needs root, buildah and an image to build on. PENSTOCK_IMAGE_BASE names one that buildah has or can fetch,
as docker.io/library/python:3.12-slim. PENSTOCK_IMAGE_FIND_LINKS may say where pip finds torch for CPUs.
Only files tell the container apart from the host (`--isolation chroot`): this works in a container as well.
Ports are the host's.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

BASE = os.environ.get("PENSTOCK_IMAGE_BASE", "")
LINKS = os.environ.get("PENSTOCK_IMAGE_FIND_LINKS", "")
if not BASE or shutil.which("buildah") is None or os.geteuid():
    pytest.skip(
        "needs root, buildah and a base image, which PENSTOCK_IMAGE_BASE names", allow_module_level=True
    )

import openai  # noqa: E402
import psutil  # noqa: E402

from servers import Server, ending, until  # noqa: E402
from streams import LONG  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SHIPPED = ROOT / "src" / "penstock" / "shipped"
KEY = "key-of-this-test"
BUILD = 1800
"""Seconds: packages are fetched."""


def buildah(*arguments: str, seconds: float = LONG) -> str:
    done = subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


class Container:
    """Made of the image, as a container engine would make it; `asked` is what the image asks of that."""

    def __init__(self, image: str, models: Path) -> None:
        told = json.loads(buildah("inspect", "--type", "image", image))
        self.asked: dict[str, Any] = told["Docker"]["config"]
        self.mounts = ("--volume", f"{models}:/models:ro", "--volume", f"{SHIPPED}:/models/my-model:ro")
        self.name = buildah("from", image)

    @property
    def port(self) -> int:
        [port] = self.asked["ExposedPorts"]
        return int(port.removesuffix("/tcp"))

    def command(self, *arguments: str) -> list[str]:
        return ["buildah", "run", "--isolation", "chroot", *self.mounts, self.name, "--", *arguments]

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = self.command(*arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)

    def is_healthy(self) -> bool:
        kind, *command = self.asked["Healthcheck"]["Test"]
        assert kind == "CMD"
        done = self.run(*command)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0


class Contained(Server):
    """Started by the image's entry point, with flags behind it."""

    def __init__(self, log: Path, container: Container, *flags: str) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                container.command(*container.asked["Entrypoint"], *flags),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self.url = f"http://127.0.0.1:{container.port}"

    def wait(self, seconds: float = 6 * LONG) -> "Contained":
        """Until it takes requests."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.said()
            try:
                return self.ask("GET", "/ready")[0] == 200
            except ConnectionError:
                return False

        until(is_ready, seconds)
        return self

    def first(self) -> psutil.Process:
        """The first process in the container, to which an engine sends its signal: the first below
        buildah's own."""
        return next(one for one in self.below() if not one.cmdline()[0].startswith("buildah"))

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=LONG)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    name = f"localhost/penstock-test-{os.getpid()}"
    links = ("--build-arg", f"PIP_FIND_LINKS={LINKS}") if LINKS else ()
    build = ("build", "--isolation", "chroot", "--format", "docker", "--file", str(DOCKERFILE))
    buildah(*build, "--build-arg", f"BASE={BASE}", *links, "--tag", name, str(ROOT), seconds=BUILD)
    models = tmp_path_factory.mktemp("models")
    models.chmod(0o755)
    (models / "my-model").mkdir()
    (models / "keys.txt").write_text(KEY)
    try:
        made = Container(name, models)
        try:
            with socket.socket() as taken:
                if taken.connect_ex(("127.0.0.1", made.port)) == 0:
                    pytest.fail(f"port {made.port} is taken on this machine, and the image's server needs it")
            yield made
        finally:
            buildah("rm", made.name)
    finally:
        buildah("rmi", name)


@pytest.fixture(scope="module")
def server(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contained]:
    """As the Dockerfile's first lines say to start it, on the model that is shipped."""
    log = tmp_path_factory.mktemp("server") / "said.txt"
    with ending(Contained(log, container, "--api-keys", "/models/keys.txt", "/models/my-model")) as started:
        below = started.wait().below()
        try:
            yield started
        finally:
            for one in below:  # An engine would end what the first process leaves behind.
                with suppress(psutil.NoSuchProcess):
                    one.kill()


@pytest.mark.timeout(BUILD + 300)
def test_it_answers_with_the_model_that_was_mounted(server: Contained, container: Container) -> None:
    assert server.ask("GET", "/health")[0] == 200
    assert container.is_healthy()
    client = server.client()
    assert [model.id for model in client.models.list()] == ["my-model"]
    talk: Any = [{"role": "user", "content": "Tell me a story about a boat."}]
    answer = client.chat.completions.create(model="my-model", messages=talk, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    dates = client.completions.create(
        model="my-model", prompt="On ", extra_body={"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}
    )
    assert re.fullmatch(r"\d{4}-\d\d", dates.choices[0].text)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_it_runs_as_its_user_who_writes_the_cache_and_nothing_else(
    server: Contained, container: Container
) -> None:
    users = dict(line.split(":")[:3:2] for line in container.run("cat", "/etc/passwd").stdout.splitlines())
    assert server.first().uids().real == server.first().uids().effective == int(users["penstock"]) > 0
    [cache] = container.asked["Volumes"]
    made = container.run("find", cache, "-name", "*.so", "-user", "penstock").stdout
    assert made, "its kernels are compiled, which needs a compiler, and kept, which needs a cache of its own"
    others = ["/", "/opt/penstock", "/usr/local/bin", "/models", "/models/my-model/config.json"]
    found = container.run("find", cache, *others, "-maxdepth", "0", "-writable")
    assert (found.returncode, found.stdout.split()) == (0, [cache]), found.stderr


def test_what_the_list_beside_the_file_leaves_out_is_not_in_it(container: Container) -> None:
    assert any(SHIPPED.parent.rglob("__pycache__")), "there is something to leave out"
    found = container.run("find", "/opt/penstock/src", "-name", "__pycache__")
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_it_stops_in_time_and_an_answer_that_was_begun_is_whole(
    server: Contained, container: Container
) -> None:
    """The last test: it ends the server that the others ask."""
    [allowed] = re.findall(r"--stop-timeout (\d+)", DOCKERFILE.read_text())
    count = 300
    with server.client().completions.create(
        model="my-model", prompt="The sea", max_tokens=count, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        chunks = iter(stream)
        next(chunks)
        begun = time.monotonic()
        server.first().send_signal(signal.Signals[container.asked["StopSignal"]])
        *_, last = chunks
    assert last.choices[0].finish_reason == "length"
    assert server.process.wait(float(allowed)) == 0, server.said()
    assert time.monotonic() - begun < float(allowed)
    events = [json.loads(line) for line in server.said().splitlines() if line.startswith("{")]
    assert [one["event"] for one in events][-1] == "stopped"
    assert [one["outputs"] for one in events if one["event"] == "stopping"] == [1], "it was still being asked"
    assert [one["output_tokens"] for one in events if "output_tokens" in one][-1] == count
    assert not container.is_healthy()
