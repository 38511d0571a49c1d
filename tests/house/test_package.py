"""The wheel: whole, and usable outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import EXTRAS
from kiwi_mcp.primitives.telemetry import start_tracing

MANIFEST = "tool_id: hello\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\nconfig: {entrypoint: main.sh}\n"


def test_the_messages_about_extras_name_the_packages_of_the_project(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {name: list(packages) for name, packages in EXTRAS.items()} == project["optional-dependencies"]


@pytest.mark.usefixtures("sandbox")
def test_the_wheel_works_in_an_environment_of_its_own(root: Path, tmp_path: Path) -> None:
    """The packages it depends on come from this environment, so that nothing is downloaded."""
    uv, venv, project = Path(sys.prefix, "bin", "uv"), tmp_path / "venv", tmp_path / "project"

    def run(*words: object, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [*map(str, words)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(uv, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", tmp_path, root)
    (wheel,) = tmp_path.glob("*.whl")
    files = (path for path in (root / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {str(path.relative_to(root / "src")) for path in files} <= set(zipfile.ZipFile(wheel).namelist())

    run(uv, "venv", "--python", sys.executable, venv)
    run(uv, "pip", "install", "--offline", "--no-deps", "--python", venv / "bin" / "python", wheel)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    tool = project / ".ai" / "tools" / "hello"
    tool.mkdir(parents=True)
    (tool / "tool.yaml").write_text(MANIFEST)
    (tool / "main.sh").write_text("echo hello\n")
    env = {**os.environ, "PYTHONPATH": ""}
    kiwi = venv / "bin" / "kiwi"

    assert "Everyday commands" in run(kiwi, "--help", env=env)
    assert run(kiwi, "run", "hello", "--project", project, env=env) == "hello\n"
    origin = run(venv / "bin" / "python", "-c", "import kiwi_mcp; print(kiwi_mcp.__file__)", env=env)
    assert origin.startswith(str(venv))


def test_a_named_collector_without_the_extra_is_answered_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_tracing() == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert "-m uv pip install 'opentelemetry-sdk>=1.30,<2'" in start_tracing()
