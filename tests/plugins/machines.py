"""Machines for tests: separate homes with a project, settings and a kernel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel


class Machine:
    """One installation, used by one person."""

    def __init__(self, folder: Path, **words: Json) -> None:
        self.name = folder.name
        self.home = folder
        self.user = folder / ".ai"
        self.cache = folder / ".cache" / "kiwi"
        self.project = folder / "project"
        self.ai = self.project / ".ai"
        self.ai.mkdir(parents=True)
        self.user.mkdir()
        self.settle(**words)
        self.kernel = Kernel(self.project, user=self.user, cache=self.cache)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be at home here."""
        return {"HOME": str(self.home), "USER_SPACE": str(self.user), "XDG_CACHE_HOME": str(self.cache.parent)}

    def settle(self, **words: Json) -> None:
        """Write the owner's settings anew; the actor is named for the machine."""
        draft = self.user / "new.yaml"
        draft.write_text(json.dumps({"actor": self.name, **words}))
        draft.replace(self.user / "registry.yaml")

    def put(self, path: str, data: str | bytes, mode: int = 0o644) -> Path:
        """Write a file below the project's `.ai`."""
        place = self.ai / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data.encode() if isinstance(data, str) else data)
        place.chmod(mode)
        return place

    def script(self, name: str, version: str = "1.0.0", says: str = "hi", *, on: str = "bash_runtime") -> Path:
        """Write a tool that says something, and return its folder."""
        manifest = f'tool_id: {name}\ntool_type: script\nversion: "{version}"\nexecutor: "{on}"\n'
        manifest += f"description: Says a word called {name}\nconfig:\n  entrypoint: main.sh\n"
        self.put(f"tools/{name}/main.sh", f"echo {says}\n")
        return self.put(f"tools/{name}/tool.yaml", manifest).parent

    def vouch(self, name: str) -> None:
        """Sign a tool with a key of the owner, so that its origin is known without a store."""
        assert not self.ask("key", action="new").is_error
        self.do("sign", name)

    def ask(self, verb: str, **request: Json) -> Answer:
        """Send one request and return its answer."""
        (answer,) = self.ask_all([(verb, request)])
        return answer

    def ask_all(self, requests: Iterable[tuple[str, JsonObject]]) -> list[Answer]:
        """Send requests to a kernel that stays open, and return their answers."""

        async def call() -> list[Answer]:
            try:
                return [await self.kernel.call(verb, json.loads(json.dumps(request))) for verb, request in requests]
            finally:
                await self.kernel.aclose()

        return asyncio.run(call())

    def try_to(self, action: str, item: str | None = None, words: JsonObject | None = None, **request: Json) -> Answer:
        """Execute an action, and return its answer; what is pulled from elsewhere the owner takes unsigned too."""
        about: JsonObject = {"item_id": item} if item else {}
        said = {"accept_unsigned": True} if action == "pull" and "from" in (words or {}) else {}
        return self.ask("execute", action=action, parameters={**said, **(words or {})}, **about, **request)

    def do(self, action: str, item: str | None = None, words: JsonObject | None = None, **request: Json) -> JsonObject:
        """Execute an action that goes well, and return what it gave."""
        answer = self.try_to(action, item, words, **request)
        assert not answer.is_error, answer.content
        return answer.content

    def refused(self, action: str, item: str | None = None, words: JsonObject | None = None, **more: Json) -> str:
        """Execute an action that is refused, and return the code of the refusal."""
        answer = self.try_to(action, item, words, **more)
        assert answer.is_error, answer.content
        assert answer.content["suggestion"]
        return str(answer.content["code"])

    def publish(self, name: str, version: str = "1.0.0", says: str = "hi", **words: Json) -> JsonObject:
        """Publish a tool that says something, and leave nothing of it in the project."""
        folder = self.script(name, version, says)
        response = self.do("publish", name, words)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return response

    def exchange(self, action: str, remote: str | Path, **words: Json) -> JsonObject:
        """Push to a remote, or pull from one, also what is not signed."""
        said: JsonObject = {"accept_unsigned": True} if action == "pull" else {}
        answer = self.ask("registry", action=action, remote=str(remote), **{**said, **words})
        assert not answer.is_error, answer.content
        return answer.content

    def names(self, query: str, source: str = "all") -> list[str]:
        """Return what a search finds, by name."""
        found = self.ask("search", query=query, source=source).content
        return [str(as_object(one)["name"]) for one in as_list(found["results"])]


MakeMachine = Callable[..., Machine]


@pytest.fixture
def a_machine(tmp_path: Path, copy_isolation_report: Callable[[Path], None]) -> MakeMachine:
    """Make a machine with a name and settings."""

    def make(name: str, **words: Json) -> Machine:
        machine = Machine(tmp_path / name, **words)
        copy_isolation_report(machine.cache)
        return machine

    return make


@pytest.fixture
def files_of() -> Callable[[Path], Mapping[str, tuple[bytes, bool]]]:
    """Every file below a folder with its bytes, and whether it is executable."""

    def read(folder: Path) -> Mapping[str, tuple[bytes, bool]]:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {
            path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
            for path in files
        }

    return read
