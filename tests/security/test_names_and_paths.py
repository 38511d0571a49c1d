"""Names that are paths, paths that lead outside, and invalid projects: refused everywhere by one rule."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

FAMILY = {"error", "code", "item_type", "message", "suggestion"}
TOOL: JsonObject = {
    "tool_type": "script",
    "executor": "bash_runtime",
    "version": "1.0.0",
    "description": "Say hello",
    "config": {"entrypoint": "main.sh"},
    "files": {"main.sh": "echo hello\n"},
}
NAMES = [
    "../x", "a/b", ".", "..", "con", "nul", "lpt1", "a" * 300, "a\0b", "Upper", "a b", "/etc/passwd", "~", "-a", "a.b",
]  # fmt: skip
LOOK_ALIKES = ["ｓay", "ﬁle", "sa\u0301y", "ѕау", "say\u200b", "sаy"]  # noqa: RUF001 - the look-alikes are the point


@pytest.fixture
def unchanged(project: Path, home: Path, tree: Tree) -> Callable[[Answer], JsonObject]:
    """The content of a refusal, once it is found to be one and the disk as it was."""
    before = tree(project), tree(home / ".ai")

    def content(answer: Answer) -> JsonObject:
        assert answer.is_error, answer.content
        assert answer.exit_code
        assert answer.content.keys() >= FAMILY
        assert answer.content["suggestion"]
        assert answer.content["code"] != "internal"
        assert (tree(project), tree(home / ".ai")) == before
        return answer.content

    return content


Unchanged = Callable[[Answer], JsonObject]


@pytest.mark.case("PATH-01")
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_a_path_is_refused_by_every_verb(name: str, ask: Ask, unchanged: Unchanged) -> None:
    unchanged(ask("load", item_id=name))
    unchanged(ask("load", item_id=name, destination="user"))
    for action in ("run", "sign", "update", "delete", "create", "validate"):
        words = TOOL if action == "create" else {}
        unchanged(ask("execute", action=action, item_id=name, parameters=words))
    assert not ask("execute", action="validate", item_id=name, parameters=TOOL).content.get("valid")
    unchanged(ask("execute", action="create", parameters={**TOOL, "tool_id": name}))
    why = ask("execute", action="why", item_id=name)
    assert why.is_error or why.content["would_run"] is False


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("PATH-01")
def test_an_empty_name_is_no_name(ask: Ask, unchanged: Unchanged) -> None:
    for verb, words in (("load", {}), ("execute", {"action": "run"}), ("execute", {"action": "sign"})):
        unchanged(ask(verb, item_id="", **words))
    unchanged(ask("execute", action="create", item_id="", parameters=TOOL))


@pytest.mark.case("UNI-01")
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_name_with_lookalike_characters_is_refused(name: str, ask: Ask, unchanged: Unchanged) -> None:
    unchanged(ask("execute", action="create", item_id=name, parameters=TOOL))
    unchanged(ask("execute", item_id=name))


PATHS = [
    "/etc/x", "../x", "a/../../x", "C:\\x", "C:x", "\\\\host\\share", "a\\b", "~/x", "x.", "x ", " x", "a//b", "a/", "",
    "nul", "a\0b", "a\nb", "tool.yaml/../../x", "x/" * 40 + "y", "a" * 300,
]  # fmt: skip


@pytest.mark.case("PATH-02")
@pytest.mark.parametrize("path", PATHS)
def test_a_file_stays_below_its_item_on_every_system(path: str, ask: Ask, unchanged: Unchanged) -> None:
    refused = unchanged(
        ask("execute", action="create", item_id="say", parameters={**TOOL, "files": {"main.sh": "echo\n", path: "x"}})
    )

    assert refused["code"] == "invalid_manifest"


@pytest.mark.case("PATH-02")
@pytest.mark.parametrize("name", ["../say.yaml", "/tmp/say.yaml", "..", "", "a\\b.yaml", "~", "nul", "a\0.yaml"])
def test_the_name_of_a_file_sent_whole_is_a_bare_name(
    name: str, ask: Ask, tree: Tree, project: Path, home: Path
) -> None:
    text = "tool_id: say\ntool_type: api\nversion: 1.0.0\nexecutor: http_client\nconfig: {method: GET, url: 'https://a.test/'}\n"
    before = tree(home / ".ai")

    answer = ask("execute", action="create", item_id="say", parameters={"content": text, "filename": name})

    assert answer.content.get("code") != "internal", answer.content
    assert tree(home / ".ai") == before
    if not answer.is_error:  # an empty name means the usual one
        assert list(tree(project)) == [".ai/tools/say.yaml"]


@pytest.mark.case("PATH-04")
@pytest.mark.parametrize("entrypoint", ["lost.sh", "lib", "../main.sh", "/bin/sh", "", ".", "main.sh/x"])
def test_an_entrypoint_is_a_file_of_the_item(entrypoint: str, ask: Ask, unchanged: Unchanged) -> None:
    files = {"main.sh": "echo\n", "lib/a.sh": "true\n"}
    words = {**TOOL, "config": {"entrypoint": entrypoint}, "files": files}

    assert unchanged(ask("execute", action="create", item_id="say", parameters=words))["code"] == "invalid_manifest"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("PATH-04")
def test_an_entrypoint_that_is_a_link_is_refused(ask: Ask, project: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=TOOL)
    main = project / ".ai" / "tools" / "say" / "main.sh"
    main.unlink()
    main.symlink_to("/etc/hostname")

    answer = ask("execute", item_id="say")

    assert answer.is_error
    assert answer.content["code"] in {"invalid_manifest", "content_hash_mismatch"}


@pytest.mark.case("PATH-06")
@pytest.mark.parametrize("path", ["relative", "../..", "", "/", "/nowhere/at/all", "/etc/hostname", "a\0b", "~"])
def test_a_project_is_an_absolute_folder(path: str, ask: Ask, unchanged: Unchanged) -> None:
    for verb, words in (
        ("search", {"query": "x"}),
        ("load", {"item_id": "x"}),
        ("execute", {"item_id": "x"}),
        ("execute", {"action": "create", "item_id": "say", "parameters": TOOL}),
        ("init", {}),
        ("doctor", {}),
    ):
        refused = unchanged(ask(verb, project_path=path, **words))
        assert refused["code"] in {"project_path_invalid", "project_path_required"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("PATH-06")
def test_a_link_to_a_project_is_the_project(ask: Ask, project: Path, tmp_path: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=TOOL)
    (tmp_path / "link").symlink_to(project)

    loaded = ask("load", item_id="say", project_path=str(tmp_path / "link"))

    assert str(loaded.content["path"]).startswith(str(project))


@pytest.mark.case("PATH-06")
def test_the_folder_of_another_user_needs_an_approval(home: Path, tmp_path: Path) -> None:
    foreign = Path("/usr/share")  # root's, and so not ours
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
    (tmp_path / "link").symlink_to(foreign)

    def search() -> JsonObject:
        return asyncio.run(Kernel(tmp_path / "link").call("search", {"query": "x"})).content

    assert search()["code"] == "project_path_invalid"
    (home / ".ai").mkdir(exist_ok=True)  # what was refused is on record there
    (home / ".ai" / "policy.yaml").write_text(f'roots: ["{foreign}"]\n')
    assert search()["total"] == 0


@pytest.mark.parametrize("category", ["..", "a/../b", "/etc", "A", "a b", "a\\b", "con"])
def test_a_category_is_made_of_names(category: str, ask: Ask, unchanged: Unchanged) -> None:
    unchanged(ask("execute", action="create", item_id="say", parameters={**TOOL, "category": category}))
