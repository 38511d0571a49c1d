"""Sharing: items published by one machine are pulled by another unchanged, and private items are not visible."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from tests.plugins.machines import Machine, MakeMachine

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.store.open import open_database

Files = Callable[[Path], Mapping[str, tuple[bytes, bool]]]

RUNTIME = """# Comments stay.
tool_id: loud_runtime
tool_type: runtime
version: "1.2.0"
executor: subprocess        # the metal
description: Runs a Bash file, loudly
config:
  command: bash
  args: ["{tool.files}/{tool.entrypoint}"]
  result_from: stdout
"""
GREET = """# Written elsewhere, with other line ends.
tool_id: greet
tool_type: script
version: "1.0.0"
executor: loud_runtime@^1.0
description: Greets, with all it needs
config:
  entrypoint: main.sh
""".replace("\n", "\r\n")
MAIN = 'here=$(dirname "$0")\n"$here/bin/hello"; wc -c <"$here/large.txt"; wc -c <"$here/blob.bin"\n'
SAY = (
    '"""\ntool_id: say\ntool_type: script\nversion: "1.0.0"\nexecutor: python_runtime\ndescription: Say a word\n'
    'config:\n  lib_imports: [loud]\n"""\n\nfrom lib.loud import loud\n\n\n'
    "def main(word: str):\n    return loud(word)\n"
)
COUNT = json.dumps(
    {
        "tool_id": "count",
        "tool_type": "script",
        "version": "0.3.0",
        "executor": "python_runtime",
        "description": "Counts letters",
        "config": {"entrypoint": "main.py"},
    },
    indent=2,
)
DIRECTIVE = """# Say

```xml
<directive name="say_well" version="1.0.0">
  <metadata><description>Say a word well</description><model tier="fast" /><permissions /></metadata>
  <inputs><input name="word" type="string" required="true">The word</input></inputs>
  <process><step name="say"><action>Say it.</action></step></process>
</directive>
```
"""
KNOWLEDGE = "---\nid: words\ntitle: Words\nversion: 1.0.0\nentry_type: reference\n---\nA word is a word.\n"
ITEMS: list[tuple[str, str, str, JsonObject, Json]] = [
    ("tool", "greet", "tools/deep/greet", {}, "hello\n200000\n2560"),
    ("tool", "say", "tools/say.py", {"word": "kiwi"}, "KIWI"),
    ("tool", "count", "tools/count", {"word": "kiwi"}, 4),
    ("directive", "say_well", "directives/say_well.md", {"word": "kiwi"}, None),
    ("knowledge", "words", "knowledge/words.md", {}, None),
]
"""What is shared: its type, name and place, how it is run, and what it gives."""


def write_items(machine: Machine) -> None:
    """One item of every kind and shape."""
    machine.put("tools/deep/loud_runtime.yaml", RUNTIME)
    machine.put("tools/deep/greet/tool.yaml", GREET)
    machine.put("tools/deep/greet/main.sh", MAIN)
    machine.put("tools/deep/greet/bin/hello", "#!/bin/sh\necho hello\n", 0o755)
    machine.put("tools/deep/greet/large.txt", "x" * 200_000)
    machine.put("tools/deep/greet/blob.bin", bytes(range(256)) * 10)
    machine.put("tools/say.py", SAY)
    machine.put("tools/lib/loud.py", "def loud(word):\n    return word.upper()\n")
    machine.put("tools/count/tool.json", COUNT)
    machine.put("tools/count/main.py", "def main(word: str):\n    return len(word)\n")
    machine.put("directives/say_well.md", DIRECTIVE)
    machine.put("knowledge/words.md", KNOWLEDGE)


def publish_all(machine: Machine, **words: Json) -> None:
    write_items(machine)
    for item_type, name, *_ in ITEMS:
        machine.do("sign", name, item_type=item_type)
        machine.do("publish", name, words, item_type=item_type)


def same(path: Path, other: Path, files_of: Files) -> bool:
    """Whether two items are made of the same bytes."""
    if path.is_dir():
        return files_of(path) == files_of(other)
    return path.read_bytes() == other.read_bytes()


