"""The manifests of the seed documents: every one is accepted unchanged, and those with all parts run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
Serve = Callable[..., tuple[str, list[JsonObject]]]

SEEDS = Path(__file__).parents[1] / "data" / "seeds"
MANIFESTS = sorted(path.name for path in SEEDS.glob("*.yaml") if path.name != "004_01_my_tool.yaml")
REQUESTS = sorted(path.name for path in SEEDS.glob("*.json"))
SERVERS = ("000_12_supabase_mcp.yaml", "000_13_github_mcp.yaml")
BESIDE = {"main.py": "def main(**parameters):\n    return parameters\n", "README.md": "# Text\n\nRead me.\n"}
TOPIC = "000_01_research_topic.yaml"
"""The directive that the threads of the seeds name."""
JSON_TYPE = {"content-type": "application/json"}


def seed(name: str) -> JsonObject:
    read: JsonObject = json.loads((SEEDS / name).read_text(encoding="utf-8"))
    return read


def place(project: Path, name: str, files: Mapping[str, str]) -> Path:
    """Put a seed where its author would: its manifest in a folder with the files it speaks of."""
    folder = project / ".ai" / "tools" / Path(name).stem
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_bytes((SEEDS / name).read_bytes())
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def real_rustc() -> str:
    """Where the compiler itself is: a version manager's shim looks for it below a home that tests do not have."""
    rustup = shutil.which("rustup")
    if rustup is None:
        return ""
    env = {"HOME": str(Path(rustup).parents[2]), "PATH": os.environ["PATH"]}
    found = subprocess.run([rustup, "which", "rustc"], env=env, capture_output=True, check=True, timeout=120)
    return str(Path(found.stdout.decode().strip()).parent)


def reply(value: object) -> Callable[[JsonObject], tuple[int, Mapping[str, str], bytes]]:
    return lambda _: (200, JSON_TYPE, json.dumps(value).encode())


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-01")
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_seed_manifest_is_accepted_unchanged(name: str, project: Path, ask: Ask) -> None:
    for server in SERVERS:
        if server != name:
            place(project, server, {})
    for shared in ("http_session", "proxy_pool"):
        path = project / ".ai" / "tools" / "lib" / f"{shared}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    if name != TOPIC:
        place(project, TOPIC, {"directive.md": "Research {input:topic}.\n"})
    folder = place(project, name, BESIDE)

    answer = ask("execute", action="validate", parameters={"path": str(folder)})

    assert answer.content["issues"] == []
    assert answer.content["status"] == "valid"


@pytest.mark.req("K-TY-01")
def test_the_template_seed_is_accepted_with_the_choices_listed(ask: Ask) -> None:
    text = (SEEDS / "004_01_my_tool.yaml").read_text(encoding="utf-8")

    answer = ask("execute", action="validate", parameters={"content": text, "filename": "my_tool.yaml"})

    assert answer.content["status"] == "valid"
    assert as_object(as_list(answer.content["warnings"])[0])["place"] == "tool_type"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02", "K-TY-01")
@pytest.mark.parametrize("name", REQUESTS)
def test_every_create_request_of_the_seeds_makes_a_tool_that_loads(name: str, ask: Ask) -> None:
    request = seed(name)

    created = ask("execute", **request)
    loaded = ask("load", item_id=created.content["tool_id"])

    assert created.content["status"] == "created"
    words = as_object(request["parameters"])
    metadata = as_object(loaded.content["metadata"])
    assert metadata["tool_type"] == words["tool_type"]
    assert metadata["executor_id"] == words["executor"]
    assert metadata["description"] == as_object(words["manifest"])["description"]


