"""Skill folders: taken over and given back byte for byte, shared with the directive that names them, read over MCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import build_server
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

pytestmark = pytest.mark.usefixtures("processes", "home")
DIRECTIVE = """---
```xml
<directive name="fill" version="1.0.0"><metadata><description>Fill</description><category>test</category>
<author>test</author><skills><skill>pdf-forms</skill></skills><permissions><search>*</search></permissions></metadata>
<process><step><action>Go.</action></step></process></directive>
```
"""


def public_skill(root: Path) -> Path:
    """Write a skill as others publish it: foreign keys, an executable script, a picture, odd line ends."""
    text = (
        "---\r\nname: pdf-forms\r\ndescription: Fills PDF forms: all of them\r\nversion: '1.0'\r\nlicense: MIT\r\n"
        "allowed-tools: Read, Bash(pdftk:*)\r\nmodel: opus\r\n---\r\n# Forms\r\n\r\nRun scripts/fill.py.\r\n"
    ).replace("Fills PDF forms: all of them", '"Fills PDF forms: all of them"')
    folder = root / "pdf-forms"
    (folder / "scripts").mkdir(parents=True)
    (folder / "assets").mkdir()
    (folder / "SKILL.md").write_bytes(text.encode())
    (folder / "scripts" / "fill.py").write_text("#!/usr/bin/env python3\nprint('filled')\n")
    (folder / "scripts" / "fill.py").chmod(0o755)
    (folder / "assets" / "form.png").write_bytes(bytes(range(256)))
    return folder


def content(folder: Path) -> dict[str, tuple[bytes, bool]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in sorted(files)
    }


@pytest.fixture
async def kernel(project: Path, anyio_backend: str) -> Any:
    kernel = Kernel(project)
    yield kernel
    await kernel.aclose()


async def do(kernel: Kernel, verb: str, **words: Any) -> dict[str, Any]:
    answer = await kernel.call(verb, words, Caller(is_owner=True))
    assert not answer.is_error, answer.content
    return dict(answer.content)


@pytest.mark.req("K-DI-04")
async def test_a_published_skill_works_unchanged_and_goes_out_byte_for_byte(
    kernel: Kernel, project: Path, tmp_path: Path
) -> None:
    published = public_skill(tmp_path / "published")
    (published / "assets" / "leak").symlink_to("/etc/hostname")
    made = await do(kernel, "skill", action="import", path=str(published))
    assert any("leak" in warning for warning in made["warnings"])
    assert not (project / ".ai/skills/pdf-forms/assets/leak").exists()
    (published / "assets" / "leak").unlink()

    checked = await do(kernel, "execute", action="validate", item_id="pdf-forms", item_type="skill")
    assert checked["valid"], checked
    await do(kernel, "execute", action="sign", item_id="pdf-forms", item_type="skill")
    loaded = await do(kernel, "execute", item_id="skill", parameters={"name": "pdf-forms"})
    assert loaded["result"]["missing_tools"] == ["Read", "Bash(pdftk:*)"]
    assert loaded["result"]["files"] == ["assets/form.png", "scripts/fill.py"]
    exported = await do(kernel, "skill", action="export", item_id="pdf-forms", path=str(tmp_path / "out"))
    assert content(Path(exported["path"])) == content(published)
    found = await do(kernel, "search", query="fill a form", item_type="skill")
    assert found["results"][0]["identity"] == "project/local/pdf-forms@1.0.0"

    again = await kernel.call("skill", {"action": "import", "path": str(published)}, Caller(is_owner=True))
    nothing = await kernel.call("skill", {"action": "import", "path": str(tmp_path)}, Caller(is_owner=True))
    assert (again.content["code"], nothing.content["code"]) == ("already_exists", "not_found")
    model = await kernel.call("skill", {"action": "import", "path": str(published)}, Caller(client="a model", name="m"))
    assert model.is_error


@pytest.mark.req("K-DI-04")
async def test_the_skills_of_a_directive_are_published_and_copied_with_it(
    kernel: Kernel, project: Path, tmp_path: Path, home: Path
) -> None:
    await do(kernel, "skill", action="import", path=str(public_skill(tmp_path)))
    (project / ".ai" / "directives").mkdir(exist_ok=True)
    (project / ".ai" / "directives" / "fill.md").write_text(DIRECTIVE)
    for name in ("pdf-forms", "fill"):
        await do(kernel, "execute", action="sign", item_id=name)
    await do(kernel, "execute", action="publish", item_id="fill", item_type="directive")
    sealed = await do(kernel, "load", item_id="pdf-forms", item_type="skill", source="registry", file="SKILL.md")
    assert sealed["content"].encode() == (project / ".ai/skills/pdf-forms/SKILL.md").read_bytes()
    copied = await do(kernel, "load", item_id="project/local/fill", item_type="directive", destination="user")
    assert copied["also_copied"] == ["pdf-forms"]
    assert content(home / ".ai/skills/pdf-forms") == content(project / ".ai/skills/pdf-forms")


async def test_a_client_reads_skills_as_prompts_and_resources(project: Path, tmp_path: Path, kernel: Kernel) -> None:
    await do(kernel, "skill", action="import", path=str(public_skill(tmp_path)))
    calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=lambda _: "tester")
    changes = ToolListWatcher(kernel)
    async with Client(build_server(kernel, calls=calls, changes=changes)) as client:
        prompts = {one.name: one for one in (await client.list_prompts()).prompts}
        assert prompts["pdf-forms"].description == "Fills PDF forms: all of them"
        (message,) = (await client.get_prompt("pdf-forms")).messages
        assert message.content.text.startswith("# Forms")  # type: ignore[union-attr]  # it is a text
        (skill,) = (await client.read_resource("kiwi://skill/pdf-forms")).contents
        (script,) = (await client.read_resource("kiwi://skill/pdf-forms/scripts/fill.py")).contents
        assert skill.text.startswith("# Forms")  # type: ignore[union-attr]  # it is a text
        assert "print('filled')" in script.text  # type: ignore[union-attr]  # it is a text
    await changes.aclose()
    await calls.aclose()


async def test_a_name_that_no_skill_can_have_is_named_as_it_was_written(kernel: Kernel) -> None:
    files = {"SKILL.md": "---\nname: Big_Name\ndescription: Fills forms\n---\nFill it.\n"}
    request: dict[str, Any] = {
        "item_type": "skill",
        "action": "create",
        "item_id": "Big_Name",
        "parameters": {"files": files},
    }
    refused: dict[str, Any] = dict((await kernel.call("execute", request, Caller(is_owner=True))).content)
    assert refused["code"] == "invalid_manifest"
    assert "'Big_Name' cannot name an item" in refused["message"]
