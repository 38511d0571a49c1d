"""A runtime with packages is data: Ruby with gems, and no line of Python."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.drivers.environments.packages import installer_env, named_indexes
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]

pytestmark = pytest.mark.skipif(not shutil.which("gem"), reason="Ruby is not installed")

RUNTIME = """\
tool_id: ruby_runtime
tool_type: runtime
executor: subprocess
version: 1.0.0
description: Runs Ruby files with the gems that they require
config:
  command: ruby
  args: ["{tool.files}/{tool.entrypoint}"]
  params_as: json_stdin
  env: {GEM_PATH: "{environment}"}
  packages:
    requirement: gem
    install:
      - gem
      - install
      - --clear-sources
      - --source
      - "{index}"
      - --install-dir
      - "{folder}"
      - --bindir
      - "{folder}/bin"
      - --no-document
      - "{packages}"
    bin: bin
    index: {variables: [GEM_INDEX]}
    hint: Install Ruby.
"""
TOOL: JsonObject = {
    "tool_id": "hail_tool",
    "tool_type": "script",
    "executor": "ruby_runtime",
    "version": "1.0.0",
    "description": "Hails somebody",
    "config": {"entrypoint": "main.rb", "requires": ["hail:1.2.0"]},
    "parameters": [{"name": "who", "type": "string", "required": True}],
}
MAIN = 'require "json"\nrequire "hail"\nputs Hail.hail(JSON.parse($stdin.read)["who"])\n'
GEM = """\
Gem::Specification.new do |s|
  s.name = "hail"
  s.version = "1.2.0"
  s.summary = "Hails"
  s.authors = ["a"]
  s.files = ["lib/hail.rb"]
end
"""


@pytest.fixture
def index(tmp_path: Path, processes: None) -> Path:
    """An index of gems in a folder, with one gem."""
    folder = tmp_path / "index"
    (folder / "gems").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "lib" / "hail.rb").write_text('module Hail\n  def self.hail(who) = "hail #{who}"\nend\n')
    (folder / "hail.gemspec").write_text(GEM)
    for command in (
        ["gem", "build", "-q", "hail.gemspec", "-o", "gems/hail-1.2.0.gem"],
        ["gem", "generate_index", "-q", "--directory", "."],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def add_tool(ask: Ask) -> None:
    for item_id, words in (
        ("ruby_runtime", {"content": RUNTIME}),
        ("hail_tool", {"manifest": TOOL, "files": {"main.rb": MAIN}}),
    ):
        made = ask("execute", action="create", item_id=item_id, parameters=words)
        assert made.content["status"] == "created", made.content


@pytest.mark.usefixtures("sandbox")
def test_a_tool_gets_the_gems_that_it_requires(ask: Ask, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_INDEX", f"file://{index}/")
    add_tool(ask)
    answer = ask("execute", item_id="hail_tool", parameters={"who": "Ada"}).content
    assert answer.get("result") == "hail Ada", answer


@pytest.mark.usefixtures("sandbox")
def test_without_an_index_that_the_owner_names_nothing_is_installed(ask: Ask) -> None:
    add_tool(ask)
    answer = ask("execute", item_id="hail_tool", parameters={"who": "Ada"})
    assert answer.is_error
    assert "GEM_INDEX" in str(answer.content["suggestion"])


def test_a_gem_that_is_an_option_or_an_address_is_refused(ask: Ask) -> None:
    add_tool(ask)
    for requires in ("--source=https://evil.test", "https://evil.test/a.gem", "../a"):
        config: JsonObject = {"entrypoint": "main.rb", "requires": [requires]}
        words: JsonObject = {"manifest": {**TOOL, "config": config}, "files": {"main.rb": MAIN}}
        answer = ask("execute", action="validate", item_id="other", parameters={**words, "tool_id": "hail_tool"})
        assert answer.is_error or answer.content["valid"] is False


def test_the_installers_of_a_foreign_runtime_get_no_setting_and_reach_only_named_indexes() -> None:
    environ = {
        "UV_INDEX_PRIVATE_PASSWORD": "secret",
        "npm_config__auth": "secret",
        "GEM_INDEX": "https://gems.example.com/",
        "WITH_PASSWORD": "https://ann:secret@gems.example.com/",
        "TOKEN": "secret",
        "LANG": "C",
    }
    assert installer_env(environ, is_shipped=False).keys() == {"LANG", "PATH", "NO_COLOR"}
    assert named_indexes(environ, ["GEM_INDEX"]).hosts == ("gems.example.com:443",)
    for name in ("WITH_PASSWORD", "TOKEN", "NOT_SET"):
        found = named_indexes(environ, [name])
        assert (found.hosts, found.places, found.variables) == ((), (), ())


@pytest.mark.parametrize(
    "words", ["build_if: (a+)+$", "lock: {file: l, as: lines, row: (a+)+$}", "index: {settings: uv}"]
)
def test_a_runtime_cannot_write_patterns_or_use_the_settings_of_other_programs(ask: Ask, words: str) -> None:
    """Kiwi itself would match such a pattern, and pass such settings on."""
    text = RUNTIME.replace("    index: {variables: [GEM_INDEX]}\n", f"    {words}\n")
    answer = ask("execute", action="validate", item_id="ruby_runtime", parameters={"content": text})
    assert (answer.is_error, answer.content["valid"]) == (False, False)
    places = [str(as_object(issue)["place"]) for issue in as_list(answer.content["issues"])]
    assert any(place.startswith(f"config.packages.{words.partition(':')[0]}") for place in places)
