"""Files that an older Kiwi kept beside the memory: moved into it and back, and nothing is lost on the way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from tests.stories.conftest import asked

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel.memory import RECORD, MemoryMove

pytestmark = pytest.mark.usefixtures("sandbox")
DIRECTIVE = (
    '# Study\n\n```xml\n<directive name="study" version="1.0.0">\n  <metadata>\n    <description>Study</description>\n'
    '    <category>core</category>\n    <author>kiwi</author>\n    <model tier="fast">Do it</model>\n'
    '    <permissions/>\n  </metadata>\n  <process>\n    <step name="only"><action>Greet.</action></step>\n'
    "  </process>\n</directive>\n```\n"
)
KNOWLEDGE = "---\nid: clouds\ntitle: Clouds\nversion: 1.0.0\ntype: reference\n---\n\nAll about clouds.\n"
SKILL = "---\nname: tidy\ndescription: How to tidy\n---\nRun scripts/tidy.sh\n"


@pytest.fixture
def user(home: Path) -> Path:
    """A user space of the kind that older versions of Kiwi made."""
    space = home / ".ai"
    for place, text in (
        ("directives/study.md", DIRECTIVE),
        ("knowledge/sky/clouds.md", KNOWLEDGE),
        ("skills/tidy/SKILL.md", SKILL),
        ("skills/tidy/scripts/tidy.sh", "#!/bin/sh\necho tidy\n"),
        ("preferences.yaml", "always_send: [memory_read]\n"),
        ("tools/hello.sh", "# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\necho hello\n"),
    ):
        (space / place).parent.mkdir(parents=True, exist_ok=True)
        (space / place).write_text(text)
    (space / "skills/tidy/scripts/tidy.sh").chmod(0o755)
    (space / "knowledge/picture.bin").write_bytes(bytes(range(256)) * 300)
    (space / "knowledge/empty").mkdir(mode=0o750)
    os.utime(space / "knowledge/sky/clouds.md", (1_600_000_000, 1_600_000_000))
    return space


Snapshot = dict[str, tuple[int, str, int]]


def snapshot(folder: Path) -> Snapshot:
    """Return every file and folder with its mode, its hash and, for files, the time of its last change."""
    skipped = {"state", ".git", "registry", "outputs"}
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns if path.is_file() else 0,
        )
        for path in folder.rglob("*")
        if skipped.isdisjoint(path.relative_to(folder).parts) and path.name != "memory"
    }


def migrated(project: Path, **request: bool) -> JsonObject:
    (answer,) = asked(project, ("memory", {"action": "migrate", **request}))
    return answer


LOADS: tuple[tuple[str, JsonObject], ...] = (
    ("load", {"item_id": "user/local/study", "item_type": "directive"}),
    ("load", {"item_id": "user/local/clouds", "item_type": "knowledge"}),
    ("load", {"item_id": "user/local/tidy", "item_type": "skill"}),
)
STUDY: tuple[str, JsonObject] = ("execute", {"item_id": "study", "item_type": "directive"})


def test_a_move_keeps_identities_signatures_and_the_lock_and_is_undone_byte_for_byte(project: Path, user: Path) -> None:
    (signed,) = asked(project, ("execute", {"action": "sign", "item_id": "study", "parameters": {"location": "user"}}))
    assert "error" not in signed, signed
    before, lock = snapshot(user), (user / "kiwi.lock").read_bytes()
    *loaded, ran = asked(project, *LOADS, STUDY)

    planned = migrated(project)
    assert (planned["status"], snapshot(user)) == ("planned", before)
    files = {name: one for name, one in before.items() if one[1] and not name.startswith(("tools/", "kiwi.lock"))}
    assert {as_object(one)["path"] for one in as_list(planned["files"])} == files.keys()
    done = migrated(project, apply=True)
    assert done["message"] == as_text(planned["message"]).replace("would be ", "")
    rest = {name for name in snapshot(user) if not name.startswith("memory/")}
    assert rest == {"tools", "tools/hello.sh", "kiwi.lock"}
    assert {name: one for name, one in snapshot(user / "memory").items() if one[1]} == files
    *loaded_then, ran_then = asked(project, *LOADS, STUDY)
    for one, other in zip(loaded, loaded_then, strict=True):
        kept = ("identity", "digest", "integrity", "trust")
        assert "error" not in one, one
        assert [one.get(key) for key in kept] == [other.get(key) for key in kept]
    assert (ran["status"], ran_then["status"]) == ("ready", "ready")
    assert (user / "kiwi.lock").read_bytes() == lock
    (history,) = asked(project, ("execute", {"item_id": "memory_history"}))
    assert "Moved here from the user folder" in str(history)

    assert migrated(project, undo=True)["status"] == "planned"
    undone = migrated(project, undo=True, apply=True)
    assert snapshot(user) == before
    assert "left in place" not in as_text(undone["message"])
    assert not (user / RECORD).exists()
    assert [*snapshot(user / "memory")] == []


def test_a_home_that_is_not_moved_is_read_as_before(project: Path, user: Path) -> None:
    study, clouds, tidy, prefer = asked(project, *LOADS, ("prefer", {"action": "list"}))
    assert [one["identity"] for one in (study, clouds, tidy)] == [
        f"user/local/{name}" for name in ("study@1.0.0", "clouds@1.0.0", "tidy@0.1.0")
    ]
    assert "memory_read" in str(prefer["tools"])
    assert prefer["path"] == str(user / "preferences.yaml")


def test_what_cannot_be_moved_stays_and_is_named(project: Path, user: Path) -> None:
    (user / "memory" / "knowledge" / "sky").mkdir(parents=True)
    (user / "memory" / "knowledge" / "sky" / "clouds.md").write_text("another")
    (user / "memory" / "skills").mkdir()
    (user / "memory" / "skills" / "tidy").symlink_to(user / "tools")
    (user / "knowledge" / "link.md").symlink_to(user / "tools" / "hello.sh")
    (user / "knowledge" / ".hidden").write_text("mine")
    os.mkfifo(user / "knowledge" / "pipe.md")
    before = snapshot(user)
    reasons = {
        "knowledge/.hidden": "cannot be changed",
        "knowledge/link.md": "leads through a link",
        "knowledge/pipe.md": "is not a plain file",
        "knowledge/sky/clouds.md": "is another file",
        "skills/tidy/SKILL.md": "leads through a link",
        "skills/tidy/scripts/tidy.sh": "leads through a link",
    }
    for answer in (migrated(project), migrated(project, apply=True)):
        rows = [as_object(one) for one in as_list(answer["files"])]
        kept = {as_text(one["path"]): as_text(one["reason"]) for one in rows if one["what"] == "keep"}
        assert kept.keys() == reasons.keys()
        assert [
            path for path, reason in reasons.items() if path != "knowledge/.hidden" and reason not in kept[path]
        ] == []
    assert all((user / path).exists() for path in reasons)
    assert (user / "memory/knowledge/sky/clouds.md").read_text() == "another"
    assert [*(user / "tools").iterdir()] == [user / "tools" / "hello.sh"]
    migrated(project, undo=True, apply=True)
    assert snapshot(user) == before


def test_what_was_changed_or_added_since_the_move_is_not_lost_by_an_undo(project: Path, user: Path) -> None:
    migrated(project, apply=True)
    (user / "memory/knowledge/sky/clouds.md").write_text("edited")
    (user / "memory/knowledge/sky/new.md").write_text("new")
    (user / "memory/directives/study.md").unlink()
    (user / "skills").mkdir()
    (user / "skills/tidy").mkdir()
    (user / "skills/tidy/SKILL.md").write_text("written meanwhile")
    undone = migrated(project, undo=True, apply=True)
    kept = {
        as_object(one)["path"]: as_object(one)["reason"] for one in as_list(undone["files"]) if as_object(one)["reason"]
    }
    assert kept == {
        "directives/study.md": "is gone",
        "skills/tidy/SKILL.md": f"{user}/skills/tidy/SKILL.md is another file",
    }
    assert (user / "knowledge/sky/clouds.md").read_text() == "edited"
    assert (user / "memory/knowledge/sky/new.md").read_text() == "new"
    assert (user / "memory/skills/tidy/SKILL.md").read_text() == SKILL
    (user / "skills/tidy/SKILL.md").unlink()
    migrated(project, undo=True, apply=True)
    assert (user / "skills/tidy/SKILL.md").read_text() == SKILL
    assert not (user / RECORD).exists()


def test_a_damaged_record_is_named_and_nothing_is_moved(project: Path, user: Path) -> None:
    migrated(project, apply=True)
    (user / RECORD).write_text("{")
    before = snapshot(user / "memory")
    refused = migrated(project, undo=True, apply=True)
    assert (refused["code"], RECORD in as_text(refused["message"])) == ("unavailable", True)
    assert snapshot(user / "memory") == before


EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.utime", "shutil.copyfile"}


def killed_at(step: int, act: Callable[[], object]) -> bool:
    """Do something in a process that is killed before its step of that number; return whether it was."""
    if (child := os.fork()) == 0:
        left = step

        def count(event: str, _: tuple[object, ...]) -> None:
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_move_that_is_killed_before_any_of_its_steps_is_completed_or_undone_by_doing_it_again(user: Path) -> None:
    memory = user / "memory"
    memory.mkdir()
    before = snapshot(user)
    move = MemoryMove(user, memory)
    move.move_there()
    moved = snapshot(memory)
    move.move_back()
    assert snapshot(user) == before

    def again(act: Callable[[], object], after: Snapshot) -> int:
        """Kill something before each of its steps in turn, and check what becomes of it."""
        for step in range(1_000):
            if not killed_at(step, act):
                return step
            if step % 2:
                move.move_there()
                assert snapshot(memory) == moved, step
            move.move_back()
            assert (snapshot(user), snapshot(memory)) == (before, {}), step
            if after:
                move.move_there()
        raise AssertionError

    assert again(move.move_there, {}) > 50
    move.move_there()
    assert again(move.move_back, moved) > 50
