"""Threads of earlier versions: listed, read and exported in both forms, whatever their files hold."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kiwi_mcp.kernel import Answer

RESEARCH, STORED, PLAN = "research_20250301_100000", "stored_20250301_100000", "plan-1741000000"
CREATED = "2025-03-01T10:00:00Z"


def write_old(project: Path) -> None:
    """Write a thread of each version, and damaged ones."""
    kiwi, ryeos = project / ".ai" / "threads", project / ".ai" / "agent" / "threads"
    for folder in (kiwi / RESEARCH, kiwi / "broken_20250301_100000", ryeos / PLAN):
        folder.mkdir(parents=True)
    columns = "thread_id, directive_id, parent_thread_id, status, created_at, updated_at"
    with sqlite3.connect(kiwi / "registry.db") as database:
        database.execute("pragma journal_mode = wal")
        database.execute(f"create table threads ({columns})")
        database.execute("create table thread_events (id, thread_id, ts, event_type, payload_json)")
        for name in (RESEARCH, STORED):
            row = (name, "research", None, "completed", CREATED, CREATED)
            database.execute("insert into threads values (?, ?, ?, ?, ?, ?)", row)
        event = (1, STORED, CREATED, "completed", json.dumps({"text": "From the database."}))
        database.execute("insert into thread_events values (?, ?, ?, ?, ?)", event)
    database.close()
    rows = [
        {"ts": CREATED, "type": "user_message", "text": "Look."},
        {"ts": CREATED, "type": "tool_call", "id": "c1", "tool": "fetch", "arguments": {"key": "s3cret-of-the-owner"}},
        {"ts": CREATED, "type": "tool_result", "id": "c1", "tool": "fetch", "content": "Birds."},
    ]
    lines = "\n".join(map(json.dumps, rows))
    (kiwi / RESEARCH / "transcript.jsonl").write_text(f"{lines}\nnot json\n")
    (kiwi / "broken_20250301_100000" / "transcript.jsonl").symlink_to("/etc/passwd")
    about = {"thread_id": PLAN, "directive": "plan", "status": "error", "created_at": CREATED,
             "model": "some", "cost": {"turns": 2, "spend": 0.01}, "outputs": {"plan": "none"}}  # fmt: skip
    (ryeos / PLAN / "thread.json").write_text(json.dumps(about))
    line: dict[str, Any] = {
        "timestamp": CREATED,
        "thread_id": PLAN,
        "event_type": "cognition_out",
        "payload": {"text": "Hm."},
    }
    (ryeos / PLAN / "transcript.jsonl").write_text(json.dumps(line))


def test_threads_of_both_earlier_versions_are_listed_shown_and_exported(
    project: Path, home: Path, ask: Callable[..., Answer]
) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / ".env").write_text("OLD_KEY=s3cret-of-the-owner\n")
    write_old(project)

    def read(**words: Any) -> dict[str, Any]:
        answer = ask("thread", **words)
        assert not answer.is_error, answer.content
        return dict(answer.content)

    old = read(action="list", old=True)["threads"]
    listed = {one["thread_id"]: (one["status"], one["item"], one["kind"]) for one in old}
    assert listed == {
        RESEARCH: ("completed", "research", "old, kiwi"),
        STORED: ("completed", "research", "old, kiwi"),
        PLAN: ("error", "plan", "old, ryeos"),
    }
    assert read(action="list")["threads"] == []
    shown = read(action="show", thread_id=RESEARCH)
    assert [event["kind"] for event in shown["events"]] == ["user_message", "tool_call", "tool_result"]
    assert "s3cret" not in json.dumps(shown)
    assert read(action="show", thread_id=STORED)["events"][0]["text"] == "From the database."
    assert read(action="show", thread_id=PLAN)["result"] == {"plan": "none"}

    lines = read(action="export", thread_id=RESEARCH, format="ryeos")["lines"]
    exported = [json.loads(line) for line in lines]
    assert [line["event_type"] for line in exported] == ["cognition_in", "tool_call_start", "tool_call_result"]
    assert exported[2]["payload"] == {"call_id": "c1", "tool": "fetch", "output": "Birds."}
    back = read(action="export", thread_id=PLAN, format="kiwi")["lines"]
    assert json.loads(back[0]) == {"ts": CREATED, "type": "assistant_message", "text": "Hm."}
    assert ask("thread", action="show", thread_id="broken_20250301_100000").content["code"] == "thread_not_found"


def test_a_cloned_repository_with_hostile_old_threads_reads_nothing_outside_and_breaks_no_command(
    project: Path, home: Path, ask: Callable[..., Answer], tmp_path: Path
) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / ".env").write_text("PIN=8214467390\n")
    folder, outside = project / ".ai" / "threads", tmp_path / "outside"
    outside.mkdir()
    (outside / "thread.json").write_text('{"status": "completed", "outputs": "OUTSIDE"}')
    (outside / "transcript.jsonl").write_text('{"ts": "2025", "type": "user_message", "text": "OUTSIDE"}')
    steps = "../" * len(folder.parts) + str(outside)[1:]
    texts = {
        "nan": '{"ts": "2025", "type": "error", "text": NaN}',
        "surrogate": '{"ts": "2025", "type": "error", "text": "\\ud800"}',
        "deep": f'{{"type": "error", "text": {"[" * 900}{"]" * 900}}}',
        "bomb": f'{{"type": "error", "text": [{"[]," * 4_000_000}[]]}}',
        "long": f'{{"type": "error", "text": {"9" * 4_000}}}',
    }
    for name, text in texts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "transcript.jsonl").write_text(f'{text}\n{{"type": "error", "pin": 8214467390}}\n')
    (folder / "linked").symlink_to(outside)
    for name, cost in {
        "word": '{"turns": "x", "cache_read_tokens": []}',
        "few": '{"turns": 1, "spend": 1e999}',
    }.items():
        (folder / name).mkdir()
        (folder / name / "thread.json").write_text(f'{{"status": "completed", "cost": {cost}}}')
    with sqlite3.connect(folder / "registry.db") as database:
        database.execute("create table threads (thread_id, status)")
        database.executemany("insert into threads values (?, 'completed')", [(str(outside),), (steps,), ("\x1b[2J",)])
    database.close()

    listed = ask("thread", action="list", old=True)
    threads: Any = listed.content["threads"]
    assert {one["thread_id"] for one in threads} == {*texts, "word", "few"} - {"few"}
    for name in (str(outside), steps, "linked"):
        assert ask("thread", action="show", thread_id=name).content["code"] == "thread_not_found"
        assert ask("thread", action="export", thread_id=name).content["code"] == "thread_not_found"
    for name in texts:
        events: Any = ask("thread", action="show", thread_id=name).content["events"]
        assert [event["pin"] for event in events if "pin" in event] in ([8214467390], [])
        assert not ask("thread", action="export", thread_id=name).is_error
