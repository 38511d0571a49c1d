"""The demo: each step is checked against its announcement."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from kiwi_mcp.domain.json import JsonObject

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = spec_from_file_location("kiwi_demo", SCRIPT)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def tour(demo: ModuleType, project: Path, *steps: JsonObject) -> tuple[int, str]:
    said = StringIO()
    (project / "demo").mkdir(exist_ok=True)
    stage = demo.Stage(project, 4321, Console(file=said, width=100))
    code: int = demo.take(steps, stage)
    return code, said.getvalue()


@pytest.mark.usefixtures("processes")
def test_a_tour_passes_if_every_step_does_what_it_announces(demo: ModuleType, project: Path) -> None:
    code, said = tour(
        demo,
        project,
        {"title": "A file", "writes": {"a.sh": "echo port PORT\n"}, "runs": [{"type": "bash a.sh", "shows": ["4321"]}]},
        {"title": "A refusal", "runs": [{"type": "echo no >&2; exit 6", "exits": 6, "shows": ["no"]}]},
    )
    assert code == 0
    assert "$ bash a.sh\nport 4321" in said
    assert "2 steps did what they say" in said


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ({"type": "echo some output; exit 3"}, "exit code 3, not 0"),
        ({"type": "echo some output", "exits": 5}, "exit code 0, not 5"),
        ({"type": "echo some output", "shows": ["more"]}, "does not show 'more'"),
        ({"type": "echo some output", "hides": ["some"]}, "shows 'some'"),
    ],
)
def test_a_step_that_does_something_else_ends_the_tour_and_is_shown_in_full(
    command: JsonObject, fault: str, demo: ModuleType, project: Path
) -> None:
    steps: list[JsonObject] = [{"title": "First", "runs": [command]}, {"title": "Never"}]
    code, said = tour(demo, project, *steps)
    assert code == 1
    assert "Step 1 did not do what it says: First" in said
    assert said.count("some output\n") >= 2
    assert fault in said
    assert "Never" not in said


@pytest.mark.usefixtures("processes")
def test_a_command_that_does_not_end_is_killed_with_all_its_children(
    demo: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "COMMAND_LIMIT", 0.5)
    code, said = tour(
        demo, project, {"title": "Endless", "runs": [{"type": "sleep 300 & echo $! > pid; echo waiting; wait"}]}
    )
    assert code == 1
    assert "waiting" in said
    assert "still ran after" in said
    pid = int((project / "demo" / "pid").read_text())
    assert has_ended(pid)


def has_ended(pid: int) -> bool:
    """Whether a process ends within five seconds, if it has not ended already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 5)[0])
    finally:
        os.close(handle)


def test_a_missing_program_is_named_with_its_fix(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "search_path", lambda: str(tmp_path))
    assert demo.main() == 1
    assert "`node` is not on this machine's PATH.\nhint: Run `make setup`" in capsys.readouterr().err


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_starts_from_nothing_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, temporary = tmp_path / "bin" / "kiwi", tmp_path / "temporary"
    program.parent.mkdir()
    temporary.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom kiwi_mcp.surfaces.start import main\n\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with subprocess.Popen(
        [sys.executable, SCRIPT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=360)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, said
    assert "did what they say" in said
    assert "\x1b[" not in said
    assert list(temporary.iterdir()) == []
