"""What the page has of others is as they have published it, and their licences come with it."""

import json
import re
import tomllib
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENDOR = ROOT / "src/penstock/server/http/page/vendor"
VERSIONS = json.loads((VENDOR / "versions.json").read_text())


def test_each_file_is_listed_and_has_its_hash() -> None:
    listed = {one["file"]: one["sha256"] for one in VERSIONS}
    there = {path.name: sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    assert {name: there[name] for name in there if name not in ("versions.json", "LICENSES.txt")} == listed
    for one in VERSIONS:
        assert one["version"] in (VENDOR / one["file"]).read_text()[:200]
        assert re.fullmatch(r"sha512-[\w+/]{86}==", one["integrity"])


def test_each_has_its_licence_in_the_package_and_in_the_notice() -> None:
    licences = re.findall(r"^==== (\S+) (\S+)$", (VENDOR / "LICENSES.txt").read_text(), re.MULTILINE)
    notice = (ROOT / "NOTICE").read_text()
    for one in VERSIONS:
        used = {one["package"]: one["version"], **one["bundles"]}
        assert dict(licences) == used
        assert all(f"{name} {version}" in notice for name, version in used.items())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE", f"{VENDOR.relative_to(ROOT)}/LICENSES.txt"]
    assert project["license"] == "Apache-2.0 AND MIT AND BSD-2-Clause"
