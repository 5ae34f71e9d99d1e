"""The server's page: its files, the state that it shows, and both in a browser, where there is one."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import forks
import tiny
from browsers import ENTER, ESCAPE, LONG, SHIFT, TAB, Browser, browsing, until
from penstock.base.config import SHIPPED_MODEL

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

FLAGS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--max-sequences", "2", "--queue", "8")
KEY = "a key of this server"
SCRIPTS = (
    *("answers", "attach", "bars", "chats", "dom", "experts", "list", "machine", "markdown", "numbers"),
    *("page", "server", "settings", "thread"),
)
VENDORED = "/page/vendor/markdown-it.esm.min.mjs"
FILES = {
    "/": "text/html; charset=utf-8",
    "/page/page.css": "text/css; charset=utf-8",
    "/page/machine.css": "text/css; charset=utf-8",
    "/page/icon.svg": "image/svg+xml",
    **{f"/page/{name}.js": "text/javascript; charset=utf-8" for name in SCRIPTS},
    VENDORED: "text/javascript; charset=utf-8",
    "/page/vendor/LICENSES.txt": "text/plain; charset=utf-8",
}
SECRET = "the heron that nobody else may read of"
ENDLESS = {"model": "shipped", "prompt": SECRET, "max_tokens": 6000, "ignore_eos": True, "stream": True}
Answer = tuple[int, Mapping[str, str], bytes]


class Server:
    """The command."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=LONG)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = self.connection()
        try:
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(
                method, path, None if body is None else json.dumps(body).encode(), kind | dict(headers or {})
            )
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def state(self, **headers: str) -> Any:
        status, _, said = self.ask("GET", "/state", headers=headers)
        assert status == 200, said
        return json.loads(said)

    @contextmanager
    def load(self, *bodies: Mapping[str, Any], key: str = "") -> Iterator[None]:
        """Requests under way that nobody reads."""
        with ExitStack() as opened:
            for body in bodies:
                connection = self.connection()
                opened.callback(connection.close)
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"}
                    | ({"Authorization": f"Bearer {key}"} if key else {}),
                )
            yield


