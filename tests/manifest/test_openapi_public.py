"""The document of a public API: every operation is imported, checked and makes the declared request."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from tests.plugins.http_server import HttpReply, HttpRequest, http_server

from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.drivers.http import bind_request
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.openapi import OpenApiImport, tools_from_openapi
from kiwi_mcp.manifest.parameters import accept
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.type_specs import load_type_specs
from kiwi_mcp.primitives.http import client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PRIMITIVE = Manifest(tool_id="http_client", tool_type="primitive", version="1.0.0")
METHODS = {"get", "put", "post", "delete", "patch", "head", "options"}
SAMPLES: dict[str, Json] = {"integer": 1, "number": 1, "boolean": True, "null": None}

TEXTS = (
    *("sample", "1.2.3", "1", "a" * 40, "sha256:" + "a" * 64),
    *("2020-01-01T00:00:00Z", "https://a.example/", "ssh-rsa AAAA", "refs/heads/a"),
)


@pytest.fixture(scope="module")
def github(tmp_path_factory: pytest.TempPathFactory, processes: None, package_index: None) -> str:
    folder = tmp_path_factory.mktemp("npm")
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*install, "@octokit/openapi@23.0.2"], timeout=240, check=True)
    return (folder / "node_modules/@octokit/openapi/generated/api.github.com.json").read_text()


@pytest.fixture(scope="module")
def made(github: str) -> OpenApiImport:
    return tools_from_openapi(github, what="GitHub's document")


@dataclass(slots=True)
class Recorder:
    """A service that remembers what it was asked."""

    url: str
    seen: list[tuple[str, str, str, bytes]] = field(default_factory=list)


@contextmanager
def recording() -> Iterator[Recorder]:
    def answer(request: HttpRequest) -> HttpReply:
        recorder.seen.append((request.method, request.path, request.headers.get("content-type", ""), request.body))
        return HttpReply(status=204)

    with http_server(answer) as host:
        recorder = Recorder(f"http://{host}")
        yield recorder


def sample(schema: JsonObject) -> Json:
    """A small value that fits a schema."""
    if "const" in schema or "enum" in schema:
        return schema.get("const", as_list(schema.get("enum", [None]))[0])
    if "anyOf" in schema:
        return sample(as_object(as_list(schema["anyOf"])[0]))
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else as_text(as_list(kind)[0])
    if kind == "object":
        properties = as_object(schema.get("properties"))
        return {as_text(name): sample(as_object(properties[as_text(name)])) for name in as_list(schema.get("required"))}
    if kind == "array":
        least = schema.get("minItems", 0)
        return [sample(as_object(schema.get("items")))] * (least if isinstance(least, int) else 0)
    if "pattern" in schema:
        return next(text for text in TEXTS if not faults(schema, text))
    if kind == "string":
        least = schema.get("minLength", 1)
        return "sample".ljust(least if isinstance(least, int) else 1, "x")
    return schema.get("minimum", SAMPLES[kind])


def called(manifest: JsonObject) -> HttpSpec:
    tool = parse(manifest, stem="stem")
    origin = Location("project", Path("tool.yaml"), Path())
    chain = Chain((Tool(tool, origin), Tool(PRIMITIVE, origin)), (TypeTraits("http"), TypeTraits()))
    spec = bind_request(chain, accept(tool.tool_id, tool.parameters, as_object(sample(tool.parameters)))).spec
    assert isinstance(spec, HttpSpec)
    return spec


def operations(text: str) -> dict[tuple[str, str], JsonObject]:
    return {
        (method.upper(), path): operation
        for path, item in json.loads(text)["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


@pytest.mark.req("K-AP-03")
def test_all_of_a_public_api_is_imported_in_seconds(github: str) -> None:
    started = monotonic()
    made = tools_from_openapi(github, what="GitHub's document")
    spent = monotonic() - started
    declared = operations(github)
    assert len(made.manifests) + len(made.skipped) == len(declared) > 1_000
    reasons = {issue.place: issue.reason for issue in made.skipped}
    alive = {f"{method} {path}" for (method, path), words in declared.items() if not words.get("deprecated")}
    assert {place: reason for place, reason in reasons.items() if place in alive} == {
        "POST /repos/{owner}/{repo}/releases/{release_id}/assets": (
            "its body is application/octet-stream, which an api tool cannot send"
        )
    }
    assert spent < 30


@pytest.mark.req("K-AP-03")
def test_every_imported_operation_checks_clean(made: OpenApiImport) -> None:
    sheets = load_type_specs()
    for manifest in made.manifests:
        tool = parse(manifest, stem="stem", sheets=sheets)
        issues = check(tool, sheets=sheets, file_names=(), is_folder=False, executor=PRIMITIVE)
        assert [issue for issue in issues if issue.is_error] == [], manifest["tool_id"]


@pytest.mark.req("K-AP-03")
def test_every_imported_operation_makes_the_request_that_the_document_names(github: str, made: OpenApiImport) -> None:
    wanted = {
        (method, re.compile("/".join(re.sub(r"\\{[^}]+\\}", "[^/]+", re.escape(part)) for part in path.split("/"))))
        for method, path in operations(github)
    }
    for manifest in made.manifests:
        spec = called(manifest)
        path = urlsplit(spec.url).path
        assert urlsplit(spec.url).netloc in {"api.github.com", "uploads.github.com"}
        assert any(method == spec.method and shape.fullmatch(path) for method, shape in wanted), spec.url


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-AP-03")
async def test_imported_operations_reach_a_service_as_planned(github: str) -> None:
    with recording() as service:
        tools = tools_from_openapi(github, what="GitHub's document", base_url=service.url).manifests[::7]
        specs = [replace(called(tool), granted=("127.0.0.1",)) for tool in tools]

        async def send_all() -> list[int]:
            statuses = [(await client.send(spec)).status for spec in specs]
            await client.aclose()
            return statuses

        assert set(await send_all()) == {204}
        assert len(service.seen) == len(specs) > 150
    for spec, (method, path, media, body) in zip(specs, service.seen, strict=True):
        assert (method, service.url + path) == (spec.method, spec.url)
        if spec.has_body and media == "application/json":
            assert json.loads(body) == spec.body
