"""Dependency environments: selected by requirements and built once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.drivers.process.conftest import Bench

from kiwi_mcp.domain.errors import EnvironmentFailed, InvalidManifest
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.environments.packages import base_interpreter, installer_env

VERSION = "import iniconfig\ndef main():\n    return iniconfig.__name__"


def wanted(bench: Bench, files: Mapping[str, str], runtime: str = "python_runtime", **config: list[str]) -> JsonObject:
    plan = bench.bind(bench.chain(files, runtime, config=config))
    return as_object(plan.facts.get("environment"))


def test_a_tool_without_requirements_uses_the_interpreter_of_kiwi(bench: Bench) -> None:
    plan = bench.bind(bench.chain({"main.py": ""}, "python_runtime"))
    assert isinstance(plan.spec, ProcessSpec)
    assert plan.spec.argv[0] == base_interpreter()
    assert "environment" not in plan.facts


def test_requirements_are_collected_and_normalised(bench: Bench) -> None:
    files = {"main.py": "", "requirements.txt": "# what it needs\nHTTPX >= 0.27  # fast\n\nrich\n"}
    found = wanted(bench, files, requires=["My_Package[b] ; python_version > '3'", "rich"])
    assert found["packages"] == ["httpx>=0.27", "my-package[b];python_version > '3'", "rich"]


def test_tools_with_equal_requirements_share_an_environment(bench: Bench) -> None:
    one = wanted(bench, {"main.py": "1"}, requires=["b", "A-x==1"])["folder"]
    same = wanted(bench, {"main.py": "2"}, requires=["a_X == 1", "b"])["folder"]
    other = wanted(bench, {"main.py": "1"}, requires=["b", "a-x==2"])["folder"]
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    "line", ["-r other.txt", "--index-url=http://x", "a @ https://x/a.whl", "./local", "git+https://x"]
)
def test_requirements_that_are_urls_paths_or_options_are_refused(bench: Bench, line: str) -> None:
    with pytest.raises(InvalidManifest, match="is not a package"):
        wanted(bench, {"main.py": "", "requirements.txt": line})


def test_dependencies_of_node_come_from_package_json(bench: Bench) -> None:
    manifest = json.dumps({"dependencies": {"is-odd": "^3.0.0"}, "devDependencies": {"mocha": "*"}})
    found = wanted(bench, {"main.mjs": "", "package.json": manifest}, "node_runtime", requires=["@scope/a@1.x", "b"])
    assert found["packages"] == ["@scope/a@1.x", "b@*", "is-odd@^3.0.0"]
    for broken in ("{", json.dumps({"dependencies": {"a": "git+https://x"}})):
        with pytest.raises(InvalidManifest):
            wanted(bench, {"main.mjs": "", "package.json": broken}, "node_runtime")


def test_an_installer_sees_its_index_settings_and_no_secret() -> None:
    passed = {"UV_INDEX_URL": "u", "HTTPS_PROXY": "p", "no_proxy": "n", "SSL_CERT_FILE": "c"}
    seen = installer_env({**passed, "OPENAI_API_KEY": "k", "PYTHONPATH": "p", "PATH": "/bin"}, is_shipped=True)
    assert seen.keys() - {"UV_SYSTEM_CERTS", "NODE_EXTRA_CA_CERTS"} == {*passed, "PATH", "NO_COLOR"}
    assert installer_env({"PIP_INDEX_URL": "x"}, is_shipped=True)["UV_DEFAULT_INDEX"] == "x"


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("K-RT-03")
@pytest.mark.case("RACE-03")
def test_concurrent_calls_install_requirements_once(bench: Bench, tmp_path: Path) -> None:
    bench.reports.append("started")
    chain = bench.chain({"main.py": VERSION}, "python_runtime", config={"requires": ["iniconfig"]})

    async def at_once() -> list[Outcome]:
        return await asyncio.gather(*(bench.drive(chain) for _ in range(3)))

    assert [outcome.result for outcome in asyncio.run(at_once())] == ["iniconfig"] * 3
    assert bench.reports.count("Installing iniconfig") == 1
    folder = next((tmp_path / "cache" / "envs" / "python").glob("*/.complete")).parent
    before = folder.stat().st_mtime_ns, (folder / ".complete").stat().st_mtime_ns
    other = bench.chain(
        {"main.py": VERSION, "b.py": ""}, "python_runtime", tool_id="other", config={"requires": ["Iniconfig"]}
    )
    assert bench.run(other).result == "iniconfig"
    assert (folder.stat().st_mtime_ns, (folder / ".complete").stat().st_mtime_ns) == before


POISONER = """
import os
import iniconfig
import pathlib

