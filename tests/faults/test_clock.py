"""A clock that goes back one day: the order of records stays, nothing expires early, and every record still opens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp.domain.json import JsonObject, as_list, as_object

pytestmark = pytest.mark.usefixtures("processes")

DAY = 86_400
PROGRAM = """
import datetime, json, sys, time

behind = float(sys.argv[1])
real, real_ns = time.time, time.time_ns
time.time = lambda: real() - behind
time.time_ns = lambda: real_ns() - int(behind * 1_000_000_000)

class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

datetime.datetime = Clock  # before anything of Kiwi's is there to know the other one

import asyncio
from pathlib import Path
from kiwi_mcp.kernel import Kernel

async def story(requests):
    kernel = Kernel(Path(sys.argv[2]))
    try:
        return [(await kernel.call(verb, request)).content for verb, request in requests]
    finally:
        await kernel.aclose()

print(json.dumps(asyncio.run(story(json.loads(sys.argv[3])))))
"""
PAGE = "---\nid: page\ntitle: Page\nversion: {version}\nentry_type: reference\n---\n\n# Page\n\nAll of it.\n"
SIGN: tuple[str, JsonObject] = ("execute", {"action": "sign", "item_id": "page", "item_type": "knowledge"})
RUN: tuple[str, JsonObject] = ("execute", {"item_id": "page", "item_type": "knowledge"})
VERIFY: tuple[str, JsonObject] = ("audit", {"action": "verify"})
RECEIPTS: tuple[str, JsonObject] = ("audit", {"action": "list", "limit": 100})


def ask(project: Path, requests: Sequence[tuple[str, JsonObject]], *, behind: int = 0) -> list[JsonObject]:
    """Ask a kernel with a clock that is some seconds behind."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(behind), str(project), json.dumps(requests)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    answers: list[JsonObject] = json.loads(done.stdout)
    return answers


@pytest.fixture
def page(project: Path) -> Path:
    path = project / ".ai" / "knowledge" / "page.md"
    path.parent.mkdir()
    path.write_text(PAGE.format(version="1.0.0"))
    return path


@pytest.mark.case("DB-07")
def test_receipts_preserve_the_order_of_calls(page: Path, project: Path) -> None:
    first = ask(project, [SIGN, RUN, RUN])
    back = ask(project, [RUN, RUN, VERIFY, RECEIPTS], behind=DAY)
    again = ask(project, [RUN, VERIFY, RECEIPTS])

    assert all("error" not in answer for answer in (*first, *back, *again)), (first, back, again)
    assert (back[2]["status"], again[1]["status"]) == ("verified", "verified")
    made = [str(answer["run_id"]) for answer in (*first[1:], *back[:2], again[0])]
    rows = [as_object(row) for row in as_list(again[2]["receipts"])]
    response = [str(row["id"]) for row in sorted(rows, key=lambda row: int(str(row["seq"]))) if row["action"] == "run"]
    assert response == made


@pytest.mark.case("DB-07")
def test_a_signature_with_a_future_date_is_valid(page: Path, project: Path) -> None:
    (signed,) = ask(project, [SIGN])
    assert "error" not in signed, signed
    (ran,) = ask(project, [RUN], behind=DAY)
    page.write_text(page.read_text().replace("All of it.", "Something else."))
    (refused,) = ask(project, [RUN], behind=DAY)

    assert ran["status"] == "success", ran
    assert refused["code"] == "content_hash_mismatch", refused


@pytest.mark.case("DB-07")
def test_nothing_is_pruned_or_expires_early_and_no_age_is_negative(page: Path, project: Path) -> None:
    kept = ask(project, [SIGN, RUN, ("secrets", {"action": "set", "name": "KEY", "value": "s3cret-value-7f3a"})])
    listed = ask(project, [("runs", {"action": "list"}), ("secrets", {"action": "list"}), RUN], behind=DAY)

    assert str(kept[1]["run_id"]) in {str(as_object(row)["id"]) for row in as_list(listed[0]["runs"])}
    (secret,) = map(as_object, as_list(listed[1]["secrets"]))
    assert secret["age_days"] == 0
    assert listed[2]["status"] == "success"
