"""Templates that burn and swell, in processes of their own: what is asked besides is answered, and
rightly."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.text import processes, rendering
from penstock.api.text.rendering import Template
from penstock.base.errors import RequestError
from penstock.base.wanted import UnwantedError, Waiter, while_wanted

ECHO = Template("{% for word in words %}{{ word }}{% endfor %}")
BURNS = {
    "numbers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ "
    "n.x }}",
    "center": "{{ 'x' | center(100000000000) }}",
    "ljust": "{{ 'x'.ljust(100000000000) }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "method": "{{ '{:99999999999}'.format(1) }}",
    "indent": "{{ ('a\n' * 9999999) | indent(9999) }}",
    "replace": "{{ ('a' * 9999999) | replace('a', 'b' * 99999) }}",
    "joined": "{% set n = namespace(x='x' * 60000000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% "
    "endfor %}{{ n.x | length }}",
    "added": "{% set n = namespace(x=[1] * 9999999) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% "
    "endfor %}{{ n.x | length }}",
    "sliced": "{% set n = namespace(x=[1] * 99) %}{% for i in range(60) %}{% set n.x = (n.x + n.x)[:] %}{% "
    "endfor %}{{ n.x | length }}",
    "tojson": "{{ [[[[1] * 999] * 999] * 99] | tojson(indent=99999) }}",
    "compared": "{% set x = 'x' * 60000000 %}{% for i in range(90000) %}{% if x ~ 'a' == x ~ 'b' %}{% endif "
    "%}{% endfor %}",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of a test alone, which burn for less long."""
    end()
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    monkeypatch.setattr(rendering, "MEMORY", 400 << 20)
    yield
    end()


def end() -> None:
    rendering.RENDERERS.end()
    rendering.LARGE.end()


@pytest.mark.parametrize("name", BURNS)
def test_what_burns_or_swells_ends(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(
        RequestError, match=r"needs more than the 0.5 seconds or 400 MiB|may become too large"
    ):
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
    monkeypatch.setattr(rendering, "SECONDS", 1.0)
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


def test_templates_of_one_process_are_told_apart() -> None:
    """Also those that are of the same length, cannot be compiled, or hold half a character."""
    sources = ("a{{ x }}", "b{{ x }}", "\ud800{{ x }}", "{% if x")
    templates = [Template(source) for source in sources]
    for turn in range(3):
        for source, template in zip(sources, templates, strict=True):
            if source.endswith("}"):
                assert template.render({"x": turn}) == source.replace("{{ x }}", str(turn))
            else:
                with pytest.raises(RequestError):
                    template.render({"x": turn})


@pytest.mark.parametrize("words", [["x"], ["x" * 50_000], ["x" * 70_000]])
def test_a_process_is_sent_a_template_once(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Whatever is sent with it."""
    asked, ask = list[bytes](), processes.Pool.ask

    def noted(pool: processes.Pool, sent: bytes, patience: float) -> bytes:
        asked.append(sent)
        return ask(pool, sent, patience)

    monkeypatch.setattr(processes.Pool, "ask", noted)
    monkeypatch.setattr(rendering.RENDERERS, "_briefly", None)
    template = Template("{# " + "c" * 20_000 + " #}{{ words[0] }}")
    for _ in range(3):
        assert template.render({"words": words}) == words[0]
    assert ["source" in json.loads(sent) for sent in asked] == [False, True, False, False]


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
            end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "said").read_text() == "child"
    assert ECHO.render({"words": ["parent"]}) == "parent"


def test_a_large_conversation_is_no_fault() -> None:
    words = ["日本語 " * 1000] * 500
    assert ECHO.render({"words": words}) == "".join(words)


def test_a_large_conversation_is_rendered_where_it_yields() -> None:
    assert ECHO.render({"words": ["a" * (64 << 10)]}) == "a" * (64 << 10)
    [process] = rendering.LARGE._idle
    assert os.getpriority(os.PRIO_PROCESS, process._process.pid) == 19
    assert not rendering.RENDERERS._idle


def test_what_takes_long_yields_and_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 60.0)
    monkeypatch.setattr(rendering.RENDERERS, "_briefly", 0.01)
    asked, there = processes.Process.ask, []

    def noted(process: processes.Process, *given: Any) -> bytes:
        there.append(process)
        return asked(process, *given)

    monkeypatch.setattr(processes.Process, "ask", noted)
    slow = "{% for i in range(90000) %}{% if '' ~ i == 'x' %}{% endif %}{% endfor %}{{ word }}"
    assert Template(slow).render({"word": "done"}) == "done"
    assert there[0].yields
    assert not there[0].alive
    assert not rendering.RENDERERS._idle


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda some: st.lists(some) | st.dictionaries(st.text() | st.integers(), some),
    )
)
def test_what_is_written_in_parts_is_what_json_writes(what: object) -> None:
    many = {"source": "", "variables": {"messages": [what] * 513, "one": what}}
    assert rendering._written(many) == json.dumps(many)
    assert rendering._written(what) == json.dumps(what)


@pytest.mark.parametrize("what", [{1, 2}, {"a": [object()] * 999}, {(1, 2): 3}, {"a": {"b": b"c"}}])
def test_what_json_cannot_hold_is_refused(what: object) -> None:
    with pytest.raises(RequestError, match="must be JSON values"):
        ECHO.render({"words": what})


def test_the_start_of_a_process_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, where starting takes longer than a rendering may, each would be rendered by a new one, which
    yields from its start."""
    monkeypatch.setattr(processes, "_CHILD", "import time; time.sleep(2)\n" + processes._CHILD)
    monkeypatch.setattr(rendering.RENDERERS, "_briefly", 1.0)
    assert ECHO.render({"words": ["a"]}) == "a"
    [process] = rendering.RENDERERS._idle
    assert not process.yields


@pytest.mark.parametrize("asked", [lambda template: template.variables, lambda template: template.render({})])
def test_a_template_that_is_only_compiled_ends_too(
    asked: Callable[[Template], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that takes seconds, with memory enough, whatever is asked of it."""
    monkeypatch.setattr(rendering, "MEMORY", 8 << 30)
    slow = Template("{% if x %}{{ x }}{% endif %}" * 20_000)
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"needs more than the 0.5 seconds"):
        asked(slow)
    assert time.monotonic() < begin + 30, "it ended only since nobody waited any longer"


def test_a_rendering_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its process, and also while it waits for one."""
    monkeypatch.setattr(rendering, "SECONDS", 600.0)
    burning = Template(BURNS["compared"])
    waiters = [Waiter() for _ in range(rendering.PROCESSES + 2)]

    def rendered(waiter: Waiter) -> None:
        with pytest.raises(UnwantedError):
            while_wanted(waiter, lambda: burning.render({}))

    with ThreadPoolExecutor(len(waiters)) as pool:
        work = [pool.submit(rendered, waiter) for waiter in waiters]
        time.sleep(0.3)
        for waiter in waiters:
            waiter.gone = True
        for one in work:
            one.result(timeout=30)
    assert not rendering.RENDERERS._idle
    assert ECHO.render({"words": ["a"]}) == "a"