def main(caches):
    found = {}
    places = [os.path.dirname(iniconfig.__file__), *caches]
    for place in places:
        try:
            (pathlib.Path(place) / "poison.py").write_text("x")
            found[place] = "written"
        except OSError as fault:
            found[place] = fault.strerror
    return found
"""


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.case("RACE-04")
@pytest.mark.usefixtures("loopback")
def test_a_sandboxed_tool_changes_neither_its_environment_nor_a_cache(bench: Bench, tmp_path: Path) -> None:
    chain = bench.chain({"main.py": POISONER}, "python_runtime", config={"requires": ["iniconfig"]})
    tool = replace(chain.tool, manifest=replace(chain.tool.manifest, extra={"isolation": "sandboxed"}))
    caches = [tmp_path / "cache" / "packages" / name for name in ("uv", "npm")]
    caches += [Path.home() / ".cache" / "uv", Path.home() / ".npm", Path.home() / ".cache" / "pip"]
    for folder in caches:
        folder.mkdir(parents=True, exist_ok=True)
    outcome = bench.run(replace(chain, links=(tool, *chain.links[1:])), {"caches": [*map(str, caches)]})
    tried = as_object(outcome.result)
    assert len(tried) == 1 + len(caches), outcome.message
    assert "written" not in tried.values()
    assert not [*tmp_path.rglob("poison.py")]


SENTIMENT = """
from textblob import TextBlob
import json
import sys

def run(text):
    blob = TextBlob(text)
    return {"polarity": blob.sentiment.polarity, "subjectivity": blob.sentiment.subjectivity}

if __name__ == "__main__":
    result = run(sys.argv[1])
    print(json.dumps(result))
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("K-RT-02", "K-RT-03")
def test_the_sentiment_tool_returns_the_result_of_run(bench: Bench) -> None:
    chain = bench.chain({"main.py": SENTIMENT}, "python_runtime", config={"requires": ["textblob"]})
    outcome = bench.run(chain, {"text": "What a wonderful day"})
    assert outcome.status == "success"
    assert as_object(outcome.result) == {"polarity": 1.0, "subjectivity": 1.0}


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("K-RT-03")
def test_an_environment_without_its_interpreter_is_rebuilt(bench: Bench, tmp_path: Path) -> None:
    chain = bench.chain({"main.py": VERSION}, "python_runtime", config={"requires": ["iniconfig"]})
    assert bench.run(chain).result == "iniconfig"
    (next((tmp_path / "cache" / "envs" / "python").glob("*/.complete")).parent / "bin" / "python").unlink()
    assert bench.run(chain).result == "iniconfig"


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
def test_a_package_that_does_not_exist_is_an_error_that_quotes_the_installer(bench: Bench) -> None:
    chain = bench.chain({"main.py": ""}, "python_runtime", config={"requires": ["iniconfig==0.0.0.1"]})
    with pytest.raises(EnvironmentFailed, match="iniconfig"):
        bench.run(chain)


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("K-RT-03")
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("main.mjs", "import isNumber from 'is-number'; export const main = ({ n }) => isNumber(n);"),
        ("main.cjs", "const isNumber = require('is-number'); exports.main = ({ n }) => isNumber(n);"),
    ],
)
def test_node_modules_are_found_by_import_and_require(bench: Bench, name: str, source: str) -> None:
    manifest = json.dumps({"dependencies": {"is-number": "^7.0.0"}})
    chain = bench.chain({name: source, "package.json": manifest}, "node_runtime")
    assert bench.run(chain, {"n": "12"}).result is True
    assert bench.run(chain, {"n": "x"}).result is False


@pytest.mark.usefixtures("processes")
def test_no_installer_runs_without_requirements(bench: Bench, tmp_path: Path) -> None:
    assert bench.run(bench.chain({"main.py": "def main():\n    return 1"}, "python_runtime")).result == 1
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == ["tools"]