@pytest.mark.req("K-AP-01")
@pytest.mark.parametrize("name", ["000_20_weather_forecast.yaml", "004_03_weather_forecast.yaml"])
def test_the_weather_tool_returns_the_first_seven_days(
    name: str, project: Path, ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [{"day": number, "max": 20 + number} for number in range(10)]
    url, seen = serve(reply({"forecast": {"daily": days}}))
    text = (SEEDS / name).read_text(encoding="utf-8").replace("https://api.weather.com", url)
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "weather_forecast.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("WEATHER_API_KEY", "canary-weather-key")

    ask("execute", action="sign", item_id="weather_forecast")
    answer = ask("execute", item_id="weather_forecast", parameters={"lat": 52.52, "lon": -13.4})

    assert answer.content["result"] == days[:7]
    assert seen[0]["method"] == "GET"
    assert seen[0]["path"] == "/v1/forecast?lat=52.52&lon=-13.4&units=metric"
    assert as_object(seen[0]["headers"])["x-api-key"] == "canary-weather-key"


@pytest.mark.req("K-AP-01")
def test_the_slack_tool_posts_to_the_configured_url(
    project: Path, ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = serve(lambda _: (200, {"content-type": "text/html"}, b"ok"))
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "slack.yaml").write_bytes((SEEDS / "000_21_slack_webhook.yaml").read_bytes())
    monkeypatch.setenv("SLACK_WEBHOOK_URL", f"{url}/services/T000/B000/canary-token")

    ask("execute", action="sign", item_id="slack_webhook")
    answer = ask("execute", item_id="slack_webhook", parameters={"message": 'He said "hi" ✓'})

    assert answer.content["result"] == "ok"
    assert seen[0]["path"] == "/services/T000/B000/canary-token"
    assert json.loads(str(seen[0]["body"])) == {"text": 'He said "hi" ✓', "channel": "#general"}
    assert "canary-token" not in json.dumps(answer.content)


@pytest.mark.req("K-AP-01")
def test_the_deepl_tool_is_created_and_translates(ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    translations = {"translations": [{"detected_source_language": "EN", "text": "Hallo, Welt"}]}
    url, seen = serve(reply(translations))
    text = (SEEDS / "000_create_translate_text.json").read_text(encoding="utf-8")
    monkeypatch.setenv("DEEPL_API_KEY", "canary-deepl-key")

    created = ask("execute", **json.loads(text.replace("https://api.deepl.com", url)))
    answer = ask("execute", item_id="translate_text", parameters={"text": "Hello, world", "target_lang": "DE"})

    assert created.content["status"] == "created"
    assert answer.content["result"] == translations
    assert seen[0]["path"] == "/v2/translate"
    assert as_object(seen[0]["headers"])["authorization"] == "DeepL-Auth-Key canary-deepl-key"
    assert json.loads(str(seen[0]["body"])) == {"text": ["Hello, world"], "target_lang": "DE"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sentiment_tool_runs_with_the_package_it_requires(ask: Ask) -> None:
    ask("execute", **seed("000_create_analyze_sentiment.json"))

    answer = ask("execute", item_id="analyze_sentiment", parameters={"text": "This is wonderful."})

    assert answer.content.get("status") == "success", answer.content
    assert as_object(answer.content["result"])["polarity"] == 1.0


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.req("K-TY-06")
@pytest.mark.timeout(300)
def test_the_rust_runtime_of_the_seed_compiles_and_runs_a_tool(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{real_rustc()}:{os.environ['PATH']}")
    ask("execute", **seed("000_create_rust_runtime.json"))
    source = 'fn main() { println!("{}", std::env::args().skip(1).collect::<Vec<_>>().join(" ")); }\n'
    made = ask(
        "execute",
        action="create",
        item_id="say",
        parameters={
            "tool_type": "script",
            "executor": "rust_runtime",
            "version": "1.0.0",
            "description": "Say a word",
            "config": {"entrypoint": "main.rs"},
            "parameters": [{"name": "word", "type": "string", "required": True}],
            "files": {"main.rs": source},
        },
    )

    answer = ask("execute", item_id="say", parameters={"word": "kiwi"})

    assert made.content["status"] == "created", made.content
    assert answer.content.get("result") == "--word=kiwi", answer.content


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.req("K-TY-06")
def test_a_ruby_runtime_is_ten_lines_of_data(ask: Ask) -> None:
    runtime = {
        "tool_type": "runtime",
        "executor": "subprocess",
        "version": "1.0.0",
        "description": "Runs a Ruby file",
        "config": {
            "command": "ruby",
            "args": ["{tool.files}/{tool.entrypoint}"],
            "check": ["ruby", "-c", "{tool.files}/{tool.entrypoint}"],
            "params_as": "json_stdin",
            "result_from": "json_stdout",
        },
    }
    source = "require 'json'\ngiven = JSON.parse(STDIN.read)\nputs JSON.generate({turned: given['word'].reverse})\n"
    tool = {
        "tool_type": "script",
        "executor": "ruby_runtime",
        "version": "1.0.0",
        "description": "Turn a word around",
        "config": {"entrypoint": "main.rb"},
        "parameters": [{"name": "word", "type": "string", "required": True}],
        "files": {"main.rb": source},
    }
    ask("execute", action="create", item_id="ruby_runtime", parameters=runtime)
    ask("execute", action="create", item_id="turn", parameters=tool)

    answer = ask("execute", item_id="turn", parameters={"word": "kiwi"})
    broken = ask("execute", action="validate", item_id="bad", parameters={**tool, "files": {"main.rb": "def x(\n"}})

    assert answer.content.get("result") == {"turned": "iwik"}, answer.content
    assert str(as_object(as_list(broken.content["issues"])[0])["place"]).startswith("main.rb")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RT-01")
@pytest.mark.parametrize(
    ("runtime", "file", "source"),
    [
        ("python_runtime", "main.py", "def main(word):\n    return {'word': word}\n"),
        ("node_runtime", "main.mjs", "export function main({ word }) { return { word }; }\n"),
        ("deno_runtime", "main.ts", "export const main = ({ word }: { word: string }) => ({ word });\n"),
        ("bash_runtime", "main.sh", 'printf \'{"word": "%s"}\' "$KIWI_PARAM_word"\n'),
    ],
)
def test_each_built_in_language_runs_a_tool(runtime: str, file: str, source: str, ask: Ask) -> None:
    words = {
        "tool_type": "script",
        "executor": runtime,
        "version": "1.0.0",
        "description": "Say a word",
        "config": {"entrypoint": file},
        "parameters": [{"name": "word", "type": "string", "required": True}],
        "files": {file: source},
    }
    made = ask("execute", action="create", item_id="say", parameters=words)

    answer = ask("execute", item_id="say", parameters={"word": "kiwi"})

    assert made.content["status"] == "created", made.content
    assert answer.content.get("result") == {"word": "kiwi"}, answer.content
