"""Changes affect only their target: no symlink is followed and no other space is touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

API: JsonObject = {
    "tool_type": "api",
    "executor": "http_client",
    "version": "1.0.0",
    "description": "Look something up",
    "config": {"method": "GET", "url": "https://words.example.com/"},
}
TEXT = json.dumps({"tool_id": "look_up", **API})


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder elsewhere, with a tool in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "look_up.yaml").write_text(TEXT)
    return folder


def act(ask: Ask, action: str, name: str = "look_up", /, **words: object) -> JsonObject:
    return ask("execute", action=action, item_id=name, parameters=words).content


@pytest.mark.parametrize("place", ["tools", "tools/mail"])
def test_nothing_is_created_changed_or_removed_behind_a_symlinked_folder(
    place: str, project: Path, outside: Path, ask: Ask, tree: Tree
) -> None:
    link = project / ".ai" / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside, target_is_directory=True)
    before = tree(outside)

    created = act(ask, "create", "new", category=place.partition("/")[2], **API)

    assert (created["code"], "symbolic link" in str(created["message"])) == ("invalid_request", True)
    assert act(ask, "update", description="changed")["code"] == "tool_not_found"
    assert act(ask, "delete")["code"] == "tool_not_found"
    assert tree(outside) == before


@pytest.mark.parametrize("action", ["update", "delete"])
def test_nothing_is_moved_to_a_trash_that_is_a_symlink(
    action: str, project: Path, outside: Path, ask: Ask, tree: Tree
) -> None:
    act(ask, "create", **API)
    (project / ".ai" / ".trash").symlink_to(outside, target_is_directory=True)
    before = tree(project), tree(outside)

    refused = act(ask, action, **({"description": "changed"} if action == "update" else {}))

    assert (refused["code"], "symbolic link" in str(refused["message"])) == ("invalid_request", True)
    assert (tree(project), tree(outside)) == before


def test_init_does_not_write_through_a_dangling_symlink(project: Path, tmp_path: Path, ask: Ask) -> None:
    (project / ".ai" / ".gitignore").symlink_to(tmp_path / "victim")

    made = ask("init")

    assert not made.is_error
    assert not (tmp_path / "victim").exists()


@pytest.mark.req("K-SI-01")
@pytest.mark.parametrize("action", ["update", "delete"])
def test_a_detached_signature_stays_with_its_item(action: str, project: Path, ask: Ask) -> None:
    tools = project / ".ai" / "tools"
    tools.mkdir()
    (tools / "look_up.json").write_text(TEXT)
    assert act(ask, "sign")["status"] == "signed"
    assert (tools / "look_up.json.sig").exists()

    done = act(ask, action, **({"content": TEXT.replace("Look", "Find")} if action == "update" else {}))

    assert done["status"] in {"updated", "deleted"}
    assert not (tools / "look_up.json.sig").exists()
    assert [path.name for path in (project / ".ai" / ".trash").rglob("*.sig")] == ["look_up.json.sig"]
    if action == "update":
        assert ask("load", item_id="look_up").content["integrity"] == "unsigned"


@pytest.mark.req("K-ME-04")
@pytest.mark.case("SIG-01")
def test_an_item_that_changed_after_signing_is_not_copied(project: Path, home: Path, ask: Ask) -> None:
    act(ask, "create", **API)
    act(ask, "sign")
    path = project / ".ai" / "tools" / "look_up.yaml"
    path.write_text(path.read_text().replace("words.example", "evil.example"))

    refused = ask("load", item_id="look_up", destination="user").content

    assert (refused["error"], refused["tool_id"]) == ("Content hash mismatch", "look_up")
    assert not (home / ".ai" / "tools").exists()


@pytest.mark.req("K-ME-04")
@pytest.mark.case("SIG-01")
def test_an_executor_that_changed_after_signing_is_not_copied(project: Path, home: Path, ask: Ask) -> None:
    runtime = {"tool_type": "runtime", "executor": "subprocess", "config": {"command": "bash"}}
    act(ask, "create", "plain_runtime", version="1.0.0", description="Runs a file", **runtime)
    script = {"tool_type": "script", "executor": "plain_runtime", "config": {"entrypoint": "main.sh"}}
    act(ask, "create", "say", version="1.0.0", description="Say", files={"main.sh": "echo\n"}, **script)
    act(ask, "sign", "plain_runtime")
    path = project / ".ai" / "tools" / "plain_runtime.yaml"
    path.write_text(path.read_text().replace("bash", "evil"))

    refused = ask("load", item_id="say", destination="user").content

    assert (refused["error"], refused["tool_id"]) == ("Content hash mismatch", "plain_runtime")
    assert not (home / ".ai" / "tools").exists()


@pytest.mark.req("K-ME-02")
@pytest.mark.parametrize("action", ["update", "delete"])
def test_a_user_item_is_changed_only_if_its_location_is_named(
    action: str, project: Path, home: Path, ask: Ask, tree: Tree
) -> None:
    act(ask, "create", location="user", **API)
    before = tree(home / ".ai")
    words = {"description": "changed"} if action == "update" else {}

    refused = act(ask, action, **words)

    assert (refused["code"], "location: user" in str(refused["suggestion"])) == ("invalid_request", True)
    assert tree(home / ".ai") == before
    assert act(ask, action, location="user", **words)["status"] in {"updated", "deleted"}