@contextmanager
def serving(folder: Path, *flags: str, key: str = "") -> Iterator[Server]:
    log = folder / "said.txt"
    with log.open("wb") as file:
        process = forks.LoadedPopen(
            [sys.executable, "-m", "penstock", "serve", *FLAGS, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_API_KEYS": key},
        )
    try:
        found = until(
            lambda: (
                re.search(r"^serving \S+ at (http\S+)\n", log.read_text(), re.MULTILINE)
                or process.poll() is not None
            ),
            3 * LONG,
        )
        assert process.poll() is None, log.read_text()
        yield Server(found[1], log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0
        assert "Traceback" not in log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With contexts in host memory and blocks kept on disk, so that there is something on every tier; and a
    key."""
    folder = tmp_path_factory.mktemp("page")
    beside = (
        "--device-memory",
        "200MiB",
        "--host-kv-memory",
        "80MiB",
        "--disk-kv-memory",
        "300MiB",
        "--kv-directory",
        str(folder / "kv"),
    )
    with serving(folder, *beside, "--max-length", "8192", "--max-step-tokens", "128", key=KEY) as server:
        yield server


# ---- files


@pytest.mark.parametrize("path", ["/", "/page/page.css", "/page/page.js", "/page/icon.svg", VENDORED])
def test_a_file_comes_with_its_type_and_is_strict_about_where_from(server: Server, path: str) -> None:
    status, headers, said = server.ask("GET", path)
    assert (status, headers["content-type"]) == (200, FILES[path])
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in headers["content-security-policy"]
    # Where a browser knows it, not even the page's own scripts can make markup of text.
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-cache")
    again, kept, nothing = server.ask("GET", path, headers={"If-None-Match": f'"other", W/{headers["etag"]}'})
    assert (again, nothing, kept["etag"]) == (304, b"", headers["etag"])
    assert kept["content-security-policy"] == headers["content-security-policy"]
    assert server.ask("GET", path, headers={"If-None-Match": '"other"'})[2] == said
    assert server.ask("POST", path, {})[0] == 405


def test_the_form_takes_the_temperatures_that_the_server_takes() -> None:
    from penstock.server.http.page import FILES as served
    from penstock.step.params import MOST_TEMPERATURE

    field = f'<input id="temperature" type="number" min="0" max="{MOST_TEMPERATURE}"'
    assert field.encode() in served["/"].content


def test_all_files_are_known_and_short_enough_to_be_read() -> None:
    from penstock.server.http.page import FILES as served

    assert {path: file.kind for path, file in served.items()} == FILES
    for path, file in served.items():
        assert "/vendor/" in path or file.content.count(b"\n") <= 450, path


def test_no_file_asks_anything_of_another_server_or_makes_markup_of_text(server: Server) -> None:
    for path in FILES:
        text = server.ask("GET", path)[2].decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        if "/vendor/" not in path:
            assert not re.findall(r"(?:https?:|wss?:|[\"'(])//", text), path
        assert not re.findall(
            r"@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\sstyle=|"
            r"\son\w+=",
            text,
        ), path
        for referred in re.findall(r'^import .*"(\..*)";$', text, re.MULTILINE):
            assert f"/page/{referred.removeprefix('./')}" in FILES
    for referred in re.findall(r'(?:href|src)="([^"#]+)"', server.ask("GET", "/")[2].decode()):
        assert referred in FILES


def test_beside_the_files_there_is_nothing_to_be_had(server: Server) -> None:
    for path in ("/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/page//etc/passwd", "/page/page.py"):
        assert server.ask("GET", path)[0] == 404


# ---- state


def test_the_state_needs_a_key_where_there_are_keys_and_the_files_do_not(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        status, _, said = server.ask("GET", "/state", headers=headers)
        assert (status, json.loads(said)["error"]["code"]) == (401, "invalid_api_key")
    status, headers, _ = server.ask("GET", "/state", headers={"Authorization": f"Bearer {KEY}"})
    assert (status, headers["content-type"], headers["cache-control"]) == (
        200,
        "application/json",
        "no-store",
    )


def told(server: Server) -> Any:
    return server.state(Authorization=f"Bearer {KEY}")


def counted(server: Server, name: str, **labels: str) -> float:
    """By /metrics, which has it from the engine's own counts."""
    said = server.ask("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})[2].decode()
    shown = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
    found = re.search(rf"^penstock:{re.escape(name + shown)} (\S+)$", said, re.MULTILINE)
    assert found is not None, f"{name} in {said}"
    return float(found[1])


def parts_of(state: Any, tier: str) -> dict[str, int]:
    [found] = [one for one in state["tiers"] if one["tier"] == tier]
    return {part["what"]: part["bytes"] for part in found["parts"]}


def test_the_numbers_add_up_and_are_those_of_the_engine(server: Server) -> None:
    words = " ".join(f"word{number}" for number in range(300))
    for _ in range(2):
        body = {"model": "shipped", "prompt": f"{SECRET} {words}", "max_tokens": 4, "temperature": 0}
        status, _, said = server.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
        assert status == 200, said
    usage = json.loads(said)["usage"]
    until(lambda: told(server)["running"] == 0)
    state = told(server)
    assert [tier["tier"] for tier in state["tiers"]] == ["device", "host", "disk"]
    for tier in state["tiers"]:
        assert tier["bytes"] == sum(part["bytes"] for part in tier["parts"]), tier
        assert all(part["bytes"] >= 0 for part in tier["parts"]), tier
    device, host, disk = (parts_of(state, tier) for tier in ("device", "host", "disk"))
    assert sum(device.values()) <= 200 << 20
    assert (device["weights"], host.get("weights", 0), disk.get("weights", 0)) == tuple(
        counted(server, "weights_bytes", tier=tier) for tier in ("device", "host", "disk")
    )
    assert device["kept"] > 0
    assert device["kv"] == counted(server, "far_kv_bytes", tier="disk") == 0
    assert device["kept"] % counted(server, "kv_blocks_cached") == 0
    assert state["output_tokens"] == counted(server, "generation_tokens_total")
    assert state["cache"]["device"] == counted(server, "prefix_cache_hits_total", tier="device")
    assert state["cache"]["device"] >= usage["prompt_tokens_details"]["cached_tokens"] > 0
    found = sum(state["cache"].values())
    assert found == counted(server, "prompt_tokens_total")
    assert state["plan"]["device"] == device["weights"]


def test_requests_under_way_are_told_and_nothing_of_what_they_say(server: Server) -> None:
    with server.load(*[ENDLESS] * 3, key=KEY):
        state = until(
            lambda: (
                (one := told(server))["running"] == 2
                and one["waiting"] == 1
                and one["output_rate"] > 0
                and one
            )
        )
        assert counted(server, "num_requests_running") == 2
        assert parts_of(state, "device")["kv"] > 0
        said = json.dumps(state)
        assert "heron" not in said
        assert "/" not in said.replace(" tokens/s", "")
    until(
        lambda: (
            (state := told(server))["running"] + state["waiting"] == 0
            and parts_of(state, "device")["kv"] == 0
        )
    )


def test_a_prompt_is_followed_until_it_is_computed(server: Server) -> None:
    length, steps = 6000, []
    body = {
        "model": "shipped",
        "prompt": [7 + at % 900 for at in range(length)],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with server.load(body, key=KEY):

        def over() -> bool:
            state = told(server)
            if state["prompt"] is not None:
                steps.append(state["prompt"])
            return bool(steps) and state["prompt"] is None

        until(over, 2 * LONG)
    assert {step["length"] for step in steps} == {length}
    reached = [step["reached"] for step in steps]
    assert reached == sorted(reached)
    assert len(set(reached)) > 3
    timed = [step for step in steps if step["left"] is not None]
    assert timed
    assert all(0 <= step["left"] <= length / step["rate"] for step in timed)


def test_a_model_without_experts_that_move_shows_none(server: Server) -> None:
    status, headers, said = server.ask("GET", "/experts", headers={"Authorization": f"Bearer {KEY}"})
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert json.loads(said) == {"layers": [], "age": 0}
    assert told(server)["experts"] is None
    assert server.ask("GET", "/experts")[0] == 401


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that drafts by look-up."""
    with serving(tmp_path_factory.mktemp("drafting"), "--speculate", "suffix") as server:
        yield server


def repeat(server: Server) -> Mapping[str, Any]:
    """Let the model say one word again and again, and return what the answer counts."""
    body = {"model": "shipped", "prompt": "Again", "max_tokens": 100, "temperature": 0}
    status, _, said = server.ask("POST", "/v1/completions", body | {"logit_bias": {"300": 100}})
    assert status == 200, said
    usage: Mapping[str, Any] = json.loads(said)["usage"]
    return usage


def test_drafts_are_counted_where_something_drafts(drafting: Server, server: Server) -> None:
    """As each answer and /metrics count them; from nothing on."""
    empty = {"drafted": 0, "accepted": 0, "tokens": 0, "passes": 0, "tokens_a_pass": 0, "drafter": "suffix"}
    assert drafting.state()["speculation"] == empty
    drafted = accepted = tokens = 0
    for _ in range(2):
        usage = repeat(drafting)
        details = usage["completion_tokens_details"]
        accepted += details["accepted_prediction_tokens"]
        drafted += details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        tokens += usage["completion_tokens"]
    found = until(lambda: (state := drafting.state())["running"] == 0 and state["speculation"])
    assert accepted > 0
    assert (found["drafted"], found["accepted"], found["tokens"]) == (drafted, accepted, tokens)
    assert found["drafted"] == counted(drafting, "spec_decode_num_draft_tokens_total")
    assert found["accepted"] == counted(drafting, "spec_decode_num_accepted_tokens_total")
    assert found["passes"] == tokens - accepted
    assert found["tokens_a_pass"] == pytest.approx(tokens / (tokens - accepted))
    assert found["tokens_a_pass"] > 1
    assert told(server)["speculation"] is None


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A mixture of 32 experts, of which some stay on the device and others on disk."""
    folder = tmp_path_factory.mktemp("mixture")
    words = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    more = {"num_experts": 8, "num_hidden_layers": 4, "moe_intermediate_size": 1024, "vocab_size": len(words)}
    model = tiny.write(tiny.CASES["qwen3_moe"], folder / "model", **more)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED_MODEL / name, model / name)
    memory = ("--device-memory", "44MiB", "--cache", str(folder))
    with serving(folder, str(model), *memory, "--max-length", "512", "--max-step-tokens", "64") as server:
        yield server


def whole(server: Server, **more: Any) -> Any:
    body = {"model": "model", "prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0, **more}
    status, _, said = server.ask("POST", "/v1/completions", body)
    assert status == 200, said
    return json.loads(said)


def test_experts_that_come_are_counted_by_where_they_were(mixture: Server) -> None:
    whole(mixture, max_tokens=40)
    until(lambda: mixture.state()["running"] == 0)
    said = mixture.ask("GET", "/metrics")[2].decode()

    def metric(name: str, label: str, value: str) -> float:
        found = re.search(rf'^penstock:{name}\{{{label}="{value}"\}} (\S+)$', said, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    state = mixture.state()["experts"]
    for tier in ("device", "host", "disk"):
        assert state[tier] == metric("experts_found_total", "tier", tier)
    assert min(state["device"], state["disk"]) > 0
    assert state["device"] == metric("experts_asked_total", "found", "hit")
    assert state["host"] + state["disk"] == metric("experts_asked_total", "found", "miss")
    # Each of 40 passes asks each of four layers for at least the experts that one token takes.
    assert state["device"] + state["host"] + state["disk"] >= 40 * 4 * 2
    assert state["copied"] - state["read"] == metric("experts_fetched_bytes_total", "tier", "host")
    assert state["read"] == metric("experts_fetched_bytes_total", "tier", "disk") > 0
    assert state["read"] % state["disk"] == 0
    assert state["copied"] == (state["host"] + state["disk"]) * (state["read"] // state["disk"])
    assert 0 <= state["recent_hit"] <= state["recent_asked"]
    shown = json.loads(mixture.ask("GET", "/experts")[2])
    assert [layer["layer"] for layer in shown["layers"]] == [0, 1, 2, 3]
    for layer in shown["layers"]:
        assert len(layer["asked"]) == len(layer["where"]) == 8
        # Tokens of this model take two experts each.
        assert 2000 <= sum(layer["asked"]) <= 3000
    places = "".join(layer["where"] for layer in shown["layers"])
    assert {"D", "S"} <= set(places) <= {"D", "H", "S"}


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The page, with its key, as somebody sees it who has never been there; whatever a test does, the console
    stays silent."""
    browser.open(f"{server.url}/page/icon.svg")
    browser.run("localStorage.clear(); sessionStorage.setItem('penstock.key', arguments[0])", KEY)
    browser.complaints()
    browser.open(server.url)
    until(lambda: browser.text("#model") == "shipped")
    yield browser
    # For the picture that was opened first the browser looks for an icon, which the page names itself.
    assert [one for one in browser.complaints() if "/favicon.ico" not in one] == []


def set_field(page: Browser, name: str, value: str) -> None:
    page.run(
        "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
        "field.dispatchEvent(new Event('input', { bubbles: true }))",
        name,
        value,
    )


def finished(page: Browser) -> bool:
    return page.count("#stop") == 0 and page.count(".turn.assistant .again") > 0


def test_a_message_is_answered_as_the_server_answers_it_and_kept(page: Browser, server: Server) -> None:
    for name, value in {"temperature": "0", "max_tokens": "12", "seed": "3", "system": "Be brief."}.items():
        set_field(page, name, value)
    page.type(f"A boat{SHIFT}{ENTER}at sea.{ENTER}")
    until(lambda: finished(page))
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A boat\nat sea."}]
    asked = {"model": "shipped", "messages": talk, "temperature": 0, "max_tokens": 12}
    said = json.loads(
        server.ask("POST", "/v1/chat/completions", asked, {"Authorization": f"Bearer {KEY}"})[2]
    )
    kept = page.run(
        "return JSON.parse(localStorage.getItem(Object.keys(localStorage).find((key) => "
        "key.startsWith('penstock.chat.'))))"
    )
    assert [turn["content"] for turn in kept["turns"]] == [
        "A boat\nat sea.",
        said["choices"][0]["message"]["content"],
    ]
    assert page.text(".turn.user .body") == "A boat\nat sea."
    assert said["choices"][0]["message"]["content"].split()[-1] in page.text(".turn.assistant .body")
    assert "12 tokens" in page.text(".turn.assistant .under")
    first = page.text(".turn.assistant .body")
    page.click(".turn.assistant .again")
    until(lambda: finished(page))
    assert page.text(".turn.assistant .body") == first
    assert (page.count(".turn"), page.text(".turn.assistant .branches span")) == (2, "2/2")
    page.click("#new")
    assert page.count(".turn") == 0
    page.type(f"Another one{ENTER}")
    until(lambda: finished(page))
    page.open(server.url)
    assert until(lambda: page.count("#list .open")) == 2
    assert page.text("#list li:nth-child(1)").startswith("Another one")
    page.click("#list li:nth-child(2) .open")
    assert page.text(".turn.assistant .body") == first
    assert page.run("return document.getElementById('seed').value") == "3"
    page.click("#list li:nth-child(2) .delete")
    page.accept()
    assert page.count("#list .open") == 1
    assert (
        page.run("return Object.keys(localStorage).filter((key) => key.startsWith('penstock.chat.')).length")
        == 1
    )


def test_the_machine_is_shown_where_a_tier_has_nothing(browser: Browser, tmp_path: Path) -> None:
    """As it is without any flag: no disk is used."""
    with serving(tmp_path) as plain:
        browser.complaints()
        browser.open(plain.url)
        until(lambda: browser.count("#gauges") == 1)
        assert (
            browser.run("return [...document.querySelectorAll('.tier .of')].map((one) => one.innerText)")[2]
            == "not used"
        )
        assert browser.count(".tier .bar") == 2
        assert browser.text("#state").startswith("llama, 8 layers")
        with plain.load(ENDLESS):
            until(lambda: browser.text("#running") == "1")
        assert browser.complaints() == []
    until(lambda: browser.text("#state") == "The server cannot be reached.")
    assert browser.count("#gauges") == 0
    browser.complaints()


def test_drafts_are_shown_where_something_drafts(browser: Browser, drafting: Server, mixture: Server) -> None:
    browser.complaints()
    browser.open(drafting.url)
    until(lambda: browser.count("#drafts") == 1)
    repeat(drafting)
    found = until(lambda: (state := drafting.state())["running"] == 0 and state["speculation"])
    until(lambda: browser.text("#drafts dd").replace(",", "") == str(found["drafted"]))
    assert "tokens to each output" in browser.text("#drafts")
    browser.open(mixture.url)
    until(lambda: browser.count("#gauges") == 1)
    assert browser.count("#drafts") == 0
    assert browser.complaints() == []


def test_experts_are_shown_as_a_map_and_as_a_table(browser: Browser, mixture: Server) -> None:
    browser.complaints()
    browser.open(mixture.url)
    whole(mixture, max_tokens=40)
    until(lambda: browser.count("#experts") == 1)
    shown = json.loads(mixture.ask("GET", "/experts")[2])
    numbers = [f"{mixture.state()['experts'][tier]:,}" for tier in ("device", "host", "disk")]
    until(lambda: [one for one in numbers if one in browser.text("#sources")] == numbers)
    assert "fetched per token" in browser.text("#expert-numbers")
    assert browser.count("#heat") == 0, "closed at first, and not asked for"
    browser.click("#map summary")
    until(lambda: browser.run("return document.getElementById('heat').width") == 8)
    assert browser.run("return document.getElementById('heat').height") == 4
    label = browser.run("return document.getElementById('heat').getAttribute('aria-label')")
    on_device = sum(layer["where"].count("D") for layer in shown["layers"])
    assert "4 layers of up to 8 experts" in label
    assert f"{on_device} on the device" in label
    # A pixel is as opaque as its expert is often asked for, in the colour of where it is.
    pixels = browser.run(
        "return [...document.getElementById('heat').getContext('2d').getImageData(0, 0, 8, 4).data]"
    )
    most = max(count for layer in shown["layers"] for count in layer["asked"])
    for row, layer in enumerate(shown["layers"]):
        for column, count in enumerate(layer["asked"]):
            alpha = pixels[4 * (8 * row + column) + 3] / 255
            faint = 0.3 if layer["where"][column] == "D" else 0.08
            assert alpha == pytest.approx(faint + (1 - faint) * (count / most) ** 0.5, abs=0.02)
    browser.run(
        "const box = document.getElementById('heat').getBoundingClientRect();"
        "document.getElementById('heat').dispatchEvent(new PointerEvent('pointermove', "
        "{ clientX: box.left + box.width * 3.5 / 8, clientY: box.top + box.height * 2.5 / 4 }))"
    )
    asked = shown["layers"][2]["asked"][3]
    assert browser.text("#heat-text").startswith(f"Layer 2, expert 3: asked for in {asked / 10:.1f}%")
    browser.run(
        "const layer = document.getElementById('layer'); layer.value = '2';"
        "layer.dispatchEvent(new Event('change'))"
    )
    assert browser.text("#layer-title").startswith("Layer 2:")
    rows = browser.run("return [...document.querySelectorAll('#layer-rows tr')].map((row) => row.innerText)")
    assert len(rows) == 8
    words = {"D": "on the device", "H": "in host memory", "S": "on disk"}
    expert = max(range(8), key=lambda one: shown["layers"][2]["asked"][one])
    assert rows[0].split("\t")[1:] == [
        f"{max(shown['layers'][2]['asked']) / 10:.1f}%",
        words[shown["layers"][2]["where"][expert]],
    ]
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []


def test_an_answer_is_seen_as_it_comes_and_escape_stops_it(page: Browser, server: Server) -> None:
    set_field(page, "max_tokens", "4000")
    set_field(page, "temperature", "6")
    set_field(page, "seed", "3")  # Drawn so, it goes on for 1,652 tokens.
    page.type(f"Once upon a time{ENTER}")
    begun = until(lambda: page.text(".turn.assistant .body"))
    until(lambda: len(page.text(".turn.assistant .body")) > len(begun) + 20)
    assert (page.count("#stop"), page.count("#send")) == (1, 0)
    assert page.run("return document.querySelector('.turn.assistant').ariaBusy") == "true"
    until(lambda: page.text("#running") == "1")
    page.type(ESCAPE)
    until(lambda: finished(page))
    assert page.text(".turn.assistant .note") == "Stopped."
    assert page.run("return document.activeElement.id") == "say"
    until(lambda: told(server)["running"] == 0)
    page.click(".turn.assistant .again")
    until(lambda: page.count("#stop") and page.text(".turn.assistant .body"))
    page.click("#stop")
    until(lambda: finished(page))
    assert page.count(".turn") == 2


def test_the_machine_shows_what_the_state_tells(page: Browser, server: Server) -> None:
    with server.load(*[ENDLESS] * 3, key=KEY):
        until(lambda: (page.text("#running"), page.text("#waiting")) == ("2", "1"))
        until(lambda: float(page.text("#rate").replace(",", "")) > 0)
        assert page.count(".tier") == 3
        assert page.text(".tier .of").startswith("1")
        widths = page.run(
            "return [...document.querySelectorAll('.tier .bar')].map((bar) => [bar.scrollWidth, "
            "bar.clientWidth])"
        )
        assert all(inner <= outer for inner, outer in widths)
        assert page.run("return document.documentElement.scrollHeight <= innerHeight")
    until(lambda: page.text("#running") == "0")


def test_a_wrong_key_is_asked_for_again_and_kept_for_the_tab_alone(page: Browser, server: Server) -> None:
    page.run("sessionStorage.clear()")
    until(lambda: page.count("#ask-key") == 1)
    page.type(f"wrong{ENTER}")
    until(lambda: page.count("#ask-key") == 1 and "not one of" in page.text("#key-text"))
    page.type(f"{KEY}{ENTER}")
    until(lambda: page.count("#gauges") == 1 and page.count("#ask-key") == 0)
    assert page.run("return sessionStorage.getItem('penstock.key')") == KEY
    assert KEY not in page.run("return JSON.stringify(localStorage)")
    assert any(
        "401" in complaint for complaint in page.complaints()
    )  # The browser's own word for it, and the only one.


def test_it_is_dark_where_that_is_preferred(page: Browser) -> None:
    def lightness() -> list[int]:
        colors = page.run(
            "const own = getComputedStyle(document.body); return [own.backgroundColor, own.color]"
        )
        return [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]

    ground, ink = lightness()
    assert ground > 600 > 300 > ink
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        ground, ink = lightness()
        assert ground < 150 < 500 < ink
    finally:
        page.command("Emulation.setEmulatedMedia", features=[])


def test_on_a_phone_there_is_one_column_and_the_machine_behind_a_button(page: Browser) -> None:
    page.command(
        "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True
    )
    try:
        assert (page.count(".thread"), page.count(".machine"), page.count(".chats")) == (1, 0, 0)
        page.click("#show-machine")
        assert (page.count(".thread"), page.count(".machine")) == (0, 1)
        assert page.run("return document.getElementById('show-machine').ariaExpanded") == "true"
        assert page.run("return document.documentElement.scrollWidth") == 390
        page.type(ESCAPE)
        assert (page.count(".thread"), page.count(".machine")) == (1, 0)
        page.click("#show-chats")
        assert page.count(".chats") == 1
        page.click("#new")
        assert (page.count(".thread"), page.run("return document.activeElement.id")) == (1, "say")
        assert page.run("return document.documentElement.scrollWidth") == 390
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")


def test_the_keyboard_reaches_everything_in_the_order_in_which_it_is_seen(page: Browser) -> None:
    page.run("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(12):
        page.type(TAB)
        reached.append(
            page.run(
                "return document.activeElement.id || document.activeElement.className || "
                "document.activeElement.textContent"
            )
        )
        seen = page.run(
            "const own = getComputedStyle(document.activeElement); return [own.outlineStyle, "
            "own.outlineWidth]"
        )
        assert seen[0] != "none", reached
    assert reached == [
        *("new", "import", "system", "temperature", "top_p", "max_tokens", "seed"),
        *("thread", "say", "attach", "send", "machine"),
    ]
