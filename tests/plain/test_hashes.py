"""What is installed has a hash in hashes.txt: the files agree, nothing goes round the check, and what is not
as listed is refused."""

import base64
import hashlib
import http.server
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import hashes  # noqa: E402
import install  # noqa: E402
from hashes import HashesError, Release  # noqa: E402

ONE, TWO = "1" * 64, "2" * 64
PIP = importlib.metadata.version("pip")
needs_new_pip = pytest.mark.skipif(
    tuple(map(int, PIP.split(".")[:2])) < (26, 1),
    reason=f"needs pip 26.1, which `make setup` installs; this is {PIP}",
)


# -- the files
# ------------------------------------------------------------------------------------------------------------


def test_every_version_has_its_hashes() -> None:
    pins, releases = hashes.read_pins(), hashes.read_hashes()
    assert list(hashes.differences(pins, releases)) == []
    assert hashes.written(releases) == hashes.HASHES.read_text(), "hashes.txt is not as its tool writes it"


def test_whatever_the_project_asks_for_is_pinned() -> None:
    asked = [
        re.split(r"[^\w.-]", one)[0].lower() for one in install.needs(["dev", "ray", "schema-tests", "fuzz"])
    ]
    assert set(asked) <= set(hashes.read_pins())
    assert {"torch", "hatchling", "editables", "pytest", "starlette", "ray", "atheris"} <= set(asked)


def test_an_extra_brings_those_that_it_names() -> None:
    assert (
        set(install.needs(["serve"])) - set(install.needs([]))
        < set(install.needs(["ray"]))
        < set(install.needs(["ray", "dev"]))
    )
    assert not [one for one in install.needs(["dev"]) if "penstock" in one]
    with pytest.raises(HashesError, match="there are all, dev, fuzz, grammar"):
        install.needs(["nothing"])


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"a": "1", "b": "2"}, []),
        ({"a": "1", "b": "3"}, ["b: 3 in constraints.txt, 2 in hashes.txt"]),
        ({"a": "1"}, ["b: nothing in constraints.txt, 2 in hashes.txt"]),
        ({"a": "1", "b": "2", "c": "4"}, ["c: 4 in constraints.txt, nothing in hashes.txt"]),
    ],
)
def test_differences_are_told(pins: dict[str, str], said: list[str]) -> None:
    releases = {"a": Release("1", frozenset([ONE]), {}), "b": Release("2", frozenset([ONE]), {})}
    assert list(hashes.differences(pins, releases)) == said


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a==1",
        "a>=1 --hash=sha256:" + ONE,
        "a==1 --hash=sha256:12",
        "a==1 --hash=md5:" + ONE[:32],
        "A==1",
    ],
)
def test_an_entry_without_a_whole_sha256_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "hashes.txt").write_text(f"b==1 --hash=sha256:{ONE}\n{line}\n")
    with pytest.raises(HashesError, match=r"hashes\.txt has an entry that is none"):
        hashes.read_hashes(tmp_path / "hashes.txt")


@pytest.mark.parametrize("text", ["a>=1", "a", "a==1.*", "a==1 --hash=sha256:" + ONE, "A_b==1", "a==1\na==1"])
def test_a_constraint_that_names_no_exact_version_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text(text)
    with pytest.raises(HashesError, match=r"constraints\.txt (has the line|names a twice)"):
        hashes.read_pins(tmp_path / "constraints.txt")


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    more = {"b-2+cpu-cp311-cp311-linux.whl": TWO, "b-2+cpu-cp312-cp312-linux.whl": ONE}
    releases = {"a": Release("1", frozenset([ONE]), {}), "b": Release("2", frozenset([ONE, TWO]), more)}
    (tmp_path / "hashes.txt").write_text(hashes.written(releases))
    assert hashes.read_hashes(tmp_path / "hashes.txt") == releases


