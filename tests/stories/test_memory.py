"""The owner's memory: models read and change it through items, the owner approves, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitResult

import kiwi_mcp
from kiwi_mcp.domain.calls import Answers, Caller, Questions
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.mcp.memory_server import NAMES

pytestmark = pytest.mark.usefixtures("processes", "home")


@pytest.fixture
def root(home: Path) -> Path:
    return home / ".ai" / "memory"


Call = Callable[..., JsonObject]


@pytest.mark.req("N4", "A8")
def test_a_model_writes_after_approval_and_every_change_is_in_the_history(call: Call, root: Path) -> None:
    waiting = call("memory_write", path="notes/tea.md", content="Green.\n")
    assert waiting["code"] == "approval_required"
    assert not (root / "notes").exists()

    written = call("memory_write", path="notes/tea.md", content="Green.\n", approved=True)
    assert written["bytes_written"] == 7
    (root / "notes" / "tea.md").write_text("Green, at five.\n")  # with an editor
    edited = call("memory_edit", path="notes/tea.md", find="Green", replace="Black", approved=True)
    assert call("memory_read", path="notes/tea.md")["version"] == edited["version"]
    call("memory_delete", path="notes/tea.md", approved=True)

    changes = [as_object(one) for one in as_list(call("memory_history", path="notes/tea.md")["changes"])]
    assert [one["message"] for one in changes] == [
        "Delete notes/tea.md",
        "Edit notes/tea.md",
        "Changed outside Kiwi: notes/tea.md",
        "Write notes/tea.md",
    ]
    before = call("memory_history", path="notes/tea.md", commit=changes[1]["commit"])
    assert before["content"] == "Black, at five.\n"
    # With every process of Kiwi stopped, git reads all of it.
    log = subprocess.check_output(["git", "-C", str(root), "log", "--format=%s"], text=True)
    assert log.splitlines() == [one["message"] for one in changes]


@pytest.mark.req("N4")
def test_a_file_that_changed_after_the_question_is_not_overwritten(call: Call, project: Path, root: Path) -> None:
    root.mkdir(parents=True)
    (root / "a.md").write_text("one\n")
    asked = call("memory_write", path="a.md", content="two\n")
    (root / "a.md").write_text("one and a half\n")

    async def approve() -> None:
        kernel = Kernel(project)
        await kernel.call("approvals", {"action": "approve", "approval_id": asked["approval_id"]}, Caller())
        await kernel.aclose()

    asyncio.run(approve())
    assert call("memory_write", path="a.md", content="two\n")["code"] == "approval_required"
    assert (root / "a.md").read_text() == "one and a half\n"


@pytest.mark.req("N4")
def test_a_rule_permits_a_folder_but_never_what_models_follow(call: Call, project: Path, root: Path) -> None:
    async def add_rule() -> None:
        kernel = Kernel(project)
        rule: JsonObject = {"action": "add_rule", "item": "builtin/kiwi/memory_*", "paths": [f"{root}/**"]}
        assert not (await kernel.call("approvals", rule, Caller())).is_error
        await kernel.aclose()

    asyncio.run(add_rule())
    assert call("memory_write", path="notes/a.md", content="x")["bytes_written"] == 1
    for path in ("AGENT.md", "AGENTS.md", "skills/tidy/SKILL.md", "directives/go.md"):
        assert call("memory_write", path=path, content="Do as I say.")["code"] == "approval_required", path


@pytest.mark.req("N4")
def test_an_export_is_imported_elsewhere_and_exported_again_byte_for_byte(
    call: Call, project: Path, root: Path, tmp_path: Path
) -> None:
    call("memory_write", path="notes/žluť.md", content="Ann\n", approved=True)
    call("memory_edit", path="notes/žluť.md", find="Ann", replace="Ben", approved=True)

    async def move() -> list[JsonObject]:
        answers = []
        for user, action in ((root.parent, "export"), (tmp_path / "other", "import"), (tmp_path / "other", "export")):
            kernel = Kernel(project, user=user)
            name = "first" if action == "import" or user == root.parent else "second"
            path = str(tmp_path / name)
            answers.append((await kernel.call("memory", {"action": action, "path": path}, Caller())).content)
            await kernel.aclose()
        return answers

    assert [answer["status"] for answer in asyncio.run(move())] == ["exported", "imported", "exported"]
    assert (tmp_path / "first").stat().st_mode & 0o077 == 0
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert (tmp_path / "other" / "memory" / "notes" / "žluť.md").read_text() == "Ben\n"


COMMIT = (
    "blob\nmark :1\ndata 11\n/etc/passwd\nreset refs/heads/main\ncommit refs/heads/main\nmark :2\n"
    "committer A <a@b> 1795000395 +0000\ndata 1\nx\nM {mode} :1 {path}\n\n"
)


@pytest.mark.req("N4")
@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (COMMIT.format(mode="120000", path="notes.md"), "invalid_request"),
        (COMMIT.format(mode="100644", path=".gitattributes"), "reserved_path"),
        (COMMIT.format(mode="100644", path="notes/.hidden/a.md"), "reserved_path"),
        ("feature export-marks=marks\n" + COMMIT.format(mode="100644", path="a.md"), "invalid_request"),
        ("not a stream", "invalid_request"),
        ("", "invalid_request"),
    ],
    ids=["link", "attributes", "hidden", "unsafe feature", "garbage", "empty"],
)
def test_a_bad_import_is_refused_and_leaves_nothing(
    stream: str, code: str, project: Path, root: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.write_text(stream)

    async def story() -> JsonObject:
        kernel = Kernel(project)
        try:
            return (await kernel.call("memory", {"action": "import", "path": str(bad)}, Caller())).content
        finally:
            await kernel.aclose()

    assert asyncio.run(story())["code"] == code
    assert [*root.iterdir()] == []
    assert not [*tmp_path.rglob("marks")]


@pytest.mark.req("N4")
def test_a_memory_that_is_a_file_is_unavailable(call: Call, root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    root.write_text("no folder")
    assert call("memory_list")["code"] == "unavailable"
    assert call("memory_write", path="a.md", content="x")["code"] == "unavailable"
    assert root.read_text() == "no folder"


@pytest.mark.req("N4")
def test_a_change_that_cannot_be_recorded_is_taken_back(call: Call, root: Path) -> None:
    call("memory_write", path="a.md", content="one\n", approved=True)
    lock = root / ".git" / "index.lock"  # as a git that was killed leaves it
    lock.touch()
    assert call("memory_write", path="a.md", content="two\n", approved=True)["code"] == "unavailable"
    assert (root / "a.md").read_text() == "one\n"
    os.utime(lock, (0, 0))  # it is old by now
    assert call("memory_write", path="a.md", content="three\n", approved=True)["bytes_written"] == 6


@pytest.mark.req("N4")
def test_without_git_the_memory_does_not_open(call: Call, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert call("memory_read", path="a.md")["code"] == "unavailable"
    assert call("memory_list")["code"] == "unavailable"


STEPS: tuple[tuple[str, JsonObject], ...] = (
    ("memory_write", {"path": "notes/tea.md", "content": "Green.\n"}),
    ("memory_read", {"path": "notes/tea.md"}),
    ("memory_edit", {"path": "notes/tea.md", "find": "Green", "replace": "Black"}),
    ("memory_edit", {"path": "notes/tea.md", "find": "Green", "replace": "Black"}),
    ("memory_write", {"path": "notes/tea.md", "content": "x", "expected_version": "0" * 64}),
    ("memory_list", {"recursive": True}),
    ("memory_search", {"query": "black"}),
    ("memory_read", {"path": "../.env"}),
    ("memory_write", {"path": "preferences.yaml", "content": "x"}),
    ("memory_delete", {"path": "notes/tea.md"}),
    ("memory_read", {"path": "notes/tea.md"}),
)


@pytest.mark.req("G1")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_memory_server_does_exactly_what_the_built_in_tools_do(
    mode: Any, project: Path, home: Path, tmp_path: Path
) -> None:
    yes = {"action": "accept", "content": {"approve": True}}
    asked: dict[str, list[str]] = {"native": [], "served": []}

    async def native() -> list[Any]:
        async def answer(questions: Questions) -> Answers:
            asked["native"] += [as_text(one.params["message"]) for one in questions.values()]
            return dict.fromkeys(questions, yes)  # type: ignore[arg-type]  # a form that is filled in

        kernel = Kernel(project, user=tmp_path / "other")
        caller = Caller(ask=answer, is_owner=True)
        try:
            return [
                (await kernel.call("execute", {"item_id": item, "parameters": words}, caller)).content
                for item, words in STEPS
            ]
        finally:
            await kernel.aclose()

    async def served() -> list[Any]:
        async def elicited(_: Any, params: Any) -> ElicitResult:
            asked["served"].append(params.message)
            return ElicitResult.model_validate(yes)

        env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
        server = StdioServerParameters(command=sys.executable, args=["-m", "kiwi_mcp", "memory", "serve"], env=env)
        forms: Any = elicited
        async with Client(stdio_client(server), mode=mode, elicitation_callback=forms) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == set(NAMES)
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("search", {"query": "tea"})
            results: list[Any] = [await client.call_tool(item, dict(words)) for item, words in STEPS]
            return [one.structured_content or json.loads(one.content[0].text) for one in results]

    def without_times(answers: list[Any]) -> list[Any]:
        return [json.loads(re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "", json.dumps(one))) for one in answers]

    one = without_times([answer.get("result", answer) for answer in asyncio.run(native())])
    assert without_times(asyncio.run(served())) == one
    assert [step.get("code", "") for step in one] == [
        *("", "", "", "invalid_input", "conflict", "", "", "path_invalid", "reserved_path", "", "not_found")
    ]
    changes = [[line for line in text.splitlines() if line.startswith("  | ")] for text in asked["native"]]
    assert changes == [[line for line in text.splitlines() if line.startswith("  | ")] for text in asked["served"]]
    assert len(changes) == 3
    receipts = [audit(project, user) for user in (tmp_path / "other", home / ".ai")]
    assert receipts[0] == receipts[1]


def audit(project: Path, user: Path) -> list[tuple[object, ...]]:
    """Return what the receipts of the memory tools say."""

    async def read() -> list[tuple[object, ...]]:
        kernel = Kernel(project, user=user)
        try:
            found = (await kernel.call("audit", {"action": "list", "limit": 100}, Caller())).content
        finally:
            await kernel.aclose()
        rows = [as_object(row) for row in as_list(found["receipts"])]

        def bare(item: str) -> str:  # a refusal names the item as its caller did
            return item.rpartition("/")[2].partition("@")[0]

        return [(row["action"], bare(as_text(row["item"])), row["status"], row.get("code")) for row in rows]

    return asyncio.run(read())


@pytest.mark.req("C5", "C7")
@pytest.mark.usefixtures("sandbox")
def test_nothing_in_the_memory_is_executed_and_tools_come_and_go_without_it(project: Path, root: Path) -> None:
    tool = "# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Says hello\necho hello\n"
    for place in ("tools/hello.sh", "skills/tidy/scripts/hello.sh", "directives/hello.sh", "hello.sh"):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(tool)
        (root / place).chmod(0o755)
    (root / "skills/tidy/SKILL.md").write_text("---\nname: tidy\ndescription: Tidies\n---\nRun scripts/hello.sh\n")
    before = tree(root)

    async def story() -> list[tuple[str, JsonObject]]:
        kernel, seen = Kernel(project), []
        create: JsonObject = {"content": tool.replace("hello", "hi"), "filename": "hi.sh"}
        steps: tuple[tuple[str, JsonObject], ...] = (
            *(("memory", {"item_id": name}) for name in ("hello", "tidy/scripts/hello", str(root / "tools/hello.sh"))),
            ("installed", {"action": "create", "item_id": "hi", "parameters": create}),
            ("installed", {"action": "sign", "item_id": "hi"}),
            ("installed", {"item_id": "hi", "parameters": {}}),
            ("installed", {"action": "delete", "item_id": "hi", "parameters": {"confirm": True}}),
        )
        for kind, request in steps:
            seen.append((kind, (await kernel.call("execute", request, Caller())).content))
        await kernel.aclose()
        return seen

    for kind, answer in asyncio.run(story()):
        assert ("error" in answer) is (kind == "memory"), answer
    assert tree(root) == before


def tree(root: Path) -> dict[str, bytes]:
    """Return every file of a memory, without its history."""
    files = (path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
