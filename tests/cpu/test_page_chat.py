"""The chat of the server's page, in a browser: what models write, branches, files, exports, what is kept, and
whether everybody can use it.

The server is the command with the shipped model under two names, whose template knows reasoning; where a test
says what the model writes, the request holds it to that.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import speakers
from browsers import ENTER, ESCAPE, Browser, browsing, until
from servers import ENDLESS, FLAGS, Server, Stream, serving
from streams import LONG

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("llguidance", reason="needs the extra `grammar`")

AXE = Path(sys.prefix) / "node_modules/axe-core/axe.min.js"
NAMES = ("--name", "shipped", "--name", "small")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Asked for after the browser: without one there is nothing to serve."""
    folder = tmp_path_factory.mktemp("chat")
    model = speakers.checkpoint(folder / "model")
    flags = (
        *FLAGS,
        "--port",
        "0",
        "--max-length",
        "2048",
        "--max-step-tokens",
        "64",
        "--max-sequences",
        "2",
        *NAMES,
    )
    with serving(folder, str(model), *flags) as server:
        yield server.wait()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The page as somebody sees it who has never been there; whatever a test does, the console stays
    silent."""
    browser.open(f"{server.url}/page/icon.svg")
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.complaints()
    opened(browser, server)
    yield browser
    assert [one for one in browser.complaints() if "/favicon.ico" not in one] == []


def opened(page: Browser, server: Server) -> None:
    page.open(server.url)
    until(lambda: page.count("#models") == 1 and page.count("#gauges") == 1)


def holding(page: Browser, server: Server, *turns: dict[str, Any], **chat: Any) -> None:
    """Show a conversation of these turns, which stand in a row."""
    kept = {"id": "one", "when": 1, "turns": turns, **chat}
    page.run("localStorage.setItem('penstock.chat.one', arguments[0])", json.dumps(kept))
    opened(page, server)


def says(page: Browser, *pieces: str | int, **more: Any) -> None:
    """Have the next answers be this."""
    page.run(
        "const real = window.real ??= window.fetch, more = JSON.parse(arguments[0]); window.fetch = (path, "
        "options) => real(path, path === '/v1/chat/completions' ? { ...options, body: "
        "JSON.stringify({ ...JSON.parse(options.body), ...more }) } : options)",
        json.dumps(speakers.saying(*pieces) | more),
    )


def ended(page: Browser) -> bool:
    return page.count("#stop") == 0 and page.count(".turn.assistant .again") > 0


def asks(page: Browser, text: str) -> None:
    page.click("#say")
    page.type(text + ENTER)
    until(lambda: ended(page))


def texts(page: Browser, selector: str) -> list[str]:
    return list(
        page.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
        )
    )


def chats(page: Browser) -> list[dict[str, Any]]:
    """All that are kept."""
    return [
        json.loads(one)
        for one in page.run(
            "return Object.keys(localStorage).filter((key) => key.startsWith('penstock.chat.'))"
            ".map((key) => localStorage.getItem(key))"
        )
    ]


HOLDS = "The model\N{RIGHT SINGLE QUOTATION MARK}s context holds"


def told(page: Browser, line: str) -> None:
    """Above the message field, soon."""
    until(lambda: page.text("#notice") == line)


def drop(page: Browser, **files: str | list[int]) -> None:
    """Drop files on the page; a double underscore is a dot."""
    page.run(
        "const all = new DataTransfer(); for (const [name, what] of Object.entries(JSON.parse(arguments[0])))"
        "all.items.add(new File([typeof what === 'string' ? what : new Uint8Array(what)], "
        "name.replace('__', '.')));"
        "document.dispatchEvent(new DragEvent('drop', "
        "{ dataTransfer: all, bubbles: true, cancelable: true }))",
        json.dumps(files),
    )


def imports(page: Browser, text: str) -> None:
    page.run(
        "const all = new DataTransfer(); all.items.add(new File([arguments[0]], 'talks.json'));"
        "const field = document.getElementById('import-file'); field.files = all.files;"
        "field.dispatchEvent(new Event('change'))",
        text,
    )


def exports(page: Browser, selector: str) -> Any:
    """What the file has that a button gives."""
    page.run(
        "window.given = null; const real = window.makes ??= URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.given = text; }); "
        "return real.call(URL, blob); };"
        "HTMLAnchorElement.prototype.click = () => {}; document.querySelector(arguments[0]).click()",
        selector,
    )
    return json.loads(until(lambda: page.run("return window.given")))


@contextmanager
def phone(page: Browser) -> Iterator[None]:
    page.command(
        "Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True
    )
    try:
        yield
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")


# ---- Markdown

WRITTEN = """# Title