def test_of_a_release_all_wheels_are_listed_and_nothing_else() -> None:
    names = [
        "a_b-1-py3-none-any.whl",
        "A.b-1-cp311-cp311-linux.whl",
        "a_b-1.tar.gz",
        "a_b-1.0-py3-none-any.whl",
        "a-1-py3-none-any.whl",
    ]
    files = [{"filename": name, "hashes": {"sha256": str(number) * 64}} for number, name in enumerate(names)]
    assert hashes.wheels_of({"files": files}, "a-b", "1") == ["0" * 64, "1" * 64]
    with pytest.raises(HashesError, match="no wheel of a-b==2"):
        hashes.wheels_of({"files": files}, "a-b", "2")
    files[0]["hashes"] = {"md5": "0"}
    with pytest.raises(HashesError, match="a wheel without a sha256 of a-b==1"):
        hashes.wheels_of({"files": files}, "a-b", "1")


# -- nothing goes round the check
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile", "tools/test_tools.sh", ".ci/run"])
def test_only_the_check_calls_pip(file: str) -> None:
    around = re.compile(
        r"-m pip\b|\bpip3? (install|wheel|download)\b|\bnpm (i|install|add)\b|\buv (pip|sync|add)\b"
    )
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if around.search(line)] == []


def test_make_installs_by_the_check_alone() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"^INSTALL := (.*)$", text, re.MULTILINE) == [
        "$(BIN)/python tools/install.py --editable"
    ]
    stamps = dict(
        re.findall(r"^\$\((RUNTIME|DEV|ALL)\): (?:.*\n)(?:\t.*\n)*?\t(\$\(INSTALL\).*)\n", text, re.MULTILINE)
    )
    assert stamps == {
        "RUNTIME": "$(INSTALL) serve grammar",
        "DEV": "$(INSTALL) dev",
        "ALL": "$(INSTALL) dev ray schema-tests",
    }
    assert {"constraints.txt", "hashes.txt", "pyproject.toml"} == set(
        re.findall(r"^PINNED := (.*)$", text, re.MULTILINE)[0].split()
    )


def test_after_make_demo_the_server_and_structures_have_what_they_ask_for() -> None:
    """Every extra that README names beside a plain `pip install` is there, but for Ray, which is large."""
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"penstock\[(\w+)\]", text))
    stamp = re.search(
        r"^\$\(RUNTIME\):.*\n(?:\t.*\n)*?\t\$\(INSTALL\)(.*)\n", (ROOT / "Makefile").read_text(), re.M
    )
    assert stamp is not None
    assert named - {"ray"} == {"serve", "grammar"} <= set(stamp[1].split())


