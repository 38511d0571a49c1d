"""A test bench for the process driver: tools in a project, run by the built-in runtimes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from kiwi_mcp import data
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, ToolFile, TypeTraits
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome, Report, silent
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers.process import create_driver
from kiwi_mcp.manifest.document import read_yaml

BUILT_IN = Path(str(data.__file__)).parent / "tools"
SUBPROCESS = Tool(
    Manifest("subprocess", "primitive", "1.0.0"),
    Location("builtin", BUILT_IN / "subprocess.yaml", BUILT_IN),
    digest="0",
)


def read_files(root: Path) -> tuple[ToolFile, ...]:
    """The files below a folder, as a catalog would list them."""
    return tuple(
        ToolFile(
            path=path.relative_to(root).as_posix(),
            sha256=sha256(path.read_bytes()).hexdigest(),
            size=path.stat().st_size,
            is_executable=bool(path.stat().st_mode & 0o100),
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    )


def digest(files: tuple[ToolFile, ...], *more: str) -> str:
    listed = [f"{file.path} {file.sha256} {file.is_executable}" for file in files]
    return sha256("\n".join([*listed, *more]).encode()).hexdigest()


def runtime_from(text: str, *, root: Path, has_files: bool) -> Tool:
    written = as_object(read_yaml(text, what="runtime").value)
    files = read_files(root) if has_files else ()
    manifest = Manifest(
        tool_id=as_text(written["tool_id"]),
        tool_type="runtime",
        version=as_text(written["version"]),
        executor="subprocess",
        config=as_object(written["config"]),
        env_config=as_object(written.get("env_config")),
    )
    return Tool(manifest, Location("builtin", root / "tool.yaml", root), files, digest(files, text))


@dataclass(frozen=True)
class Bench:
    """A project in which tools are written and run."""

    space: Space
    reports: list[str] = field(default_factory=list)

    def built_in(self, name: str) -> Tool:
        """A runtime that ships."""
        folder = BUILT_IN / "runtimes" / name
        if folder.is_dir():
            return runtime_from((folder / "tool.yaml").read_text(), root=folder, has_files=True)
        return runtime_from(folder.with_suffix(".yaml").read_text(), root=folder.parent, has_files=False)

    def runtime(self, text: str) -> Tool:
        """A runtime that an author wrote."""
        return runtime_from(text, root=self.space.project, has_files=False)

    def chain(
        self,
        files: Mapping[str, str | bytes],
        runtime: str | Tool,
        *,
        tool_id: str = "probe",
        config: JsonObject | None = None,
        parameters: JsonObject | None = None,
    ) -> Chain:
        """A tool with these files, the first of which is its entrypoint."""
        root = self.space.project / ".ai" / "tools" / tool_id
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
        root.mkdir(parents=True, exist_ok=True)
        entrypoint: dict[str, Json] = {"entrypoint": next(iter(files))} if files else {}
        below = self.built_in(runtime) if isinstance(runtime, str) else runtime
        manifest = Manifest(
            tool_id=tool_id,
            tool_type="script",
            version="1.0.0",
            executor=below.id,
            config={**entrypoint, **(config or {})},
            parameters=parameters or {},
        )
        listed = read_files(root)
        tool = Tool(manifest, Location("project", root / "tool.yaml", root), listed, digest(listed, str(config)))
        return Chain((tool, below, SUBPROCESS), (TypeTraits("process", "call"), TypeTraits(), TypeTraits()))

    def bind(self, chain: Chain, inputs: JsonObject | None = None) -> Plan:
        """The plan of a chain, in the sandbox that its manifests ask for; the kernel adds what its origin asks for."""
        plan = create_driver().bind(chain, inputs or {}, self.space)
        return replace(plan, profile=SandboxProfile(chain.isolation, provenance="owner_pinned"))

    async def drive(
        self, chain: Chain, inputs: JsonObject | None = None, *, secrets: Mapping[str, str] | None = None
    ) -> Outcome:
        plan = self.bind(chain, inputs)
        report: Report = (lambda progress: self.reports.append(progress.message)) if self.reports else silent
        return await create_driver().drive(
            plan, chain, self.space, secrets=secrets or {}, caller=Caller(report), dispatch=AsyncMock()
        )

    def run(
        self, chain: Chain, inputs: JsonObject | None = None, *, secrets: Mapping[str, str] | None = None
    ) -> Outcome:
        return asyncio.run(self.drive(chain, inputs, secrets=secrets))


@pytest.fixture
def space(project: Path, home: Path, tmp_path: Path) -> Space:
    return Space(project=project, user=home / ".ai", cache=tmp_path / "cache")


@pytest.fixture
def bench(space: Space) -> Bench:
    return Bench(space)
