"""The item reader: files, digest and signature. No code of an item runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import load_bytes, read_tool
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import IntegrityMismatch, KiwiError, TooLarge
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.manifest.signatures import line, sidecar, sign

Put = Callable[..., Path]
WHEN = "2026-01-02T03:04:05Z"

FOLDER = """\
tool_id: {name}
tool_type: script
executor: python_runtime
version: 1.0.0
description: A tool of several files
config:
  entrypoint: main.py
"""


def read(space: Space, path: Path) -> Tool:
    return read_tool(path, source="project", base=space.project_ai)


@pytest.fixture
def folder_tool(put: Put) -> Path:
    put("tools/web/many/main.py", "from lib.inner import f\n\n\ndef main(): return f()\n")
    put("tools/web/many/lib/inner.py", "def f(): return 1\n")
    put("tools/web/many/run.sh", "echo\n").chmod(0o755)
    put("tools/web/many/node_modules/x/index.js", "junk")
    put("tools/web/many/__pycache__/main.pyc", "junk")
    put("tools/web/many/.git/config", "junk")
    return put("tools/web/many/tool.yaml", FOLDER.format(name="many"))


@pytest.mark.req("K-TY-03")
def test_every_file_of_a_folder_is_in_the_item_and_in_its_digest(space: Space, folder_tool: Path, put: Put) -> None:
    tool = read(space, folder_tool)

    assert [file.path for file in tool.files] == ["lib/inner.py", "main.py", "run.sh", "tool.yaml"]
    assert [file.path for file in tool.files if file.is_executable] == ["run.sh"]
    assert tool.origin.root == folder_tool.parent
    assert tool.manifest.category == "web"

    digests = {tool.digest}
    put("tools/web/many/lib/inner.py", "def f(): return 2\n")
    digests.add(read(space, folder_tool).digest)
    put("tools/web/many/new.txt", "x")
    digests.add(read(space, folder_tool).digest)
    (folder_tool.parent / "run.sh").chmod(0o644)
    digests.add(read(space, folder_tool).digest)
    assert len(digests) == 4


def test_a_single_file_is_its_own_entrypoint_and_among_its_files(space: Space, put: Put) -> None:
    path = put("tools/one.py", '"""\ntool_id: one\ntool_type: script\nexecutor: python_runtime\nversion: 1.0.0\n"""\n')

    tool = read(space, path)

    assert tool.entrypoint == "one.py"
    (file,) = tool.files
    assert (file.path, file.sha256) == ("one.py", sha256(path.read_bytes()).hexdigest())
    assert load_bytes(tool, file) == path.read_bytes()


def test_signing_does_not_change_the_digest_and_a_changed_byte_does(space: Space, folder_tool: Path) -> None:
    unsigned = read(space, folder_tool)
    assert unsigned.integrity == "unsigned"

    folder_tool.write_text(sign(folder_tool.read_text(), ".yaml", timestamp=WHEN, digest=unsigned.digest))
    signed = read(space, folder_tool)
    assert (signed.integrity, signed.digest) == ("hashed", unsigned.digest)

    (folder_tool.parent / "lib" / "inner.py").write_text("def f(): return 666\n")
    assert read(space, folder_tool).integrity == "modified"


def test_a_json_item_is_signed_by_the_file_beside_it(space: Space, put: Put) -> None:
    path = put("tools/a.json", '{"tool_id": "a", "tool_type": "knowledge", "version": "1.0.0"}')
    put(f"tools/{sidecar('a.json')}", line(WHEN, read(space, path).digest) + "\n")
    assert read(space, path).integrity == "hashed"

    path.write_text(path.read_text().replace("1.0.0", "1.0.1"))
    assert read(space, path).integrity == "modified"


def test_a_matching_legacy_signature_is_valid(space: Space, put: Put) -> None:
    body = 'import json\n\n__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n'
    old = sha256(body.encode()).hexdigest()[:12]
    path = put("scripts/old.py", f"# kiwi-mcp:validated:{WHEN}:{old}\n{body}")

    assert read(space, path).integrity.startswith("valid:")

    path.write_text(path.read_text() + "x = 1\n")
    assert read(space, path).integrity == "modified"


def test_imported_shared_code_belongs_to_the_item(space: Space, put: Put) -> None:
    put("tools/lib/http_words.py", "HELLO = 1\n")
    text = FOLDER.format(name="x") + "  lib_imports: [http_words, absent]\n"
    path = put("tools/deep/x/tool.yaml", text)
    put("tools/deep/x/main.py", "from lib.http_words import HELLO\n")

    tool = read(space, path)

    shared = next(file for file in tool.files if file.path == "lib/http_words.py")
    assert load_bytes(tool, shared) == b"HELLO = 1\n"
    assert [issue.place for issue in tool.manifest.issues if issue.is_error] == ["config.lib_imports[1]"]

    put("tools/lib/http_words.py", "HELLO = 2\n")
    assert read(space, path).digest != tool.digest
    with pytest.raises(IntegrityMismatch):
        load_bytes(tool, shared)


@pytest.mark.case("CHAIN-06")
def test_bytes_that_changed_after_reading_are_never_returned(space: Space, folder_tool: Path) -> None:
    tool = read(space, folder_tool)
    main = next(file for file in tool.files if file.path == "main.py")
    assert load_bytes(tool, main)

    path = folder_tool.parent / "main.py"
    path.write_text("evil = 1\n")
    with pytest.raises(IntegrityMismatch):
        load_bytes(tool, main)

    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(IntegrityMismatch):
        load_bytes(tool, main)

    path.unlink()
    os.mkfifo(path)
    with pytest.raises(IntegrityMismatch):
        load_bytes(tool, main)


@pytest.mark.case("PATH-04")
def test_a_symlink_is_not_a_file_of_an_item(space: Space, put: Put, tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("KEY = 1\n")
    path = put("tools/x/tool.yaml", FOLDER.format(name="x"))
    (path.parent / "main.py").symlink_to(secret)
    (path.parent / "more").symlink_to(tmp_path)

    tool = read(space, path)

    assert [file.path for file in tool.files] == ["tool.yaml"]
    assert {issue.place for issue in tool.manifest.issues} >= {"main.py", "more"}


def test_too_many_files_and_too_many_bytes_are_refused(space: Space, put: Put) -> None:
    path = put("tools/many/tool.yaml", FOLDER.format(name="many"))
    for number in range(2_001):
        (path.parent / f"f{number}").touch()
    with pytest.raises(TooLarge):
        read(space, path)

    big = put("tools/big/tool.yaml", FOLDER.format(name="big"))
    for name in "ab":
        with (big.parent / name).open("wb") as file:
            file.truncate(40_000_000)
    with pytest.raises(TooLarge):
        read(space, big)


@pytest.mark.req("K-TY-04")
@pytest.mark.case("BOMB-12")
def test_listing_finding_loading_signing_and_resolving_an_item_run_no_code_of_it(
    catalog: Catalog, space: Space, put: Put, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    act = f"open({str(canary)!r}, 'w').write('ran')\n"
    put("tools/doc.py", f'"""\ntool_id: doc\ntool_type: script\nexecutor: python_runtime\nversion: 1.0.0\n"""\n{act}')
    put(
        "tools/dunder.py",
        f'__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n__version__ = str({act.strip()})\n{act}',
    )
    put("tools/extractors/evil.py", act + "EXTENSIONS = ['.py']\n")
    put("scripts/plain.py", act)
    put("tools/sh.sh", "#!/bin/sh\n# tool_id: sh\n# tool_type: bash\n# version: 1.0.0\ntouch canary\n")

    assert {entry.tool_id for entry in catalog.all()} >= {"doc", "plain"}
    for entry in catalog.all():
        tool = catalog.find(entry.identity)
        if entry.source == "project":
            sign(tool.origin.path.read_text(), tool.origin.path.suffix, timestamp=WHEN, digest=tool.digest)
    catalog.resolve("doc")
    catalog.broken()

    assert not canary.exists()


def test_a_file_without_a_manifest_is_refused_with_a_reason(space: Space, put: Put) -> None:
    with pytest.raises(KiwiError, match="holds no manifest"):
        read(space, put("tools/plain.py", "x = 1\n"))
