"""Caches can be lost and stored data can be moved: nothing is different afterwards."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from kiwi_mcp.catalog.release import seeds
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

MANIFEST = """\
tool_id: {name}
tool_type: {kind}
version: {version}
description: {says}
executor: {executor}
config:
"""
CONFIGS = {
    "script": "  entrypoint: main.sh\n",
    "runtime": "  command: bash\n  params_as: environment\n  result_from: stdout\n",
}


def write(project: Path, name: str, version: str, *, kind: str = "script", executor: str = "bash_runtime") -> None:
    """Write an item of that version into a project."""
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True, exist_ok=True)
    says = f"Says {name.replace('_', ' ')}."
    text = MANIFEST.format(name=name, kind=kind, version=version, executor=executor, says=says)
    (folder / "tool.yaml").write_text(text + CONFIGS[kind])
    if kind == "script":
        (folder / "main.sh").write_text(f"echo {name} {version}\n")
        (folder / "data.bin").write_bytes(b"\0\xff" * 300)


@pytest.fixture
def begin_anew(store_url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Use a store of each kind; the function given loses all of it, and the cache."""
    if not store_url.startswith("sqlite"):
        monkeypatch.setenv("KIWI_REGISTRY", store_url)

    def lose() -> None:
        shutil.rmtree(home / ".cache" / "kiwi")
        if store_url.startswith("sqlite"):
            shutil.rmtree(home / ".ai" / "state")
            return
        with psycopg.connect(store_url, autocommit=True, connect_timeout=10) as connection:
            connection.execute("drop schema public cascade")
            connection.execute("create schema public")

    return lose


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E1")
def test_a_deleted_catalog_is_rebuilt_identically(begin_anew: Callable[[], None], ask: Ask, project: Path) -> None:
    for name in ("say_hello", "say_goodbye"):
        write(project, name, "1.0.0")
    questions: list[JsonObject] = [
        {"query": "say hello"},
        {"query": "says", "source": "all", "limit": 50},
        {"query": "github", "source": "registry"},
    ]
    found = [ask("search", **question).content for question in questions]
    listed = as_list(ask("execute", action="list", parameters={"limit": 1000}).content["items"])
    digests = {str(as_object(one)["identity"]): as_object(one)["digest"] for one in listed}
    ran = ask("execute", item_id="say_hello").content
    assert digests
    assert all(as_list(answer["results"]) for answer in found)

    begin_anew()

    again = ask("execute", item_id="say_hello").content
    assert again["result"] == ran["result"] == "say_hello 1.0.0"
    assert again["identity"] == ran["identity"]
    assert [ask("search", **question).content for question in questions] == found
    listed = as_list(ask("execute", action="list", parameters={"limit": 1000}).content["items"])
    assert {str(as_object(one)["identity"]): as_object(one)["digest"] for one in listed} == digests
    assert ask("execute", action="verify").content["issues"] == []


@pytest.mark.req("K-RG-05")
def test_every_new_store_is_seeded_with_the_same_digests(
    begin_anew: Callable[[], None], ask: Ask, home: Path, store_url: str
) -> None:
    url = f"sqlite://{home}/.ai/state/registry.db" if store_url.startswith("sqlite") else store_url
    held = []
    for _ in range(2):
        assert "error" not in ask("registry").content
        ask("search", query="x")
        held.append(digests_in(url))
        (home / ".cache" / "kiwi").mkdir(parents=True, exist_ok=True)
        begin_anew()
    assert held[0] == held[1] == {str(one.name): one.digest for one in seeds()}


def digests_in(url: str) -> dict[str, str]:
    database = open_database(url)
    try:
        return {str(one.name): one.digest for one in Registry(database, Actor("ann")).find(is_all_versions=True)}
    finally:
        database.close()


