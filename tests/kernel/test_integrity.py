"""A signed item runs as it was signed, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

RUNTIME: JsonObject = {
    "tool_type": "runtime",
    "executor": "subprocess",
    "version": "1.2.0",
    "description": "Runs a shell file plainly",
    "config": {"command": "bash", "params_as": "environment", "result_from": "stdout"},
}
TOOL: JsonObject = {
    "tool_type": "script",
    "executor": "plain_runtime@^1.2",
    "version": "1.0.0",
    "description": "Say a word",
    "config": {"entrypoint": "main.sh"},
    "parameters": [{"name": "word", "type": "string", "required": True}],
    "files": {"main.sh": '. "$(dirname "$0")/lib/say.sh"\nsay\n', "lib/say.sh": 'say() { echo "$KIWI_PARAM_word"; }\n'},
}
FILES = {
    "manifest": "say/tool.yaml",
    "entrypoint": "say/main.sh",
    "helper": "say/lib/say.sh",
    "executor": "plain_runtime.yaml",
}


HEAD = """tool_id: say
tool_type: script
version: 1.0.0
executor: {name}_runtime
parameters:
  - {{name: word, type: string}}
"""


def commented(mark: str) -> str:
    """A manifest in the comments that a file begins with."""
    name = {"#": "bash", "//": "node"}[mark]
    return "".join(f"{mark} {line}\n" for line in HEAD.format(name=name).splitlines())


@pytest.fixture
def tools(project: Path, ask: Ask) -> Path:
    """A tool on a runtime of one's own, both signed."""
    for name, words in (("plain_runtime", RUNTIME), ("say", TOOL)):
        assert ask("execute", action="create", item_id=name, parameters=words).content["status"] == "created"
        assert ask("execute", action="sign", item_id=name).content["status"] == "signed"
    return project / ".ai" / "tools"


def run(ask: Ask, **words: object) -> JsonObject:
    return ask("execute", item_id="say", parameters={"word": "kiwi"}, **words).content


def flip(path: Path) -> None:
    """Change one bit of the last byte that is a letter, so that the file stays readable."""
    data = bytearray(path.read_bytes())
    at = max(index for index, byte in enumerate(data) if chr(byte).isalpha())
    data[at] ^= 0x20
    path.write_bytes(data)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-01")
@pytest.mark.case("SIG-01")
@pytest.mark.parametrize("what", FILES)
def test_a_changed_byte_refuses_the_run(what: str, tools: Path, ask: Ask) -> None:
    assert run(ask)["result"] == "kiwi"

    flip(tools / FILES[what])

    refused = run(ask)
    assert refused["error"] == "Content hash mismatch"
    assert refused["tool_id"] == ("plain_runtime" if what == "executor" else "say")
    assert "result" not in refused


@pytest.mark.req("K-SI-01")
def test_a_run_refused_for_a_changed_byte_leaves_no_output(tools: Path, project: Path, ask: Ask, tree: Tree) -> None:
    flip(tools / FILES["helper"])
    before = tree(project)

    run(ask)
    run(ask, dry_run=True)

    assert tree(project) == before


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-06")
def test_files_swapped_added_or_made_executable_refuse_the_run(tools: Path, ask: Ask) -> None:
    main, helper = tools / "say" / "main.sh", tools / "say" / "lib" / "say.sh"
    texts = main.read_bytes(), helper.read_bytes()

    main.write_bytes(texts[1])
    helper.write_bytes(texts[0])
    assert run(ask)["code"] == "content_hash_mismatch"
    main.write_bytes(texts[0])
    helper.write_bytes(texts[1])
    assert run(ask)["result"] == "kiwi"
    (tools / "say" / "new.sh").write_text("")
    assert run(ask)["code"] == "content_hash_mismatch"
    (tools / "say" / "new.sh").unlink()
    helper.chmod(0o755)
    assert run(ask)["code"] == "content_hash_mismatch"


@pytest.mark.usefixtures("sandbox")
def test_signing_again_accepts_the_change(tools: Path, ask: Ask) -> None:
    flip(tools / FILES["helper"])
    (tools / FILES["helper"]).write_text('say() { echo "now: $KIWI_PARAM_word"; }\n')

    assert ask("execute", action="sign", item_id="say").content["status"] == "signed"

    assert run(ask)["result"] == "now: kiwi"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-CH-04")
@pytest.mark.case("SIG-05")
def test_an_edited_runtime_is_reported_and_refused_with_frozen(tools: Path, ask: Ask) -> None:
    changed = {"description": "Runs a shell file otherwise", "version": "1.3.0"}
    ask("execute", action="update", item_id="plain_runtime", parameters=changed)
    ask("execute", action="sign", item_id="plain_runtime")

    response, refused = run(ask), run(ask, frozen=True)

    assert response["result"] == "kiwi"
    assert str(as_list(response["warnings"])[0]).startswith("lockfile: plain_runtime changed: 1.2.0")
    assert refused["code"] == "lock_mismatch"
    assert "1.3.0" in str(refused["message"])
    explained = ask("execute", action="why", item_id="say").content
    assert "1.2.0" in str(as_list(explained["lockfile"])[0])


@pytest.mark.req("K-CH-04")
def test_a_pin_without_a_matching_version_is_a_missing_link(tools: Path, ask: Ask) -> None:
    ask("execute", action="update", item_id="plain_runtime", parameters={"version": "2.0.0"})

    refused = run(ask)

    assert refused["code"] == "executor_not_found"
    assert "2.0.0" in str(refused["message"])


@pytest.mark.usefixtures("sandbox")
def test_a_frozen_run_of_a_recorded_item_works(tools: Path, ask: Ask) -> None:
    assert run(ask, frozen=True)["result"] == "kiwi"


def test_a_damaged_lockfile_is_refused_and_not_read_as_empty(tools: Path, project: Path, ask: Ask) -> None:
    (project / ".ai" / "kiwi.lock").write_text('{"lockfile": ')

    assert run(ask)["code"] == "invalid_manifest"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-01")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("say.py", f'"""\n{HEAD.format(name="python")}"""\n\n\ndef main(word):\n    return word\n'),
        ("say.sh", f"#!/bin/bash\n{commented('#')}\necho $KIWI_PARAM_word\n"),
        ("say.js", f"{commented('//')}\nmodule.exports.main = ({{ word }}) => word;\n"),
    ],
    ids=["python", "bash", "javascript"],
)
def test_a_signature_is_a_comment_in_the_language_of_the_file(
    name: str, text: str, project: Path, ask: Ask, kernel: Kernel
) -> None:
    path = project / ".ai" / "tools" / name
    path.parent.mkdir()
    path.write_text(text)

    signed = ask("execute", action="sign", item_id="say")

    assert signed.content.get("status") == "signed", signed.content
    line = path.read_text().split("\n")[1 if text.startswith("#!") else 0]
    assert line == f"{'//' if name.endswith('.js') else '#'} {signed.content['signature']}"
    assert run(ask)["result"] == "kiwi"
    flip(path)
    assert run(ask)["code"] == "content_hash_mismatch"


def test_a_deleted_tool_is_removed_from_the_lockfile(ask: Ask, tools: Path) -> None:
    lockfile = tools.parent / "kiwi.lock"
    assert "project/local/say" in lockfile.read_text()

    ask("execute", action="delete", item_id="say")

    assert "project/local/say" not in lockfile.read_text()
    assert "project/local/plain_runtime" in lockfile.read_text()
