"""`kiwi audit`: the list, and verification without Kiwi."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from tests.surfaces.cli.conftest import Ended, Kiwi

from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.store.open import open_database


@pytest.fixture
def kiwi(project: Path, kiwi: Kiwi) -> Kiwi:
    """Run a command in a project with one tool."""
    folder = project / ".ai" / "tools" / "say"
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(
        "tool_id: say\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\nconfig: {entrypoint: main.sh}\n"
    )
    (folder / "main.sh").write_text("echo hi\n")

    return kiwi


def test_an_empty_audit_log_is_reported(kiwi: Kiwi) -> None:
    assert kiwi("audit") == Ended(0, "", "No receipts to show.\n")
    verified = kiwi("audit", "verify")
    assert (verified.code, verified.out) == (0, "0 receipts, each as it was written\n")
    assert kiwi("audit", "export").out == ""


@pytest.mark.usefixtures("sandbox")
def test_the_list_shows_actor_action_and_outcome(kiwi: Kiwi) -> None:
    kiwi("run", "say")
    kiwi("run", "nothing")
    kiwi("sign", "say")
    lines = [line.split() for line in kiwi("audit").out.splitlines()]
    assert [(line[0], line[3:]) for line in lines] == [
        ("3", ["sign", "say", "success"]),
        ("2", ["run", "nothing", "refused", "tool_not_found"]),
        ("1", ["run", "say", "success"]),
    ]
    assert all(line[2].endswith("@cli") for line in lines)
    assert kiwi("audit", "list", "--action", "sign", "--since", "1h").out.split()[0] == "3"
    more = kiwi("audit", "list", "--limit", "1")
    assert (len(more.out.splitlines()), more.err) == (1, "hint: continue with `kiwi audit list --before 3`\n")
    shown = kiwi("audit", "show", "2").out
    assert "code:             tool_not_found\n" in shown
    assert json.loads(kiwi("audit", "show", "2", "--json").out)["code"] == "tool_not_found"
    missing = kiwi("audit", "show", "99")
    assert missing.code == 3
    assert "hint: List receipts with `kiwi audit`" in missing.err


@pytest.mark.usefixtures("sandbox")
def test_an_export_is_verified_without_kiwi(kiwi: Kiwi) -> None:
    kiwi("run", "say")
    kiwi("delete", "nothing")
    lines = kiwi("audit", "export").out.splitlines()
    assert len(lines) == 2
    previous = "-"
    for number, line in enumerate(lines, 1):
        receipt = json.loads(line)
        own = receipt.pop("hash")
        assert (receipt["seq"], receipt["previous"]) == (number, previous)
        said = json.dumps(receipt, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        assert sha256(b"kiwi-receipt-v1\0" + said.encode()).hexdigest() == own
        previous = own
    assert json.loads(kiwi("audit", "verify", "--json").out)["head"] == previous
    assert kiwi("audit", "export", "--after", "1").out.splitlines() == lines[1:]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DB-08")
def test_verify_names_the_changed_receipt_and_exits_with_5(kiwi: Kiwi, home: Path) -> None:
    for _ in range(2):
        kiwi("run", "say")
    database = open_database(default_url(home / ".ai"))
    with database.transaction() as transaction:
        transaction.write("drop trigger receipts_never_change")
        transaction.write("update receipts set actor = 'nobody' where seq = 1")
    database.close()
    ended = kiwi("audit", "verify")
    assert ended.code == 5
    assert ended.out.splitlines()[0] == "  ✗ receipt 1: it was changed after it was written"
    assert ended.out.splitlines()[-1] == "1 fault found in 2 receipts"
