"""Templates that burn and swell, in processes of their own: what is asked besides is answered, and rightly."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.api import processes, rendering
from penstock.api.rendering import Template
from penstock.base.errors import RequestError

ECHO = Template("{% for word in words %}{{ word }}{% endfor %}")
BURNS = {
    "numbers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "center": "{{ 'x' | center(100000000000) }}",
    "ljust": "{{ 'x'.ljust(100000000000) }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "method": "{{ '{:99999999999}'.format(1) }}",
    "indent": "{{ ('a\n' * 9999999) | indent(9999) }}",
    "replace": "{{ ('a' * 9999999) | replace('a', 'b' * 99999) }}",
    "joined": "{% set n = namespace(x='x' * 60000000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "added": "{% set n = namespace(x=[1] * 9999999) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "sliced": "{% set n = namespace(x=[1] * 99) %}{% for i in range(60) %}{% set n.x = (n.x + n.x)[:] %}{% endfor %}{{ n.x | length }}",
    "tojson": "{{ [[[[1] * 999] * 999] * 99] | tojson(indent=99999) }}",
    "compared": "{% set x = 'x' * 60000000 %}{% for i in range(90000) %}{% if x ~ 'a' == x ~ 'b' %}{% endif %}{% endfor %}",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of a test alone, which burn for less long."""
    rendering.RENDERERS.end()
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    monkeypatch.setattr(rendering, "MEMORY", 400 << 20)
    yield
    rendering.RENDERERS.end()


@pytest.mark.parametrize("name", BURNS)
def test_what_burns_or_swells_ends(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"took more than 0.5 seconds or 400 MiB|may become too large"):
        Template(BURNS[name]).render({})
    assert time.monotonic() < begin + 30, "it ended only since nobody waited any longer"
    assert ECHO.render({"words": ["a", name]}) == "a" + name


def test_memory_is_bounded() -> None:
    """Where there is time enough."""
    with pytest.raises(RequestError, match="400 MiB"):
        Template("{{ 'x'.ljust(450000000) | length }}").render({})
    assert Template("{{ 'x'.ljust(45000000) | length }}").render({}) == "45000000"


def test_other_requests_and_threads_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nobody's turn held up, and no lock of the interpreter held."""
    monkeypatch.setattr(rendering, "SECONDS", 2.0)
    ended = threading.Event()

    def burn() -> None:
        with pytest.raises(RequestError):
            Template(BURNS["numbers"]).render({})
        ended.set()

    burning = [threading.Thread(target=burn) for _ in range(rendering.PROCESSES - 1)]
    for thread in burning:
        thread.start()
    rounds = 0
    while not ended.wait(0.001):
        assert ECHO.render({"words": ["x", str(rounds)]}) == f"x{rounds}"
        rounds += 1
    for thread in burning:
        thread.join()
    assert rounds > 5


def test_each_has_its_own_answer() -> None:
    """Of many threads, while some are broken off."""

    def one(number: int) -> bool:
        if number % 25 == 0:
            with pytest.raises(RequestError):
                Template(BURNS["center"]).render({})
            return True
        return ECHO.render({"words": [str(number), "é"] * 50}) == f"{number}é" * 50

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, range(200)))
    assert len(rendering.RENDERERS._idle) <= rendering.PROCESSES


def test_an_interrupted_request_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ECHO.render({"words": ["first"]}) == "first"

    def interrupted(*args: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes.Process, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ECHO.render({"words": ["left behind"]})
    assert ECHO.render({"words": ["second"]}) == "second"


def test_a_process_that_was_killed_is_replaced() -> None:
    assert ECHO.render({"words": ["a"]}) == "a"
    [process] = rendering.RENDERERS._idle
    process._process.kill()
    process._process.wait()
    assert ECHO.render({"words": ["b"]}) == "b"


def test_a_forked_process_has_its_own(tmp_path: Path) -> None:
    assert ECHO.render({"words": ["parent"]}) == "parent"
    child = os.fork()
    if not child:
        try:
            assert not rendering.RENDERERS._idle
            (tmp_path / "said").write_text(ECHO.render({"words": ["child"]}))
            rendering.RENDERERS.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "said").read_text() == "child"
    assert ECHO.render({"words": ["parent"]}) == "parent"


def test_a_large_conversation_is_no_fault() -> None:
    words = ["日本語 " * 1000] * 500
    assert ECHO.render({"words": words}) == "".join(words)