A *word*, **another**, `code`, [a link](https://example.org/) and
a line.

1. one
   - inside
2. two

| a | b |
|---|--:|
| 1 | 2<br>3 |

> said

- [x] done

```py
x = 1 < 2
```
"""
OUTLINE = """
return [...document.querySelectorAll('.assistant .body > *')].map((one) =>
  one.localName + (one.className ? '.' + one.className : '') + ': ' + one.textContent)
"""


def test_markdown_becomes_elements_and_code_has_a_button_to_copy_it(page: Browser, server: Server) -> None:
    holding(page, server, {"role": "user", "content": "*?*"}, {"role": "assistant", "content": WRITTEN})
    assert page.text(".turn.user .plain") == "*?*", "as it was typed"
    assert page.run(OUTLINE) == [
        "h3: Title",
        "p: A word, another, code, a link anda line.",
        "ol: oneinsidetwo",
        "div.wide-table: ab123",
        "blockquote: said",
        "ul: ☑ done",
        "div.code: pyCopyx = 1 < 2",
    ]
    assert texts(page, ".body :is(em, strong, a, p > code, td.right)") == [
        *("word", "another", "code", "a link"),
        "23",
    ]
    link = page.run("const a = document.querySelector('.body a'); return [a.href, a.target, a.rel]")
    assert link == ["https://example.org/", "_blank", "noopener noreferrer nofollow"]
    # What is copied is what would be pasted.
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".copy-code")
    assert until(lambda: page.run("return window.copied")) == "x = 1 < 2"
    assert page.text(".copy-code") == "Copied"
    page.click(".turn.assistant .copy")
    until(lambda: page.run("return window.copied") == WRITTEN)
    # Without a clipboard, as by plain HTTP from another machine, a selected text is copied.
    page.run(
        "navigator.clipboard.writeText = async () => { throw new Error(); };"
        "document.execCommand = () => { window.copied = document.activeElement.value; return true; }"
    )
    page.click(".copy-code")
    until(lambda: page.run("return window.copied") == "x = 1 < 2")


FORMULAS = [
    r"\(a_1 + b_1\)",
    r"$x_i^2 \\ y_i$",
    r"\[ c_1 \, d_1 \]",
    "$$\na_1 \\\\\nb_1\n$$",
    "\\begin{align*}\na &= *b* \\\\\n\\end{align*}",
]


def test_formulas_stay_as_they_were_typed_and_prices_are_none(page: Browser, server: Server) -> None:
    text = f"So {FORMULAS[0]} and {FORMULAS[1]}: {FORMULAS[2]}\n\n{FORMULAS[3]}\n\nThen\n{FORMULAS[4]}\n"
    prices = "It costs $5 and $10, not $7-$8, or *$9*."
    holding(page, server, {"role": "assistant", "content": f"{text}\n{prices}\n\n$$ open *x*"})
    assert [one.strip() for one in texts(page, ".body .formula")] == FORMULAS
    assert texts(page, ".body > p")[-2:] == ["It costs $5 and $10, not $7-$8, or $9.", "$$ open x"]
    assert "monospace" in page.run("return getComputedStyle(document.querySelector('.formula')).fontFamily")


def test_what_has_come_in_pieces_is_what_would_have_come_whole(page: Browser) -> None:
    """Read while it comes, block by block, in pieces of any length; nodes of what is over stay what they
    were. What is said below of a link is known at the end."""
    text = f"{WRITTEN}\nSee [there].\n\n{FORMULAS[3]}\n\n~~~\nopen\n\n```\nstill\n~~~\n"
    link = "\n[there]: https://example.org/\n"
    for step in (1, 7, 50):
        found = page.run(
            """
            return import('/page/markdown.js').then(({ Growing }) => {
              const [text, link, step] = arguments;
              const [node, whole, other] = [1, 2, 3].map(() => document.createElement('div'));
              const growing = new Growing(node), first = [];
              for (let end = 0; end < text.length; end += step) {
                growing.show(text.slice(0, end));
                if (node.children.length > 3) first.push(node.children[2]);
              }
              growing.show(text);
              new Growing(whole).show(text, true);
              const same = node.isEqualNode(whole);
              growing.show(text + link, true);
              new Growing(other).show(text + link, true);
              const kept = new Set(first).size === 1 && first[0] === node.children[2];
              return [same, kept, node.isEqualNode(other), node.querySelectorAll('a').length];
            })
            """,
            text,
            link,
            step,
        )
        assert found == [True, True, True, 2], step


EVIL = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><svg onload=window.ran=3>"
    "<iframe srcdoc='<script>parent.ran = 4</script>'></iframe>\n\n"
    "[a](javascript:window.ran=5) [b](JaVaScRiPt&colon;window.ran=6) [c](data:text/html,<script>x</script>) "
    "[d](vbscript:x) [e](/v1/models) <javascript:window.ran=7> ![f](https://evil.example/?said) "
    "![g](data:image/svg+xml,<svg/onload=x>) [h]( \tjava\nscript:x)\n\n[i]\n\n[i]: javascript:window.ran=8"
    "\n\n```<img/onerror=x>\n</code></pre><script>window.ran = 9</script>\n```\n\n"
    "| <b>x</b> |\n|---|\n| <i>y</i> |\n"
)


def test_nothing_that_a_model_writes_runs_or_is_loaded(page: Browser, server: Server) -> None:
    short = "<img src=x onerror=window.ran=0>[a](javascript:window.ran=0)"
    says(page, short)
    asks(page, "Go")
    assert chats(page)[0]["turns"][1]["content"] == page.text(".assistant .body") == short
    page.run("localStorage.clear()")
    holding(
        page,
        server,
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "reasoning": EVIL},
    )
    page.click(".reasoning summary")
    assert page.run("return window.ran ?? null") is None
    assert (
        page.count(".body :is(script, img, svg, iframe, object, video, audio, style, form, input, b, i)") == 0
    )
    assert (
        page.run(
            "return [...document.querySelectorAll('.body *')].flatMap((node) => [...node.attributes])"
            ".map((one) => one.name).filter((name) => !['class', 'href', 'title', 'target', 'rel', 'type', "
            "'tabindex', 'role', 'aria-label'].includes(name))"
        )
        == []
    )
    assert texts(page, ".body a") == ["[image: f]"]
    assert "<script>window.ran = 1</script>" in texts(page, ".assistant .body")[0]
    assert (
        page.run(
            "return performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)"
            ".filter((one) => one !== location.origin)"
        )
        == []
    )
    # What else made markup of text would be stopped by the browser, and complained of.
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.run("document.createElement('p').innerHTML = '<b>x</b>'")
    page.complaints()


HUGE = {
    "quotes": "> " * 10_000 + "the end",
    "a list in a list": "- " * 10_000 + "the end",
    "a table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 20_000 + "\nthe end",
    "a wide table": "a|" * 200 + "\n" + "-|" * 200 + "\n" + ("b|" * 200 + "\n") * 1000 + "\nthe end",
    "emphasis": "*a **b " * 5000 + "c** d*" * 5000 + "the end",
    "brackets": "[" * 20_000 + "the end",
    "links": "[a](" * 20_000 + "the end",
    "dollars": "$a " * 30_000 + "the end",
    "formulas": "$$ \n" * 20_000 + "the end",
    "code without an end": "```py\n" + "x = 1\n" * 60_000 + "the end",
    "a line": "word " * 100_000 + "the end",
    "ticks": "".join("`" * (at % 300 + 1) + "a" for at in range(2000)) + "the end",
}


def test_nothing_that_a_model_writes_hangs_the_page_or_is_lost(page: Browser) -> None:
    for what, text in HUGE.items():
        seconds, shown, nodes = page.run(
            """
            return import('/page/markdown.js').then(({ Growing }) => {
              const begin = performance.now(), node = document.createElement('div');
              const growing = new Growing(node);
              growing.show(arguments[0].slice(0, -3));
              growing.show(arguments[0], true);
              const seconds = (performance.now() - begin) / 1000;
              return [seconds, node.textContent, node.querySelectorAll('*').length];
            })
            """,
            text,
        )
        assert seconds < 6, what
        assert nodes < 150_000, what
        assert shown.rstrip().endswith("the end"), what
        before, after = (sum(map(one.count, "abx12w")) for one in (text, shown))
        assert after >= before, what


# ---- branches


def test_retried_answers_and_edited_messages_are_branches(page: Browser) -> None:
    for number in ("one", "two"):
        says(page, f"answer {number}")
        if number == "one":
            asks(page, "question one")
        else:
            page.click(".turn.assistant .again")
            until(lambda: ended(page) and page.text(".turn.assistant .branches span") == "2/2")
    says(page, "answer three")
    page.run("document.querySelector('.turn.assistant .body').firstChild.kept = true")
    asks(page, "more")
    assert page.run("return document.querySelector('.turn.assistant .body').firstChild.kept"), "not made anew"
    assert texts(page, ".turn .body") == ["question one", "answer two", "more", "answer three"]
    page.click(".turn:nth-child(2) .branches button:first-child")
    assert texts(page, ".turn .body") == ["question one", "answer one"]
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Version after"
    page.type(ENTER)
    assert texts(page, ".turn .body") == ["question one", "answer two", "more", "answer three"]
    page.click(".turn.user .edit")
    assert page.run("return document.activeElement.value") == "question one"
    page.type(ESCAPE)
    assert page.run("return document.activeElement.className") == "edit"
    page.click(".turn.user .edit")
    page.type("!")
    says(page, "answer four")
    page.click(".editor .done")
    until(lambda: ended(page))
    assert texts(page, ".turn .body") == ["question one!", "answer four"]
    assert page.text(".turn.user .branches span") == "2/2"
    page.click(".turn.assistant .edit")
    page.type(" and")
    page.click(".editor .done")
    assert texts(page, ".turn .body") == ["question one!", "answer four and"]
    assert page.text(".turn.assistant .branches span") == "2/2"
    [chat] = chats(page)
    assert len(chat["turns"]) == 8, "nothing is lost"
    # What is asked next goes on from what is shown.
    page.run(
        "const before = window.fetch; window.fetch = (path, options) => { if (options?.body) window.sent = "
        "JSON.parse(options.body); return before(path, options); }"
    )
    asks(page, "last")
    assert [one["content"] for one in page.run("return window.sent.messages")] == [
        *("question one!", "answer four and"),
        "last",
    ]


def test_branches_are_kept_and_another_tab_s_turns_are_not_lost(page: Browser, server: Server) -> None:
    says(page, "answer one")
    asks(page, "question")
    page.click(".turn.assistant .again")
    until(lambda: ended(page) and page.count(".branches") == 1)
    # As another tab would have it, which has asked something in the meantime.
    [chat] = chats(page)
    other = {
        "id": "other",
        "parent": chat["turns"][0]["id"],
        "role": "assistant",
        "content": "of another tab",
    }
    page.run(
        "localStorage.setItem('penstock.chat.' + arguments[0].id, JSON.stringify(arguments[0]))",
        chat | {"turns": [*chat["turns"], other]},
    )
    says(page, "answer two")
    asks(page, "more")
    [chat] = chats(page)
    assert sorted(turn["content"] for turn in chat["turns"]) == [
        *("answer one", "answer one", "answer two"),
        *("more", "of another tab", "question"),
    ]
    opened(page, server)
    assert texts(page, ".turn .body") == ["question", "answer one", "more", "answer two"]
    assert page.text(".turn.assistant .branches span") == "2/3"
    # What is being edited survives what another tab does.
    page.click(".turn.user .edit")
    page.type("!")
    page.run(
        "window.dispatchEvent(new StorageEvent('storage', { key: 'penstock.chat.' + arguments[0] }))",
        chat["id"],
    )
    assert page.run("return document.querySelector('.editor textarea').value") == "question!"


def test_an_answer_is_kept_as_far_as_it_has_come(page: Browser, server: Server) -> None:
    says(page, "the sea and the wind " * 200)
    page.type(f"Go{ENTER}")
    until(lambda: len(page.text(".turn.assistant .body")) > 40)
    opened(page, server)  # The page is closed meanwhile.
    assert page.text(".turn.assistant .body").startswith("the sea and the wind")
    assert page.text(".turn.assistant .note") == "The page was closed before the answer ended."
    until(lambda: page.text("#running") == "0")
    says(page, "whole")
    page.click(".turn.assistant .again")
    until(lambda: ended(page) and page.text(".turn.assistant .body") == "whole")


# ---- thinking, models, waiting


def test_thinking_is_folded_and_says_how_long_it_was(page: Browser, server: Server) -> None:
    says(page, speakers.THINK, "a boat, *so* " * 8, "</think>", "the end")
    page.click("#say")
    page.type(f"Go{ENTER}")
    until(lambda: page.count(".reasoning") == 1)
    assert page.text(".reasoning summary") == "Thinking …"
    assert page.text("#doing").startswith("Thinking for 0:0")
    until(lambda: ended(page))
    assert page.count(".reasoning[open]") == 0
    title = page.text(".reasoning summary")
    assert title.startswith("Thought for ")
    page.click(".reasoning summary")
    assert page.text(".reasoning .plain").startswith("a boat, *so* a boat")
    assert page.text(".turn.assistant .body") == "the end"
    opened(page, server)
    assert page.text(".reasoning summary") == title
    assert page.count(".reasoning[open]") == 0


def test_one_of_several_models_is_chosen_and_named(page: Browser, server: Server) -> None:
    assert texts(page, "#models option") == ["shipped", "small"]
    page.run(
        "const menu = document.getElementById('models'); menu.value = 'small'; "
        "menu.dispatchEvent(new Event('change'))"
    )
    says(page, "hello")
    asks(page, "Go")
    assert chats(page)[0]["turns"][1]["model"] == "small"
    assert page.text(".turn.assistant .note").startswith("small: ")
    opened(page, server)
    assert page.run("return document.getElementById('models').value") == "small"


def test_waiting_and_the_prompt_s_progress_are_said_with_what_the_server_tells(
    page: Browser, server: Server
) -> None:
    with ExitStack() as busy:
        for _ in range(2):
            busy.enter_context(Stream(server, ENDLESS | {"max_tokens": 1500}))
        until(lambda: page.text("#running") == "2")
        page.type(f"Go{ENTER}")
        until(lambda: "2 requests running, 1 waiting" in page.text("#doing"))
        assert page.text("#doing").startswith("Waiting for 0:0")
    until(lambda: page.count(".turn.assistant .again") > 0 or page.text("#doing").startswith("Writing"))
    page.type(ESCAPE)
    until(lambda: ended(page) and page.text("#running") == "0")
    # What /state says of a prompt, on a machine that is slower than this.
    page.run(
        """
        const real = window.fetch, prompt = { reached: 1200, length: 6000, rate: 100, left: 48 };
        const never = (signal) => new Promise((_, fail) =>
          signal.addEventListener('abort', () => fail(new DOMException('', 'AbortError'))));
        window.fetch = async (path, options) =>
          path === '/state' ? Response.json({ ...await (await real(path, options)).json(), prompt })
          : path === '/v1/chat/completions' ? never(options.signal) : real(path, options);
        """
    )
    page.type(f"More{ENTER}")
    until(lambda: page.text("#doing") == "Reading the prompt: 1,200 of 6,000 tokens · 0:48 left")
    assert page.run("const bar = document.getElementById('reading'); return bar.value / bar.max") == 0.2
    with phone(page):
        for panel in ("", "machine", "chats"):
            if panel:
                page.click(f"#show-{panel}")
            assert page.count(".thread") == (not panel)
            for selector in ("#stop", "#doing", "#reading"):
                left, top, right, bottom = page.run(
                    "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
                    "return [box.left, box.top, box.right, box.bottom]",
                    selector,
                )
                assert 0 <= left < right <= 360, (panel, selector)
                assert 0 <= top < bottom <= 640, (panel, selector)
            assert page.run("return document.documentElement.scrollWidth") == 360
            assert (
                page.run(
                    "const box = document.getElementById('stop').getBoundingClientRect();"
                    "return document.elementFromPoint(box.left + 9, box.top + 9).id"
                )
                == "stop"
            ), f"nothing lies over it beside {panel}"
        page.click("#stop")
        until(lambda: page.count("#doing") == 0)
    assert page.text(".turn:last-child .note") == "shipped: Stopped."


# ---- files


def test_text_files_go_with_a_message_and_others_are_refused(page: Browser, server: Server) -> None:
    text = "a `boat` and ``` at sea\n"
    drop(page, notes__txt=text)
    until(lambda: page.count("#files li") == 1)
    _, _, found = server.ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert page.text("#files .name") == "notes.txt"
    assert page.text("#files .about") == f"{found['count']} tokens"
    many = server.ask("POST", "/tokenize", {"prompt": "boat " * 3000, "add_special_tokens": False})[2][
        "count"
    ]
    for name, what, said in (
        ("b__bin", [0, 255, 1], "is no text in UTF-8. Attach a text file."),
        ("c__bin", "a\0b", "is no text. Attach a text file."),
        ("d__txt", " \n", "is empty."),
        ("e__txt", "boat " * 3000, f"has {many:,} tokens. {HOLDS} 2,048. Attach a part of it."),
    ):
        drop(page, **{name: what})
        told(page, f"{name.replace('__', '.')} {said}")
        assert page.count("#files li") == 1
    says(page, "read")
    asks(page, "What is this?")
    assert page.count("#files li") == 0
    assert page.text(".turn.user .files summary").replace("\n", " ").startswith("notes.txt")
    page.run(
        "const before = window.fetch; window.fetch = (path, options) => { if (options?.body) window.sent = "
        "JSON.parse(options.body); return before(path, options); }"
    )
    page.click(".turn.assistant .again")
    until(lambda: page.run("return window.sent ?? null") and ended(page))
    assert page.run("return window.sent.messages") == [
        {"role": "user", "content": f"File notes.txt:\n````\n{text}````\n\nWhat is this?"}
    ]
    # An edited message keeps its file, unless that is removed.
    page.click(".turn.user .edit")
    assert page.count(".editor .files li") == 1
    page.click(".editor .files button")
    page.click(".editor .done")
    until(lambda: ended(page))
    assert page.count(".turn.user .files") == 0
    assert page.run("return window.sent.messages[0].content") == "What is this?"


def test_conversations_are_exported_and_imported_with_all_their_branches(
    page: Browser, server: Server
) -> None:
    page.run("document.getElementById('system').value = 'Be brief.'")
    says(page, speakers.THINK, "hm", "</think>", "answer one")
    asks(page, "question one")
    page.click(".turn.assistant .again")
    until(lambda: ended(page) and page.count(".branches") == 1)
    before = chats(page)
    one = exports(page, "#list .export")
    assert one["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "question one"},
        {"role": "assistant", "content": "answer one"},
    ]
    status, _, _ = server.ask(
        "POST", "/v1/chat/completions", {"model": "small", "max_tokens": 1, **{"messages": one["messages"]}}
    )
    assert status == 200
    page.click("#new")
    says(page, "answer two")
    asks(page, "question two")
    every = exports(page, "#export-all")
    assert [chat["title"] for chat in every] == ["question two", "question one"]
    imports(page, json.dumps(every))
    told(page, "All conversations of talks.json are here already.")
    page.run("localStorage.clear()")
    opened(page, server)
    assert page.count("#list .open") == 0
    imports(page, json.dumps(one))
    until(lambda: page.count("#list .open") == 1)
    assert chats(page) == before
    assert page.text(".turn.assistant .branches span") == "2/2"
    # Messages as others export them, alone or several conversations.
    talk = [
        {"role": "developer", "content": "Rhyme."},
        {"role": "user", "content": [{"type": "text", "text": "<b>Sea</b>"}]},
    ]
    imports(page, json.dumps(talk))
    until(lambda: page.count("#list .open") == 2)
    assert texts(page, ".turn .body .plain") == ["Rhyme.", "<b>Sea</b>"]
    imports(page, json.dumps([{"messages": talk, "title": "A talk"}, {"messages": talk}]))
    until(lambda: page.count("#list .open") == 4)
    assert "A talk" in texts(page, "#list .open")
    for wrong, said in (
        ("{", "talks.json is no JSON."),
        ('{"turns": 1}', "talks.json has no conversation: messages with a role and text are looked for."),
        (
            '[null, 3, {"messages": [{"role": "tool"}]}]',
            "talks.json has no conversation: messages with a role and text are looked for.",
        ),
    ):
        imports(page, wrong)
        told(page, said)
    assert page.count("#list .open") == 4


def test_what_is_kept_cannot_break_the_page(page: Browser, server: Server) -> None:
    """Whatever else has written there: turns that are their own parents, of no kind, or nothing."""
    turns = [
        *(
            {"id": "a", "parent": "a", "role": "user", "content": "x"},
            {"id": "a", "parent": "b", "role": "assistant"},
        ),
        *(
            {"id": "b", "parent": "c", "role": "user", "content": 3},
            {"role": "wizard", "content": "no"},
            None,
            7,
        ),
        {
            "id": "c",
            "parent": "b",
            "role": "assistant",
            "content": "y",
            "files": [1, {"name": {}}],
            "reasoning": 1,
        },
    ]
    holding(page, server, *turns, at="nowhere")
    assert page.count(".turn") == 2
    page.run(
        "for (const bad of ['null', '[]', '{', '{\"turns\": {}}'])"
        "localStorage.setItem('penstock.chat.' + bad, bad); localStorage.setItem('penstock.settings', '3')"
    )
    opened(page, server)
    assert page.count(".turn") == 2
    assert page.count("#list .open") == 1


def test_a_conversation_for_which_there_is_no_room_is_not_lost_in_silence(
    page: Browser, server: Server
) -> None:
    holding(page, server, {"role": "user", "content": "x" * 4_400_000}, title="Long")
    page.click("#new")
    drop(page, notes__txt="word " * 1000, more__txt="word " * 1000)
    until(lambda: page.count("#files li") == 2)
    page.run(
        "document.getElementById('say').value = 'y'.repeat(200000); const real = window.fetch;"
        "window.fetch = (path, options) => path === '/v1/chat/completions' ? Promise.reject(new TypeError()) "
        ": real(path, options)"
    )
    page.click("#send")
    until(lambda: page.count("#notice") == 1)
    assert page.text("#notice") == (
        "This browser has no room for this conversation: it is lost when the page is closed. Export it, or "
        "delete others."
    )
    assert page.text(".turn:last-child .fault") == "The server cannot be reached."
    assert len(exports(page, "#list .current .export")["messages"][0]["content"]) > 200_000
    page.click("#list li:nth-child(2) .delete")
    page.accept()
    until(lambda: page.count("#list .open") == 1)
    page.click(".turn.assistant .again")
    until(lambda: len(chats(page)) == 1 and len(chats(page)[0]["turns"]) == 3)
    assert page.count("#notice") == 0


# ---- for everybody


def test_axe_finds_nothing_in_any_state_of_the_page(page: Browser, server: Server) -> None:
    if not AXE.is_file():
        pytest.skip("needs axe-core, which tools/test_tools.sh installs")

    def violations() -> Any:
        page.command(
            "Runtime.evaluate",
            expression="window.found = null; axe.run({ resultTypes: ['violations'] }).then((all) => { "
            "window.found = [all.passes.length, all.violations.map((one) => [one.id, "
            "...one.nodes.map((node) => node.html)])]; })",
        )
        passes, found = until(lambda: page.run("return window.found"), LONG)
        assert passes > 10
        return found

    answer = {
        "role": "assistant",
        "content": WRITTEN + "\n" + FORMULAS[3],
        "reasoning": "Hm.",
        "thought": 2,
        "fault": "Not answered.",
    }
    asked = {"role": "user", "content": "?", "files": [{"name": "a.txt", "text": "b", "tokens": 3}]}
    holding(page, server, asked, answer, {"role": "system", "content": "Be brief."})
    page.run(AXE.read_text() + "; return 1")
    drop(page, notes__txt="word", b__bin=[0])
    until(lambda: page.count("#notice") and page.count("#files li"))
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    for features in ([], [dark]):
        page.command("Emulation.setEmulatedMedia", features=features)
        try:
            assert violations() == []
            page.click(".turn.user .edit")
            assert violations() == []
            page.type(ESCAPE)
            with phone(page):
                assert violations() == []
                for panel in ("chats", "machine"):
                    page.click(f"#show-{panel}")
                    assert violations() == []
                    page.click(f"#show-{panel}")
        finally:
            page.command("Emulation.setEmulatedMedia", features=[])
    page.run("document.querySelector('.files button').click()")
    says(page, "the sea and the wind " * 200)
    page.click("#say")
    page.type(f"Go{ENTER}")
    until(lambda: page.text(".turn.assistant:last-child .body"))
    assert violations() == []
    page.type(ESCAPE)
    until(lambda: ended(page))


def test_nothing_moves_where_that_is_not_wanted(page: Browser, server: Server) -> None:
    says(page, "the sea and the wind " * 200)
    page.type(f"Go{ENTER}")
    until(lambda: page.text(".turn.assistant .body"))
    moving = (
        "return getComputedStyle(document.querySelector('.assistant .body > p:last-child'), '::after')"
        ".animationName"
    )
    assert page.run(moving) == "blink"
    page.command(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}]
    )
    try:
        assert page.run(moving) == "none"
    finally:
        page.command("Emulation.setEmulatedMedia", features=[])
    page.type(ESCAPE)
    until(lambda: ended(page))


def test_an_answer_does_not_pull_down_who_reads_above(page: Browser, server: Server) -> None:
    says(page, "the sea\n\n" * 150)
    page.type(f"Go{ENTER}")
    place = (
        "const all = document.getElementById('thread');"
        "return [all.scrollTop, all.scrollHeight - all.clientHeight]"
    )
    until(lambda: page.run(place)[1] > 600)
    begin = monotonic()
    until(lambda: (now := page.run(place))[1] - now[0] < 40)
    assert monotonic() - begin < LONG
    page.run("document.getElementById('thread').scrollTop = 100")
    until(lambda: page.count("#to-end") == 1)
    height = page.run(place)[1]
    until(lambda: page.run(place)[1] > height)
    assert page.run(place)[0] == 100
    page.click("#to-end")
    until(lambda: (now := page.run(place))[1] - now[0] < 40)
    page.type(ESCAPE)
    until(lambda: ended(page))
