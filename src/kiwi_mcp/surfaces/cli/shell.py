"""One command at work: the project it is about, the kernel that answers it, and the options all commands share."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kiwi_mcp.domain.caller import Ask, Caller, nobody
from kiwi_mcp.domain.errors import NotFound
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.places import nearest_project
from kiwi_mcp.surfaces.cli.progress import reporting, unspun
from kiwi_mcp.surfaces.cli.show import show

IsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Project = Annotated[
    Path | None, typer.Option("--project", "-p", help="The project's folder; the nearest with an .ai folder otherwise.")
]
Location = Annotated[str | None, typer.Option("--location", help="project or user.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen, do nothing.")]
Item = Annotated[str, typer.Argument(help="A name, name@range, server/name, namespace/name, or full identity.")]


@dataclass(frozen=True, slots=True)
class Shell:
    """One command at work: which project it is about, and how its answer is shown."""

    project: Path
    is_json: bool

    def ask(self, verb: str, request: JsonObject, questions: Ask = nobody) -> Answer:
        """Send one request to the kernel and return its answer; `questions` are asked of the person meanwhile."""
        return asyncio.run(self._ask(verb, request, questions))

    async def _ask(self, verb: str, request: JsonObject, questions: Ask) -> Answer:
        async with self.opened() as kernel:
            return await self.call(kernel, verb, request, questions)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Kernel]:
        """Give the kernel that answers this command, for as long as it is at work."""
        # A tool must not outlive the command that runs it, however that is asked to end.
        task = asyncio.current_task()
        if task is not None:
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        kernel = Kernel(self.project, surface="cli")
        try:
            yield kernel
        finally:
            await kernel.aclose()

    async def call(self, kernel: Kernel, verb: str, request: JsonObject, questions: Ask = nobody) -> Answer:
        """Send one request to a kernel, and show how far it is meanwhile."""
        # Whoever is asked something on the way reads it in peace; the owner's word is asked for before it begins.
        is_quiet = self.is_json or (questions is not nobody and verb != "execute")
        with reporting(is_quiet=is_quiet) as report:
            return await kernel.call(verb, request, Caller(report, unspun(report, questions), is_owner=True))

    def parameters_of(self, item: str) -> JsonObject:
        """Return the schema of what an item takes, to read by it what was typed."""
        return asyncio.run(self._parameters_of(item))

    async def _parameters_of(self, item: str) -> JsonObject:
        async with self.opened() as kernel:
            return kernel.parameters_of(item)

    def tell(
        self,
        verb: str,
        request: JsonObject,
        *,
        view: str | None = None,
        is_raw: bool = False,
        questions: Ask = nobody,
    ) -> None:
        """Send one request, show its answer, and end with its exit code."""
        self.show(self.ask(verb, request, questions), view=view or verb, is_raw=is_raw)

    def show(self, answer: Answer, *, view: str, is_raw: bool = False) -> None:
        """Show an answer, and end with its exit code."""
        show(answer, verb=view, is_json=self.is_json, is_raw=is_raw)
        if answer.exit_code:
            raise typer.Exit(answer.exit_code)


def shell_for(project: Path | None, *, is_json: bool) -> Shell:
    """Return the shell for a project, the nearest one where none is named."""
    return Shell(here() / project if project else nearest_project(here()), is_json)


def here() -> Path:
    """Return the current folder."""
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise NotFound("The current folder no longer exists.", suggestion="Change to one that does.") from error