class Machine:
    """A user with a home, a project and a store of their own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.project = folder / "project"
        (self.project / ".ai").mkdir(parents=True)
        user = folder / "home"
        user.mkdir()
        (user / "registry.yaml").write_text(f"url: {url}\nactor: ann\nnamespaces: [acme, public]\n")
        self._kernel = Kernel(self.project, user=user, cache=folder / "cache")
        self._runner = asyncio.Runner()

    def ask(self, verb: str, **words: Json) -> JsonObject:
        answer = self._runner.run(self._kernel.call(verb, words)).content
        assert "error" not in answer, answer
        return answer

    def act(self, action: str, item: str, **words: Json) -> JsonObject:
        return self.ask("execute", action=action, item_id=item, parameters=words)

    def close(self) -> None:
        self._runner.run(self._kernel.aclose())
        self._runner.close()


@pytest.fixture
def new_machine(new_url: Callable[[], str], tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def make(name: str) -> Machine:
        machines.append(Machine(tmp_path / name, new_url()))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


ITEMS = ("say", "shout", "my_runtime", "secret")


def fill(machine: Machine) -> None:
    """A history: versions with changelogs, on a runtime of their own, of which some were taken back."""
    write(machine.project, "my_runtime", "2.0.0", kind="runtime", executor="subprocess")
    for version in ("1.0.0", "1.1.0", "2.0.0-rc.1", "2.0.0"):
        write(machine.project, "say", version, executor="my_runtime")
        machine.act("publish", "say", changelog=f"What is new in {version}: ünïcode,\ntwo lines.")
    write(machine.project, "shout", "0.1.0")
    machine.act("publish", "shout", visibility="unlisted")
    write(machine.project, "secret", "1.0.0")
    machine.act("publish", "secret", visibility="private")
    machine.act("yank", "say@1.1.0", reason="It was too quiet.")
    machine.act("yank", "say@1.0.0", reason="A mistake.")
    machine.act("yank", "say@1.0.0", undo=True)
    machine.act("deprecate", "say@2.0.0", reason="Use shout.")
    machine.act("deprecate", "shout@0.1.0", reason="Too loud.")
    machine.act("deprecate", "shout@0.1.0", undo=True)


def histories(machine: Machine) -> list[JsonObject]:
    return [machine.act("versions", item) for item in ITEMS]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("N4")
def test_export_import_and_export_give_the_same_bytes(
    new_machine: Callable[[str], Machine], tmp_path: Path, tree: Tree
) -> None:
    here, there = new_machine("here"), new_machine("there")
    fill(here)
    first, second = tmp_path / "first", tmp_path / "second"

    here.ask("registry", action="push", remote=str(first), with_private=True)
    there.ask("registry", action="pull", remote=str(first), with_private=True, accept_unsigned=True)
    there.ask("registry", action="push", remote=str(second), with_private=True)

    assert tree(first)
    assert tree(second) == tree(first)
    assert histories(there) == histories(here)
    for item, one, other in (("say", "1.0.0", "2.0.0"), ("say", "1.1.0", "2.0.0-rc.1")):
        words: JsonObject = {"from": one, "to": other}
        assert there.act("diff", item, **words) == here.act("diff", item, **words)
    back = here.ask("registry", action="pull", remote=str(second), with_private=True)
    assert as_object(back["counts"])["new"] == as_object(back["counts"])["marked"] == 0
    assert there.ask("execute", action="verify")["issues"] == []
    assert there.ask("execute", item_id="say@1.0.0")["result"] == "say 1.0.0"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E1")
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_kernel_that_loses_its_store_writes_to_the_new_one(how: str, home: Path, project: Path, ask: Ask) -> None:
    (home / "machine").mkdir()
    file = home / "machine" / "stores" / "registry.db"
    machine = Machine(home / "machine" / "a", f"sqlite://{file}")
    write(machine.project, "say", "1.0.0")
    machine.act("publish", "say")

    shutil.move(file.parent, file.parent.with_name("aside"))
    if how == "replaced":
        other = Machine(home / "machine" / "b", f"sqlite://{file}")
        write(other.project, "say", "0.9.0")
        other.act("publish", "say")
        other.close()

    assert machine.ask("execute", item_id="say")["result"] == "say 1.0.0"
    write(machine.project, "say", "1.0.1")
    machine.act("publish", "say")
    machine.close()
    later = Machine(home / "machine" / "c", f"sqlite://{file}")
    response = as_list(later.act("versions", "say")["versions"])
    assert [as_object(one)["version"] for one in response] == ["1.0.1", *(["0.9.0"] if how == "replaced" else [])]
    assert len(as_list(later.ask("runs")["runs"])) == 1
    assert later.ask("execute", action="verify")["issues"] == []
    later.close()