def test_packages_for_node_have_exact_versions_and_hashes() -> None:
    folder = ROOT / "tools" / "ai-sdk"
    asked = json.loads((folder / "package.json").read_text())["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert locked.pop("")["dependencies"] == asked
    assert all(re.fullmatch(r"[\d.]+", version) for version in asked.values())
    assert all(re.fullmatch(r"sha512-[\w+/]{86}==", package["integrity"]) for package in locked.values())
    assert not [package for package in locked.values() if "resolved" in package]
    assert {f"node_modules/{name}" for name in asked} <= set(locked)


# -- what is not as listed is refused
# ------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, requires: str = "", text: str = "") -> Path:
    """A wheel with one module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    files = {
        f"{name}.py": text,
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{file},sha256={_digest(content.encode())},{len(content)}" for file, content in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(f"{about}/RECORD", "\n".join([*rows, f"{about}/RECORD,,"]) + "\n")
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Project:
    """A project that needs torch and `tiny`, which needs `other`; its tools are ours, `files` is where pip
    finds everything."""

    folder: Path
    files: Path
    python: Path

    def run(self, tool: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
        }
        environment |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.files),
        } | variables
        command = [str(self.python), str(self.folder / "tools" / tool), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=100
        )

    @property
    def installed(self) -> set[str]:
        [site] = self.python.parents[1].glob("lib/python3*/site-packages")
        return {path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info")}

    def list(self, pip: str = PIP, without: str = "") -> None:
        """constraints.txt and hashes.txt for what lies in `files` now."""
        releases = {"pip": Release(pip, frozenset([ONE]), {})}
        for path in self.files.glob("*.whl"):
            name, version = path.name.split("-")[:2]
            releases[name] = Release(version.partition("+")[0], frozenset([sha256(path)]), {})
        releases.pop(without, None)
        (self.folder / "constraints.txt").write_text(
            "".join(f"{name}=={one.version}\n" for name, one in releases.items())
        )
        (self.folder / "hashes.txt").write_text(hashes.written(releases))


PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1"
dependencies = ["torch", "tiny>=0.5"]
"""
BACKEND = """
import shutil
def build_editable(directory, *_):
    import editables  # was installed before, and nothing else is there to build with
    shutil.copy("project.whl", directory + "/project-1-py3-none-any.whl")
    return "project-1-py3-none-any.whl"
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Its environment sees the pip of this one, and nothing else of it."""
    made = Project(tmp_path / "project", tmp_path / "files", tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [site] = (tmp_path / "venv").glob("lib/python3*/site-packages")
    there = importlib.metadata.distribution("pip")
    (tmp_path / "pip").mkdir()
    for part in ("pip", f"pip-{PIP}.dist-info"):
        (tmp_path / "pip" / part).symlink_to(Path(str(there.locate_file(part))))
    (site / "pip.pth").write_text(f"{tmp_path / 'pip'}\n")
    made.files.mkdir()
    for path in ("tools/hashes.py", "tools/install.py"):
        (made.folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, made.folder / path)
    (made.folder / "pyproject.toml").write_text(PYPROJECT)
    (made.folder / "backend.py").write_text(BACKEND)
    wheel(made.folder, "project", "1").rename(made.folder / "project.whl")
    for name, requires in (("tiny", "other>=0.1"), ("other", ""), ("editables", "")):
        wheel(made.files, name, "1", requires)
    wheel(made.files, "torch", "1+cpu")
    made.list()
    return made


@needs_new_pip
def test_what_is_as_listed_is_installed(project: Project) -> None:
    """With what others pull in, the build of torch that lies at hand, and the project itself."""
    done = project.run("install.py", "--editable")
    assert done.returncode == 0, done.stderr
    assert project.installed == {"torch-1+cpu", "tiny-1", "other-1", "editables-1", "project-1"}


def change(name: str) -> Callable[[Project], None]:
    def changed(project: Project) -> None:
        [path] = project.files.glob(f"{name}-*.whl")
        wheel(
            project.files,
            *path.name.split("-")[:2],
            "other>=0.1" if name == "tiny" else "",
            text="import os  # one line more\n",
        )

    return changed


def flip_a_bit(project: Project) -> None:
    [path] = project.files.glob("other-*.whl")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def leave_out(project: Project) -> None:
    project.list(without="other")


def offer_a_source(project: Project) -> None:
    [path] = project.files.glob("other-*.whl")
    path.unlink()
    (project.files / "other-1.tar.gz").write_bytes(b"")


REFUSALS = {
    "asked for": (change("tiny"), "DO NOT MATCH"),
    "at hand": (change("torch"), "DO NOT MATCH"),
    "a bit of what is pulled in": (flip_a_bit, "DO NOT MATCH"),
    "not listed": (leave_out, "pinned with =="),
    "no wheel": (offer_a_source, "ResolutionImpossible"),
}


@needs_new_pip
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_as_listed_is_refused_before_anything_is_installed(project: Project, case: str) -> None:
    spoil, said = REFUSALS[case]
    spoil(project)
    done = project.run("install.py", "--editable")
    assert done.returncode == 1
    assert said in done.stderr
    assert "tools/hashes.py --update" in done.stderr
    assert project.installed == (set() if case == "at hand" else {"torch-1+cpu"})


def test_pip_itself_is_held_against_its_hash(project: Project) -> None:
    """By any pip, since the one that is there first may be an old one."""
    path = wheel(project.files, "pip", "99")
    project.list(pip="99")  # With another hash than the file's.
    releases = hashes.read_hashes(project.folder / "hashes.txt")
    (project.folder / "hashes.txt").write_text(
        hashes.written(releases | {"pip": Release("99", frozenset([ONE]), {})})
    )
    done = project.run("install.py", "--without-project")
    assert done.returncode == 1
    assert re.search(f"DO NOT MATCH.*Expected sha256 {ONE}.*Got +{sha256(path)}", done.stderr, re.DOTALL), (
        done.stderr
    )
    assert project.installed == set()


def test_nothing_is_installed_while_the_files_disagree(project: Project) -> None:
    (project.folder / "constraints.txt").write_text(
        (project.folder / "constraints.txt").read_text().replace("tiny==1", "tiny==2")
    )
    for tool, arguments in (("hashes.py", []), ("install.py", ["--editable"])):
        done = project.run(tool, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            "tiny: 2 in constraints.txt, 1 in hashes.txt\nafter a change of constraints.txt call: "
            in done.stderr
        )


# -- a list that is written anew
# -----------------------------------------------------------------------------------------------


class _Index(http.server.BaseHTTPRequestHandler):
    """Knows every wheel of `project.files` but torch's local build, and an older release of each."""

    files: Path

    def do_GET(self) -> None:
        name = self.path.strip("/").split("/")[-1]
        assert self.headers["Accept"] == "application/vnd.pypi.simple.v1+json"
        there = [
            {"filename": path.name, "hashes": {"sha256": sha256(path)}}
            for path in self.files.glob(f"{name}-*.whl")
            if "+" not in path.name
        ]
        there += [
            {"filename": f"{name}-{version}-py3-none-any.whl", "hashes": {"sha256": TWO}}
            for version in ("0.9", PIP)
        ]
        there += (
            [{"filename": "torch-1-py3-none-any.whl", "hashes": {"sha256": TWO}}] if name == "torch" else []
        )
        body = json.dumps({"files": there}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(project: Project) -> Iterator[str]:
    handler = type("Index", (_Index,), {"files": project.files})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


def test_the_list_is_written_anew_from_the_index_that_pip_is_set_to(project: Project, index: str) -> None:
    listed, (build,) = project.folder / "hashes.txt", project.files.glob("torch-*")
    (project.folder / "constraints.txt").write_text(f"tiny==0.9\nother==1\ntorch==1\npip=={PIP}\n")
    done = project.run("hashes.py", "--update", str(build), PIP_INDEX_URL=index)
    assert done.returncode == 0, done.stderr
    [other] = project.files.glob("other-*")
    assert hashes.read_hashes(listed) == {
        "tiny": Release("0.9", frozenset([TWO]), {}),
        "other": Release("1", frozenset([sha256(other)]), {}),
        "torch": Release("1", frozenset([TWO, sha256(build)]), {build.name: sha256(build)}),
        "pip": Release(PIP, frozenset([TWO]), {}),
    }
    assert "tiny: 1 -> 0.9, 1 hashes" in done.stdout
    assert f"pip {PIP}: 1 hashes are gone though the version is the same" in done.stdout
    # A build that the index does not have stays as long as its release does.
    before = listed.read_text()
    assert project.run("hashes.py", "--update", PIP_INDEX_URL=index).stdout == ""
    assert listed.read_text() == before
    (project.folder / "constraints.txt").write_text("torch==0.9\n")
    assert project.run("hashes.py", "--update", PIP_INDEX_URL=index).returncode == 0
    assert hashes.read_hashes(listed) == {"torch": Release("0.9", frozenset([TWO]), {})}
    refused = project.run("hashes.py", "--update", str(build), PIP_INDEX_URL=index)
    assert (refused.returncode, "is of torch 1, of which constraints.txt has 0.9" in refused.stderr) == (
        1,
        True,
    )


def test_an_index_that_does_not_answer_changes_nothing(project: Project, index: str) -> None:
    before = (project.folder / "hashes.txt").read_text()
    (project.folder / "constraints.txt").write_text("other==3\n")
    for url, said in (
        (index, "the index has no wheel of other==3"),
        ("http://127.0.0.1:1/simple", "does not answer with JSON"),
    ):
        done = project.run("hashes.py", "--update", PIP_INDEX_URL=url)
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert (project.folder / "hashes.txt").read_text() == before