def check_all(ann: Machine, bob: Machine, files_of: Files) -> None:
    """Everything is on the other machine, runs there, is nowhere in its project, and is copied only when asked."""
    for item_type, name, _, parameters, result in ITEMS:
        ran = bob.do("run", name, parameters, item_type=item_type)
        assert as_text_of(ran["identity"]).startswith("registry/public/")
        assert ran["integrity"] in {"signed", "hashed", "published"}
        assert result is None or ran["result"] == result, ran
    assert not any((bob.ai / kind).exists() for kind in ("tools", "directives", "knowledge"))

    assert bob.do("verify")["issues"] == []
    for _, name, place, *_ in ITEMS:
        bob.ask("load", item_id=name, destination="project")
        assert same(ann.ai / place, bob.ai / place, lambda folder: without_seals(files_of(folder))), name
    assert (bob.ai / "tools/deep/loud_runtime.yaml").read_text() == (
        ann.ai / "tools/deep/loud_runtime.yaml"
    ).read_text()
    assert bob.do("run", "greet")["identity"] == "project/local/greet@1.0.0"


def without_seals(files: Mapping[str, tuple[bytes, bool]]) -> Mapping[str, tuple[bytes, bool]]:
    """All files but a signature that stands beside its file, which the digest does for what is published."""
    return {path: value for path, value in files.items() if not path.endswith(".sig")}


def as_text_of(value: Json) -> str:
    assert isinstance(value, str)
    return value


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-03", "K-ME-02", "N4")
def test_a_folder_carries_items_of_every_kind_to_another_machine(
    a_machine: MakeMachine, tmp_path: Path, files_of: Files
) -> None:
    ann, bob = a_machine("ann"), a_machine("bob")
    publish_all(ann)
    pushed = ann.exchange("push", tmp_path / "share")
    assert {"public/greet@1.0.0", "public/loud_runtime@1.2.0", "public/words@1.0.0"} <= {*as_list(pushed["new"])}

    pulled = bob.exchange("pull", tmp_path / "share")

    assert pulled["counts"] == {"new": 6, "unchanged": 0, "marked": 0}
    check_all(ann, bob, files_of)
    again = bob.exchange("pull", tmp_path / "share")
    assert as_object(again["counts"])["new"] == 0


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-01", "K-RG-03")
def test_a_team_shares_one_store(a_machine: MakeMachine, store_url: str, files_of: Files) -> None:
    ann, bob = a_machine("ann", url=store_url), a_machine("bob", url=store_url)
    publish_all(ann)

    check_all(ann, bob, files_of)


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-03", "K-ME-02")
def test_one_item_is_pulled_from_a_folder_with_all_it_depends_on(
    a_machine: MakeMachine, tmp_path: Path, files_of: Files
) -> None:
    share, ann, bob = str(tmp_path / "share"), a_machine("ann"), a_machine("bob")
    write_items(ann)
    planned = ann.do("publish", "greet", {"to": share}, dry_run=True)
    assert planned["also_published"] == ["public/loud_runtime@1.2.0"]
    assert ann.refused("versions", "greet") == "not_found"

    published = ann.do("publish", "greet", {"to": share, "changelog": "The first."})
    assert published["also_published"] == ["public/loud_runtime@1.2.0"]
    planned = bob.do("pull", "greet", {"from": share}, dry_run=True)
    assert (planned["status"], planned["digest"]) == ("planned", published["digest"])
    assert bob.refused("run", "greet") == "tool_not_found"

    pulled = bob.do("pull", "greet@^1", {"from": share})
    assert (pulled["digest"], pulled["closure"]) == (published["digest"], published["closure"])
    assert [as_object(link)["identity"] for link in as_list(pulled["chain"])] == [
        "registry/public/greet@1.0.0",
        "registry/public/loud_runtime@1.2.0",
        "builtin/kiwi/subprocess@1.0.0",
    ]
    assert bob.do("run", "greet")["result"] == ITEMS[0][4]
    bob.ask("load", item_id="greet", destination="project")
    assert files_of(bob.ai / "tools/deep/greet") == files_of(ann.ai / "tools/deep/greet")
    (first,) = as_list(bob.do("versions", "greet")["versions"])
    assert (as_object(first)["changelog"], as_object(first)["published_by"]) == ("The first.", "ann")


