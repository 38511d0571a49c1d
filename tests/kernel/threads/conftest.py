"""A project with a scripted model as its provider, and directives that threads run."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.scripted_model import ScriptedModel

from kiwi_mcp.domain.calls import NO_CALLER, Caller
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.engine.inline import Engine, InlineEngine, Live, S
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.threads import runner, wake
from kiwi_mcp.kernel.threads.worker import open_engine
from kiwi_mcp.kernel.verbs import schedule, thread

ENGINE = os.environ.get("KIWI_TEST_ENGINE", "")
"""The engine that the threads of a test use, inline if it is empty; set by `test_engines.py`."""
if ENGINE:
    import_module(ENGINE)  # its import starts a process, which not every test may

DIRECTIVE = """# {name}

```xml
<directive name="{name}" version="1.0.0">
  <metadata>
    <description>Do {name}</description>
    <category>test</category>
    <author>test</author>
    {model}
    <permissions>{permissions}</permissions>
    {limits}
  </metadata>
  <inputs><input name="topic" type="string" required="false" default="kiwis">What about</input></inputs>
  <process><step name="one"><action>Look into {{input:topic}}.</action></step></process>
  {outputs}
</directive>
```
"""
ALL_TOOLS = '<execute resource="tool" id="*"/><execute resource="kiwi-mcp" action="*"/><execute resource="spawn"/>'


@dataclass(frozen=True)
class Agents:
    """A home and a project in which threads run against a scripted model."""

    project: Path
    user: Path
    model: ScriptedModel
    kernel: Kernel

    def directive(
        self,
        name: str,
        *,
        permissions: str = ALL_TOOLS,
        limits: str = "",
        outputs: str = "",
        model: str = "",
        folder: Path | None = None,
    ) -> None:
        """Write a directive, into the owner's folder unless another one is named."""
        folder = (folder or self.user) / "directives"
        folder.mkdir(parents=True, exist_ok=True)
        text = DIRECTIVE.format(name=name, permissions=permissions, limits=limits, outputs=outputs, model=model)
        (folder / f"{name}.md").write_text(text)

    def bash_tool(self, name: str, script: str, **words: Json) -> None:
        """Write a bash tool of the owner that takes any parameters."""
        folder = self.user / "tools" / name
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            "tool_id": name,
            "tool_type": "script",
            "executor": "bash_runtime",
            "version": "1.0.0",
            "description": f"Runs {name}",
            "config": {"entrypoint": "main.sh"},
            "parameters": {"type": "object", "additionalProperties": True},
            **words,
        }
        (folder / "tool.yaml").write_text(json.dumps(manifest))
        (folder / "main.sh").write_text(script)

    async def call(self, verb: str, caller: Caller = NO_CALLER, **payload: Json) -> Answer:
        """Call a verb."""
        return await self.kernel.call(verb, payload, caller)

    async def read(self, verb: str, **payload: Json) -> dict[str, Any]:
        """Call a verb, and return the content of its answer."""
        return dict((await self.call(verb, NO_CALLER, **payload)).content)

    async def start(self, item: str, caller: Caller = NO_CALLER, **words: Json) -> dict[str, Any]:
        """Start a thread and wait until it ends or waits."""
        answer = await self.call("thread", caller, action="start", item_id=item, wait=True, **words)
        return dict(answer.content)

    async def events(self, thread_id: str) -> list[dict[str, Any]]:
        """Return the journal of a thread."""
        answer = await self.call("thread", action="show", thread_id=thread_id)
        return list(answer.content["events"])  # type: ignore[arg-type]  # it is a list

    async def sign(self, *names: str) -> None:
        """Sign items as the owner."""
        for name in names:
            answer = await self.call("execute", action="sign", item_id=name)
            assert not answer.is_error, answer.content


class FirstUse:
    """An engine that is opened when a thread first runs: a test may name another store before that."""

    def __init__(self, name: str, kernel: Kernel) -> None:
        self._name = name
        self._store = kernel._services.store
        self._opened: Engine | None = None

    async def run_to_wait(self, advance: Callable[[], Awaitable[S]], thread_id: str, lease: int) -> S:
        if self._opened is None:
            settings = self._store.settings
            process = self._store.kernel_lock.name()
            self._opened = open_engine(self._name, settings.url, settings.actor.name, process)
        return await self._opened.run_to_wait(advance, thread_id, lease)

    async def sweep(self, live: Live) -> None:
        if self._opened is not None:
            await self._opened.sweep(live)

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()
            self._opened = None


@pytest.fixture
async def agents(
    home: Path, project: Path, scripted_model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> AsyncIterator[Agents]:
    """Give a home with the scripted model as its only provider. Threads run in the kernel of the test, in no worker."""
    for module in (thread, schedule, wake):
        monkeypatch.setattr(module, "start_worker", lambda _: None)
    user = home / ".ai"
    (user / "tools").mkdir(parents=True, exist_ok=True)
    write_provider(user, scripted_model, "openai_chat")
    kernel = Kernel(project, user=user)
    if ENGINE:  # a process has one DBOS, so further kernels run threads inline
        engines = iter([FirstUse(ENGINE, kernel)])
        monkeypatch.setattr(runner, "InlineEngine", lambda: next(engines, None) or InlineEngine())
    yield Agents(project, user, scripted_model, kernel)
    await kernel.aclose()


def write_provider(
    user: Path, model: ScriptedModel, dialect: str, *, name: str = "scripted_llm", **config: Json
) -> None:
    """Write the scripted model as a provider, and permit its address; threads use the one named `scripted_llm`."""
    manifest: JsonObject = {
        "tool_id": name,
        "tool_type": "runtime",
        "executor": "http_client",
        "version": "1.0.0",
        "description": "A scripted model",
        "config": {**model.config(dialect), **config},
    }
    (user / "tools" / f"{name}.yaml").write_text(json.dumps(manifest))
    host = model.url(dialect).split("/")[2]
    (user / "policy.yaml").write_text(json.dumps({"hosts": {"allow": [host]}}))
    (user / "config.yaml").write_text("provider_adapter: scripted_llm\n")
    (user / ".env").write_text("SCRIPTED_KEY=scripted-key\n")
