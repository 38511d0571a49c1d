"""Dependency lockfiles: an environment is rebuilt from the same files, or from those that the tool locks."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256, sha512
from pathlib import Path

import pytest
from tests.drivers.conftest import PackageIndex

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.drivers.environments.packages import faults_of, npm_indexes
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.paths import cache_folder


class Index(PackageIndex):
    """A package index with a `teapot` package that prints a given text."""

    def wheel(self, version: str, says: str) -> str:
        """Offer a version of a Python package, alone, and return its hash."""
        info, packed = f"teapot-{version}.dist-info", io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("teapot.py", f"SAYS = {says!r}\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: teapot\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        name, data = f"teapot-{version}-py3-none-any.whl", packed.getvalue()
        digest = sha256(data).hexdigest()
        self.files[f"/files/{name}"] = ("application/octet-stream", data)
        page = f'<a href="/files/{name}#sha256={digest}">{name}</a>'
        self.files["/simple/teapot/"] = ("text/html", page.encode())
        return digest

    def tarball(self, version: str, says: str) -> JsonObject:
        """Offer a version of a Node package, alone, and return what a lock says of it."""
        manifest, packed = {"name": "teapot", "version": version, "main": "index.js"}, io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path, text in {"package.json": json.dumps(manifest), "index.js": f"exports.says = '{says}'"}.items():
                entry = tarfile.TarInfo(f"package/{path}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        place, data = f"/teapot/-/teapot-{version}.tgz", packed.getvalue()
        whole = b64encode(sha512(data).digest()).decode()
        dist = {"tarball": f"{self.address}{place}", "integrity": f"sha512-{whole}"}
        offered = {
            "name": "teapot",
            "dist-tags": {"latest": version},
            "versions": {version: {**manifest, "dist": dist}},
        }
        self.files[place] = ("application/octet-stream", data)
        self.files["/teapot"] = ("application/json", json.dumps(offered).encode())
        return {"version": version, "resolved": dist["tarball"], "integrity": dist["integrity"]}


@pytest.fixture
def indexes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Index, Index]]:
    """The index of a company and the one of everybody, which is asked after it."""
    own, public = Index(), Index()
    with ExitStack() as keep:
        for index in (own, public):
            keep.enter_context(index.serving())
        for name in ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_INDEX_URL", "UV_INDEX_STRATEGY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("UV_INDEX", f"{own.address}/simple/")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{public.address}/simple/")
        monkeypatch.setenv("npm_config_registry", f"{own.address}/")
        yield own, public


def make_python_tool(project: Path, **files: str) -> None:
    folder = project / ".ai/tools/pour"
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(
        "tool_id: pour\ntool_type: script\nversion: 1.0.0\nexecutor: python_runtime\ndescription: Pours\n"
        "config: {entrypoint: main.py, requires: [teapot]}\n"
    )
    (folder / "main.py").write_text("import teapot\n\n\ndef main():\n    return teapot.SAYS\n")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_bytes(text.encode())


def make_node_tool(project: Path, lock: str = "") -> None:
    folder = project / ".ai/tools/pour"
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(
        "tool_id: pour\ntool_type: script\nversion: 1.0.0\nexecutor: node_runtime\ndescription: Pours\n"
        "config: {entrypoint: main.js, requires: [teapot@1.x]}\n"
    )
    (folder / "main.js").write_text("console.log(JSON.stringify(require('teapot').says));\n")
    if lock:
        (folder / "package-lock.json").write_text(lock)


def pour(project: Path) -> JsonObject:
    """Run the tool in a kernel of its own, as the owner who signed it."""

    async def run() -> JsonObject:
        kernel = Kernel(project)
        signed = await kernel.call("execute", {"item_type": "tool", "action": "sign", "item_id": "pour"})
        assert "error" not in signed.content, signed.content
        answer = await kernel.call("execute", {"item_id": "pour"})
        await kernel.aclose()
        return answer.content

    return asyncio.run(run())


def lose(kind: str) -> None:
    """Lose the environments and what was downloaded for them, as a cleaned or another disk would."""
    for name in (f"envs/{kind}", "packages"):
        shutil.rmtree(cache_folder() / name)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-09")
def test_a_private_package_name_is_not_taken_from_the_public_index(indexes: tuple[Index, Index], project: Path) -> None:
    own, public = indexes
    own.wheel("1.0.0", "ours")
    public.wheel("99.0.0", "theirs")
    make_python_tool(project)
    assert pour(project).get("result") == "ours"
    assert not [path for path in public.asked if "teapot" in path]
    # The index of the company is gone, and the other index has a package of the same name and version.
    lose("python")
    own.files.clear()
    public.files.clear()
    public.wheel("1.0.0", "theirs")
    refused = pour(project)
    assert refused.get("code") == "package_changed", refused
    assert "teapot" in str(refused["message"])
    assert str(refused["lock"]) in str(refused["suggestion"])
    assert not [*(cache_folder() / "envs/python").glob("*/bin")]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-09")
def test_a_lost_environment_is_rebuilt_from_the_same_files(indexes: tuple[Index, Index], project: Path) -> None:
    own, _ = indexes
    own.wheel("1.0.0", "first")
    make_python_tool(project)
    assert pour(project).get("result") == "first"
    lose("python")
    own.wheel("2.0.0", "second")
    own.files["/simple/teapot/"] = (
        "text/html",
        b" ".join(f'<a href="{path}">{path[7:]}</a>'.encode() for path in own.files if path.startswith("/files/")),
    )
    assert pour(project).get("result") == "first"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-09")
def test_a_lockfile_of_the_tool_determines_what_is_installed(indexes: tuple[Index, Index], project: Path) -> None:
    own, _ = indexes
    digest = own.wheel("1.0.0", "locked")
    make_python_tool(project, requirements__lock=f"teapot==1.0.0 \\\n    --hash=sha256:{digest}\n")
    assert pour(project).get("result") == "locked"
    lose("python")
    own.wheel("1.0.0", "changed")
    refused = pour(project)
    assert refused.get("code") == "package_changed", refused
    assert refused["lock"] == "requirements.lock"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("lock", "expected"),
    [
        ("other==1 --hash=sha256:00\n", "'teapot' is not locked"),
        ("teapot==1.0.0\n", "is not a version with its hashes"),
        ("--index-url http://x\nteapot==1.0.0 --hash=sha256:00\n", "'--index-url http://x' is not a version"),
        ("teapot @ http://x/teapot.whl --hash=sha256:00\n", "is not a version with its hashes"),
        ("-r /etc/passwd\nteapot==1.0.0 --hash=sha256:00\n", "'-r /etc/passwd' is not a version"),
        ("# x \\\n--index-url http://x\nteapot==1.0.0 --hash=sha256:00\n", "'--index-url http://x' is not a version"),
        ("# x \\\r\n-i http://x\r\nteapot==1.0.0 --hash=sha256:00\r\n", "'-i http://x' is not a version"),
        ("# x \\\r-i http://x\rteapot==1.0.0 --hash=sha256:00\r", "'-i http://x' is not a version"),
        (
            "teapot==1.0.0 --hash=sha256:00\nb==1; os_name>'' \\\n# x\n-i http://x/ --hash=sha256:00\n",
            "'-i http://x/ --hash=sha256:00' is not a version",
        ),
        ("teapot==1.0.0; os_name>'' -i http://x/ --hash=sha256:00\n", "is not a version with its hashes"),
    ],
)
def test_an_incomplete_lockfile_is_refused(lock: str, expected: str, project: Path) -> None:
    make_python_tool(project, requirements__lock=lock)
    refused = pour(project)
    assert refused.get("code") == "invalid_manifest", refused
    assert expected in json.dumps(refused)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-09")
def test_a_node_package_that_changed_is_refused(indexes: tuple[Index, Index], project: Path) -> None:
    own, _ = indexes
    own.tarball("1.0.0", "ours")
    make_node_tool(project)
    assert pour(project).get("result") == "ours"
    lose("node")
    own.tarball("1.0.0", "theirs")
    refused = pour(project)
    assert refused.get("code") == "package_changed", refused


GOOD: JsonObject = {
    "version": "1.0.0",
    "resolved": "https://index.test/teapot/-/teapot-1.0.0.tgz",
    "integrity": "sha512-AAAA",
}
ELSEWHERE = "is fetched from elsewhere than an index"


def node_lock(place: str = "node_modules/teapot", /, **words: Json) -> str:
    root = {"dependencies": {"teapot": "1.x"}}
    return json.dumps(
        {"lockfileVersion": 3, "packages": {"": root, "node_modules/teapot": GOOD, place: {**GOOD, **words}}}
    )


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-09")
def test_a_node_lockfile_uses_the_configured_index(indexes: tuple[Index, Index], project: Path) -> None:
    own, _ = indexes
    make_node_tool(project, node_lock(**own.tarball("1.0.0", "locked")))
    assert pour(project).get("result") == "locked"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-09")
@pytest.mark.parametrize(
    ("lock", "expected"),
    [
        *(
            (node_lock(resolved=address), ELSEWHERE)
            for address in (
                "http://127.0.0.1:9/teapot.tgz",
                "http://index.test/teapot.tgz",
                "git+ssh://git@index.test/teapot.git#0123456",
                "git+https://index.test/teapot.git",
                "file:../../teapot.tgz",
                "../teapot",
                "https:///teapot.tgz",
                "https://github.com/one/teapot",
                "https://index.test\\@other.test/teapot.tgz",
                7,
            )
        ),
        (node_lock(version="file:../teapot"), "has no version"),
        (node_lock(name="teapot@file:../x"), "is not a package of an index"),
        (node_lock(link=True), "is not a package of an index"),
        (node_lock("node_modules/../../other"), "is not a package of an index"),
        (node_lock("node_modules/other@file:x"), "is not a package of an index"),
        (node_lock(integrity="none"), "has no hash"),
        (node_lock(integrity="md5-AAAA"), "has no hash"),
        (json.dumps({"packages": {}}), "'teapot' is not locked"),
    ],
)
def test_a_node_lockfile_with_anything_but_an_index_is_refused(lock: str, expected: str, project: Path) -> None:
    make_node_tool(project, lock)
    refused = pour(project)
    assert refused.get("code") == "invalid_manifest", refused
    assert expected in json.dumps(refused)


def test_scoped_and_nested_packages_may_be_locked() -> None:
    lock = node_lock("node_modules/@pot/lid/node_modules/@pot.x/knob", version="1.0.0-rc.1+x", name="@pot/knob")
    indexes = npm_indexes({}, Path("/nowhere"))
    for place, entry in json.loads(lock)["packages"].items():
        assert not place or [*faults_of(place, entry, indexes)] == []