@contextmanager
def kiwi_up(machine: Machine) -> Iterator[str]:
    """Serve a machine's registry, as a real process does, and give its address."""
    command = [sys.executable, "-m", "kiwi_mcp", "up", "--port", "0", "--json"]
    with subprocess.Popen(
        command, env=environment(machine), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout
            yield json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")["url"]
        finally:
            server.kill()


def environment(machine: Machine) -> dict[str, str]:
    return {**os.environ, **machine.environment, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-03", "K-ME-02")
def test_a_served_registry_is_a_remote_for_others(
    a_machine: MakeMachine, files_of: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, ann, bob = a_machine("hub"), a_machine("ann"), a_machine("bob")
    monkeypatch.setenv("ANNS_TOKEN", TokenStore(hub.user).add("ann", ["public"], can_write=True))
    monkeypatch.setenv("BOBS_TOKEN", TokenStore(hub.user).add("bob", ["public"], can_write=False))
    with kiwi_up(hub) as url:
        ann.exchange("add", "hub", url=url, token="${ANNS_TOKEN}")
        bob.exchange("add", "hub", url=url, token="${BOBS_TOKEN}")
        publish_all(ann)
        ann.exchange("push", "hub")

        assert bob.do("pull", "greet", {"from": "hub"})["status"] == "pulled"
        bob.exchange("pull", "hub")
        check_all(ann, bob, files_of)

        bob.script("mine")
        bob.do("publish", "mine")
        assert "may read, and not write" in json.dumps(bob.ask("registry", action="push", remote="hub").content)
        assert ann.refused("pull", "mine", {"from": "hub"}) == "not_found"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-01")
@pytest.mark.case("SIG-01")
def test_a_changed_byte_in_a_store_is_refused_and_one_in_a_copy_is_repaired(
    a_machine: MakeMachine, store_url: str
) -> None:
    ann, bob = a_machine("ann", url=store_url), a_machine("bob", url=store_url)
    write_items(ann)
    ann.do("publish", "greet")
    shutil.rmtree(ann.ai / "tools")
    assert ann.do("run", "greet")["result"] == ITEMS[0][4]
    copies = [path for path in ann.cache.rglob("main.sh") if "registry" in path.parts]
    for path in copies:
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b"wc", b"rm"))
    assert copies
    assert ann.do("run", "greet")["result"] == ITEMS[0][4]

    database = open_database(store_url)
    with database.transaction() as transaction:
        on = " on tool_version_files" if database.dialect == "postgres" else ""
        transaction.write(f"drop trigger files_never_change{on}")  # as a holder of the file or the password can
        assert transaction.write(
            "update tool_version_files set content_text = ? where path = ?", ("echo evil\n", "main.sh")
        )
    database.close()

    assert bob.refused("run", "greet") == "content_hash_mismatch"
    assert bob.refused("pull", "greet") == "content_hash_mismatch"
    assert not list(bob.cache.rglob("main.sh"))
    response = ann.try_to("verify")
    assert (response.exit_code, response.content["status"]) == (5, "damaged")
    assert "public/greet@1.0.0" in json.dumps(response.content["issues"])


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-ME-02")
def test_an_mcp_client_publishes_and_pulls(a_machine: MakeMachine, tmp_path: Path) -> None:
    ann, bob = a_machine("ann"), a_machine("bob")
    write_items(ann)
    for machine in (ann, bob):
        machine.exchange("add", "share", url=str(tmp_path / "share"))

    async def ask(machine: Machine, *requests: JsonObject) -> list[dict[str, Any]]:
        command = ["-m", "kiwi_mcp", "serve", "--project", str(machine.project)]
        server = StdioServerParameters(command=sys.executable, args=command, env=environment(machine))
        async with asyncio.timeout(120), Client(stdio_client(server)) as client:
            answers = [await client.call_tool("execute", dict(request)) for request in requests]
        return [answer.structured_content or {} for answer in answers]

    published: list[JsonObject] = [
        {"action": "publish", "item_type": item_type, "item_id": name, "parameters": {"to": "share"}, "dry_run": is_dry}
        for item_type, name, *_ in ITEMS
        for is_dry in (True, False)
    ]
    response = asyncio.run(ask(ann, *published))
    assert [one.get("status") for one in response] == ["planned", "published"] * len(ITEMS), response

    for _, name, *_ in ITEMS:  # unsigned items need an approval of the owner
        bob.do("pull", name, {"from": "share"})
    pulled: list[JsonObject] = [
        {"action": "pull", "item_type": item_type, "item_id": name, "parameters": {"from": "share"}, "dry_run": is_dry}
        for item_type, name, *_ in ITEMS
        for is_dry in (True, False)
    ]
    response = asyncio.run(ask(bob, *pulled, {"item_id": "greet"}))
    assert [one.get("status") for one in response] == [*["planned", "pulled"] * len(ITEMS), "success"], response
