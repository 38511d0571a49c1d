"""Tools of one source share a scratch folder where their manifests say so; other sources have no way in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.drivers import process

READ = 'cat "$KIWI_SCRATCH/note"'
OTHERS = 'ls "$(dirname "$KIWI_SCRATCH")"'


def put(machine: Machine, name: str, script: str, **words: Json) -> None:
    """Write a tool that runs a shell script and has a shared scratch folder."""
    config: JsonObject = {"entrypoint": "main.sh", "scratch": "shared", **as_object(words.pop("config", {}))}
    manifest: JsonObject = {
        "tool_id": name, "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
        "description": f"Does {name}", "config": config, **words,
    }  # fmt: skip
    files: JsonObject = {"main.sh": f"{script}\n"}
    words_of: JsonObject = {"tool_type": "script", "executor": "bash_runtime", "manifest": manifest, "files": files}
    machine.do("create", name, words_of)


def vendor(machine: Machine, namespace: str, scripts: dict[str, str], shelf: Path) -> str:
    """Publish tools in a namespace, signed with the machine's key; return the key's fingerprint."""
    key = machine.ask("key", action="new").content["key"]
    for name, script in scripts.items():
        put(machine, name, script, namespace=namespace)
        machine.do("sign", name)
        machine.do("publish", name, {"namespace": namespace})
    machine.exchange("push", shelf)
    return as_text(as_object(key)["fingerprint"])


def run(machine: Machine, item: str) -> JsonObject:
    return machine.ask("execute", item_id=item).content


@pytest.fixture
def bob(a_machine: MakeMachine, sandbox: None) -> Machine:
    """A machine on which every tool may run."""
    machine = a_machine("bob", namespaces=["public"])
    machine.ask("approvals", action="add_rule", item="*")
    return machine


@pytest.fixture
def vendors(bob: Machine, a_machine: MakeMachine, tmp_path: Path) -> None:
    """Two publishers that bob trusts, with tools on his machine; one of them tries to pass for the other."""
    ann, eve = (a_machine(name, namespaces=["acme", "umbrella", "public"]) for name in ("ann", "eve"))
    memory = bob.user / "memory"
    probe = f'ls "{memory}" 2>&1; cat /proc/*/cmdline | tr "\\0" " "; echo; ls /proc | grep -c "^[0-9]"; ls "$HOME"'
    acme = {"writer": 'echo from acme > "$KIWI_SCRATCH/note"', "reader": READ, "probe": f"{probe}; {OTHERS}"}
    keys = {
        "acme": vendor(ann, "acme", acme, tmp_path / "acme"),
        "umbrella": vendor(eve, "umbrella", {"reader": READ, "spy": OTHERS}, tmp_path / "umbrella"),
    }
    for namespace, names in (("acme", tuple(acme)), ("umbrella", ("reader", "spy"))):
        for name in names:
            source: JsonObject = {"from": str(tmp_path / namespace), "trust_key": keys[namespace]}
            pulled = bob.ask("execute", action="pull", item_id=f"{namespace}/{name}", parameters=source)
            assert pulled.content["trust"] == "verified"


@pytest.mark.req("H2")
def test_tools_of_one_vendor_share_scratch_space_apart_from_kiwi(bob: Machine, vendors: None) -> None:
    memory = bob.user / "memory"
    memory.mkdir(exist_ok=True)
    (memory / "AGENT.md").write_text("Mine.\n")
    assert run(bob, "acme/writer")["status"] == "success"
    assert run(bob, "acme/reader")["result"] == "from acme"
    seen = as_text(run(bob, "acme/probe")["result"])
    assert "Mine" not in seen
    assert "AGENT.md" not in seen
    assert "python" not in seen  # Kiwi's own process
    assert f"cannot access '{memory}'" in seen
    # The processes of one sandbox, and the one folder of its group.
    count, *folders = [line for line in seen.splitlines() if line.isdigit() or len(line) == 64]
    assert int(count) < 10
    assert len(folders) == 1


@pytest.mark.req("H2", "H4")
@pytest.mark.case("TR-P01")
def test_no_other_source_reaches_the_scratch_folder(bob: Machine, vendors: None) -> None:
    run(bob, "acme/writer")
    refused = run(bob, "umbrella/reader")
    assert refused["code"] == "execution_failed"
    assert "No such file" in as_text(refused["message"])
    (mine,) = as_text(run(bob, "umbrella/spy")["result"]).split()
    (theirs,) = {path.name for path in (bob.cache / "scratch").iterdir()} - {mine}

    # An item of the project, whatever it says of itself: written by a model, unsigned, or signed by the owner.
    place = bob.cache / "scratch" / theirs
    named: JsonObject = {"entrypoint": "main.sh", "scratch": "shared", "env": {"KIWI_SCRATCH": str(place)}}
    manifest: JsonObject = {"version": "1.0.0", "description": "Names a folder", "config": named}
    words: JsonObject = {
        "tool_type": "script",
        "executor": "bash_runtime",
        "manifest": manifest,
        "files": {"main.sh": ""},
    }
    assert "may not be set by an item" in as_text(bob.try_to("create", "named", words).content["message"])
    put(bob, "spy", f"{OTHERS}; {READ}", namespace="acme", category="acme")
    for act in ("", "sign"):
        if act:
            bob.ask("key", action="new")
            bob.do(act, "spy")
        tried = run(bob, "project/local/spy")
        assert tried.get("result") is None
        assert theirs not in as_text(as_object(tried.get("logs")).get("stdout"))
    put(bob, "direct", f"cat {place}/note", needs={"read": [str(place)]})
    assert run(bob, "direct")["code"] == "not_permitted"


@pytest.mark.req("H2")
@pytest.mark.case("TR-P01")
def test_what_a_model_wrote_does_not_share_with_what_the_owner_wrote(bob: Machine) -> None:
    put(bob, "owners", 'echo private > "$KIWI_SCRATCH/note"')
    bob.ask("key", action="new")
    bob.do("sign", "owners")
    assert run(bob, "owners")["status"] == "success"
    put(bob, "models", READ)
    assert "No such file" in as_text(run(bob, "models").get("message"))


@pytest.mark.req("H2")
def test_an_unsigned_tool_has_no_scratch_folder(bob: Machine) -> None:
    manifest = 'tool_id: stray\ntool_type: script\nversion: "1.0.0"\nexecutor: bash_runtime\ndescription: Stray\n'
    bob.put("tools/stray/tool.yaml", f"{manifest}config: {{entrypoint: main.sh, scratch: shared}}\n")
    bob.put("tools/stray/main.sh", 'echo "$KIWI_SCRATCH"\n')
    refused = run(bob, "stray")
    assert refused["code"] == "not_permitted"
    assert "kiwi sign stray" in as_text(refused["suggestion"])
    assert not (bob.cache / "scratch").exists()


@pytest.mark.req("H2", "H4")
@pytest.mark.case("TR-P02")
def test_links_that_a_tool_leaves_behind_lead_nowhere(bob: Machine) -> None:
    secret = bob.home / "secret"
    secret.write_text("hidden\n")
    leave = f'cd "$KIWI_SCRATCH"; ln -s {secret} file; ln -s {bob.home} folder; ln -s /proc/1/root root'
    put(bob, "leaves", leave)
    put(bob, "follows", 'cd "$KIWI_SCRATCH"; cat file folder/secret root' + f"{secret}")
    assert run(bob, "leaves")["status"] == "success"
    found = run(bob, "follows")
    assert found["status"] == "error"
    assert "hidden" not in str(found)
    # A folder that was not used for a day is emptied: the links, and not what they lead to.
    (group,) = (bob.cache / "scratch").iterdir()
    os.utime(group, (1, 1))
    put(bob, "lists", 'ls -A "$KIWI_SCRATCH"; echo end')
    assert run(bob, "lists")["result"] == "end"
    assert secret.read_text() == "hidden\n"


@pytest.mark.req("H2", "H4")
@pytest.mark.case("TR-P02")
def test_a_link_in_place_of_the_folder_is_not_followed(bob: Machine, tmp_path: Path) -> None:
    put(bob, "writes", 'echo x > "$KIWI_SCRATCH/note"')
    assert run(bob, "writes")["status"] == "success"
    (group,) = (bob.cache / "scratch").iterdir()
    (group / "note").unlink()
    group.rmdir()
    (tmp_path / "elsewhere").mkdir()
    group.symlink_to(tmp_path / "elsewhere")
    assert run(bob, "writes")["code"] == "isolation_unavailable"
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.req("H2", "H4")
@pytest.mark.case("TR-P02")
def test_a_full_scratch_folder_stops_its_group_and_no_other(bob: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MOST_BYTES", 4_000_000)
    monkeypatch.setattr(process, "_MOST_FILES", 100)
    put(bob, "bytes", 'head -c 40000000 /dev/zero > "$KIWI_SCRATCH/big"; sleep 20')
    put(bob, "files", 'for i in $(seq 300); do : > "$KIWI_SCRATCH/$i"; done; sleep 20')
    put(bob, "next", "echo ran")
    for name in ("bytes", "files"):
        stopped = run(bob, name)
        assert "was stopped" in as_text(stopped["message"])
        assert run(bob, "next")["code"] == "too_large"
        (group,) = (bob.cache / "scratch").iterdir()
        os.utime(group, (1, 1))
        assert run(bob, "next")["result"] == "ran"
    run(bob, "bytes")
    put(bob, "owners", "echo ran")
    bob.ask("key", action="new")
    bob.do("sign", "owners")
    assert run(bob, "owners")["result"] == "ran"


@pytest.mark.req("H2")
def test_what_another_tool_deletes_meanwhile_does_not_stop_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, look = tmp_path / "group", os.scandir
    for name in ("a", "b"):
        (group / name / "inner").mkdir(parents=True)

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if path != str(group):
            monkeypatch.undo()
            for name in ("a", "b"):
                shutil.rmtree(group / name)
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert process._used(group)[1] == 2
    assert not (group / "a").exists()
