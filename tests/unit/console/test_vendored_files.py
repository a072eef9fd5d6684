"""Files of npm packages that the console serves are those of the lock: nothing else is there, nothing was changed."""

import base64
import hashlib
import json
from pathlib import Path

from pointsman_cli.console.pages import rendering as pages

VENDOR = Path(pages.__file__).parent / "static" / "vendor"
LOCK = json.loads((VENDOR / "lock.json").read_text())


def test_vendored_files_are_those_of_the_lock() -> None:
    locked = {name: file["sha512"] for package in LOCK for name, file in package["files"].items()}

    found = {
        file.name: hashlib.sha512(file.read_bytes()).hexdigest()
        for file in VENDOR.iterdir()
        if file.name != "lock.json"
    }
    assert found == locked


def test_each_package_is_locked_by_version_and_digest_and_has_its_licence() -> None:
    for package in LOCK:
        algorithm, _, digest = package["integrity"].partition("-")
        assert algorithm == "sha512"
        assert len(base64.b64decode(digest)) == 64
        assert package["version"].count(".") == 2
        assert [name for name in package["files"] if name.endswith("LICENSE.txt")]


def test_no_file_names_an_address_to_fetch_from() -> None:
    static = VENDOR.parent
    for file in (*static.glob("*.css"), *static.glob("*.js")):
        assert "http" not in file.read_text().replace("http-equiv", "")
