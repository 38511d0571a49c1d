from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.drivers.http import bind_request
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.openapi import OpenApiImport, tools_from_openapi
from kiwi_mcp.manifest.parameters import accept
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.type_specs import load_type_specs

DATA = Path(__file__).parent.parent / "data" / "openapi"
SHOP = (DATA / "shop.yaml").read_text()
BOARD = (DATA / "board.json").read_text()
PRIMITIVE = Manifest(tool_id="http_client", tool_type="primitive", version="1.0.0")


def imported(text: str, *, prefix: str = "", base_url: str | None = None) -> dict[str, JsonObject]:
    made = tools_from_openapi(text, what="The document", prefix=prefix, base_url=base_url)
    return {as_text(manifest["tool_id"]): manifest for manifest in made.manifests}


def parameter(manifest: JsonObject, name: str) -> JsonObject:
    return as_object(as_object(as_object(manifest["parameters"])["properties"])[name])


def request(manifest: JsonObject, **given: Json) -> HttpSpec:
    """The request that a call of the tool makes, with everything on the way being Kiwi's own."""
    tool = parse(manifest, stem="stem")
    origin = Location("project", Path("tool.yaml"), Path())
    chain = Chain((Tool(tool, origin), Tool(PRIMITIVE, origin)), (TypeTraits("http"), TypeTraits()))
    spec = bind_request(chain, accept(tool.tool_id, tool.parameters, given)).spec
    assert isinstance(spec, HttpSpec)
    return spec


def pairs(spec: HttpSpec) -> list[tuple[str, str]]:
    return parse_qsl(urlsplit(spec.url).query)


def document(paths: JsonObject, **words: Json) -> str:
    whole: Mapping[str, Json] = {
        "openapi": "3.1.0",
        "info": {"title": "Small", "version": "1"},
        "servers": [{"url": "https://small.example"}],
        "paths": paths,
        **words,
    }
    return json.dumps(whole)


@pytest.mark.req("K-AP-03")
@pytest.mark.parametrize(("text", "base"), [(SHOP, None), (BOARD, "https://board.example")])
def test_every_tool_of_a_document_passes_every_check(text: str, base: str | None) -> None:
    made = tools_from_openapi(text, what="The document", base_url=base)
    assert made.manifests
    for manifest in made.manifests:
        tool = parse(manifest, stem="stem")
        assert check(tool, sheets=load_type_specs(), file_names=(), is_folder=False, executor=PRIMITIVE) == ()


def test_an_operation_becomes_a_whole_manifest() -> None:
    listing = imported(SHOP)["corner_shop_list_items"]
    assert {word: listing[word] for word in listing if word not in {"config", "parameters"}} == {
        "tool_id": "corner_shop_list_items",
        "tool_type": "api",
        "executor": "http_client",
        "version": "2.0.0",
        "description": "List items. Gives the items of the shop, newest first.",
        "category": "corner_shop",
        "tags": ["items"],
    }
    assert listing["config"] == {
        "method": "GET",
        "url_template": "https://eu.shop.example/v2/items",
        "query": {
            "limit": "{limit}",
            "tag": "{tag}",
            "sizes": "{sizes}",
            "filter[name]": "{filter_name}",
            "price[min]": "{price_min}",
            "price[max]": "{price_max}",
            "where": "{where}",
        },
        "headers": {"Accept": "application/json", "X-Request-Id": "{x_request_id}"},
        "auth": {"type": "bearer", "token": "${CORNER_SHOP_TOKEN}"},
    }


def test_names_come_from_operation_ids_or_method_and_path() -> None:
    assert set(imported(SHOP)) == {
        "corner_shop_list_items",
        "corner_shop_items_create",
        "corner_shop_get_items_id",
        "corner_shop_replace_item",
        "corner_shop_add_to_cart",
        "corner_shop_login",
        "corner_shop_write_note",
    }
    assert "till_list_items" in imported(SHOP, prefix="Till")


def test_an_operation_that_cannot_be_called_is_skipped_with_a_reason() -> None:
    made = tools_from_openapi(SHOP, what="The document")
    assert {issue.place: issue.reason for issue in made.skipped} == {
        "DELETE /items/{id}": "it is deprecated",
        "PUT /items/{id}/photo": "its body is multipart/form-data, which an api tool cannot send",
        "GET /session": "it needs the cookie parameter 'sid'",
    }


def test_only_selects_operations_including_deprecated_ones() -> None:
    for word in ("deleteItem", "corner_shop_delete_item", "DELETE /items/{id}"):
        made = tools_from_openapi(SHOP, what="The document", only=[word])
        assert [manifest["tool_id"] for manifest in made.manifests] == ["corner_shop_delete_item"]
        assert made.skipped == ()


def test_an_unknown_selection_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        tools_from_openapi(SHOP, what="The document", only=["deleteItems"])
    assert "`deleteItem`" in refused.value.suggestion


def test_a_query_is_encoded_as_the_document_declares() -> None:
    listing = imported(SHOP)["corner_shop_list_items"]
    spec = request(
        listing, limit=5, tag=["a b", "&c"], sizes="s,m", filter_name="x=y", price_min=1.5, where={"in": ["stock"]}
    )
    assert pairs(spec) == [
        ("limit", "5"),
        ("tag", "a b"),
        ("tag", "&c"),
        ("sizes", "s,m"),
        ("filter[name]", "x=y"),
        ("price[min]", "1.5"),
        ("where", '{"in":["stock"]}'),
    ]
    assert "commas between them" in as_text(parameter(listing, "sizes")["description"])


def test_absent_parameters_are_not_sent() -> None:
    spec = request(imported(SHOP)["corner_shop_list_items"])
    assert spec.url == "https://eu.shop.example/v2/items"
    assert dict(spec.headers) == {"Accept": "application/json", "Authorization": "Bearer ${CORNER_SHOP_TOKEN}"}


def test_defaults_are_documented_and_never_sent() -> None:
    # Sent with an update, a default would change what the caller did not mention.
    tools = imported(SHOP)
    assert parameter(tools["corner_shop_list_items"], "limit") == {
        "type": "integer",
        "minimum": 1,
        "maximum": 100,
        "description": "How many. Default: 20.",
    }
    spec = request(tools["corner_shop_items_create"], name="Tea", price=2)
    assert spec.body == {"name": "Tea", "price": 2}


def test_a_json_object_is_flattened_without_read_only_properties() -> None:
    creating = imported(SHOP)["corner_shop_items_create"]
    assert as_object(creating["config"])["body_template"] == {
        "name": "{name}",
        "price": "{price}",
        "hidden": "{hidden}",
        "parts": "{parts}",
    }
    assert as_object(creating["parameters"])["required"] == ["name", "price"]
    assert parameter(creating, "price") == {"type": "number", "exclusiveMinimum": 0}


def test_a_name_in_path_and_body_is_two_parameters() -> None:
    replacing = imported(SHOP)["corner_shop_replace_item"]
    assert as_object(replacing["parameters"])["required"] == ["id", "body_id"]
    spec = request(replacing, id=3, body_id=4, note=None)
    assert (spec.url, spec.body) == ("https://eu.shop.example/v2/items/3", {"id": 4, "note": None})


def test_a_body_with_several_forms_is_one_parameter() -> None:
    adding = imported(SHOP)["corner_shop_add_to_cart"]
    spec = request(adding, cart="a/b", undeclared="..x", body=[1, 2])
    assert spec.url == "https://carts.shop.example/carts/.a%2Fb/..x"
    assert (spec.body, spec.has_body, "Authorization" in spec.headers) == ([1, 2], True, False)


def test_a_form_body_is_sent_as_a_form() -> None:
    spec = request(imported(SHOP)["corner_shop_login"], user="ann")
    assert dict(spec.headers) == {"Content-Type": "application/x-www-form-urlencoded"}
    assert spec.body == {"user": "ann"}


def test_text_is_sent_as_text() -> None:
    spec = request(imported(SHOP)["corner_shop_write_note"], body="a ${HOME} {id}")
    assert spec.headers["Content-Type"] == "text/plain"
    assert spec.body == "a $${HOME} {id}"


def test_several_keys_at_once_are_all_sent() -> None:
    board = imported(BOARD, base_url="https://board.example/api/")
    spec = request(board["board_threads_list"], cursor="start")
    assert spec.url == "https://board.example/api/threads?%24cursor=start&key=${BOARD_KEY}"
    assert dict(spec.headers) == {"X-App": "${BOARD_APP}"}


def test_oauth_is_a_bearer_token_and_basic_has_two_variables() -> None:
    board = imported(BOARD, base_url="https://board.example")
    assert request(board["board_threads_add"], title="Hi").headers["Authorization"] == "Bearer ${BOARD_TOKEN}"
    vote = request(board["board_threads_vote"], thread="t1", body=None)
    assert vote.basic == ("${BOARD_USERNAME}", "${BOARD_PASSWORD}")


def test_references_to_parameters_and_bodies_are_resolved() -> None:
    adding = imported(BOARD, base_url="https://board.example")["board_threads_add"]
    spec = request(adding, title="Hi", mood_level="low")
    assert spec.headers["Content-Type"] == "application/vnd.board+json"
    assert spec.body == {"title": "Hi", "mood-level": "low"}
    assert adding["version"] == "2026.3.1"


def test_a_document_without_an_absolute_server_needs_a_base_url() -> None:
    with pytest.raises(InvalidRequest) as refused:
        tools_from_openapi(BOARD, what="The document")
    assert "`base_url`" in refused.value.suggestion


@pytest.mark.parametrize(
    ("servers", "base", "url"),
    [
        ([{"url": "/v3"}], "https://a.example/docs/openapi.json", "https://a.example/v3/x"),
        ([{"url": "https://other.example/v1"}], "https://a.example/v9", "https://a.example/v9/x"),
        ([], "https://a.example/v9/", "https://a.example/v9/x"),
        ([{"url": "ftp://no.example"}, {"url": "https://yes.example/"}], None, "https://yes.example/x"),
        ([{"url": "https://{tenant}.example"}, {"url": "https://b.example"}], None, "https://b.example/x"),
        ([{"url": "https://u:p@c.example"}, {"url": "https://[::1]:80/a b"}], None, "https://[::1]:80/a%20b/x"),
    ],
)
def test_the_first_usable_server_is_used(servers: list[Json], base: str | None, url: str) -> None:
    text = document({"/x": {"get": {}}}, servers=servers)
    made = tools_from_openapi(text, what="The document", base_url=base)
    assert as_object(made.manifests[0]["config"])["url_template"] == url


@pytest.mark.parametrize("base", ["", "api.example", "ftp://a.example", "https://${HOST}/", "https://a b/", "http://["])
def test_an_invalid_base_url_is_refused(base: str) -> None:
    with pytest.raises(InvalidRequest):
        tools_from_openapi(SHOP, what="The document", base_url=base)


def test_only_the_operation_with_a_relative_server_is_skipped() -> None:
    made = tools_from_openapi(
        document({"/x": {"get": {}}, "/y": {"get": {"servers": [{"url": "/v2"}]}}}), what="The document"
    )
    assert [issue.place for issue in made.skipped] == ["GET /y"]
    assert "base_url" in made.skipped[0].fix


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"swagger": "2.0", "paths": {}}', "swagger"),
        ("openapi: 3.2.0\npaths: {/x: {get: {}}}", "openapi"),
        ("title: no", "openapi"),
        ("openapi: 3.1.0\npaths: {}", "paths"),
        ("[]", "openapi"),
        ("", "openapi"),
    ],
)
def test_a_document_that_is_not_openapi_3_is_refused(text: str, place: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        tools_from_openapi(text, what="The document")
    assert [issue.place for issue in refused.value.issues] == [place]
    assert refused.value.issues[0].fix


@pytest.mark.parametrize(
    ("written", "version"),
    [
        ("1.2.3", "1.2.3"),
        ("v4", "4.0.0"),
        ("0.0.0", "1.0.0"),
        ("beta", "1.0.0"),
        ("1.0-oas3", "1.0.0"),
        (None, "1.0.0"),
    ],
)
def test_a_version_is_converted_to_a_semantic_one(written: Json, version: str) -> None:
    text = document({"/x": {"get": {}}}, info={"title": "Small", "version": written})
    assert imported(text)["small_get_x"]["version"] == version


@pytest.mark.parametrize(
    ("title", "prefix"),
    [
        ("GitHub v3 REST API", "github"),
        ("GitHub's official OpenAPI spec + extension", "github"),
        ("Swagger Petstore - OpenAPI 3.0", "petstore"),
        ("The API", "api"),
        ("", "api"),
        ("Über Größe", "uber_groe"),
    ],
)
def test_a_title_gives_a_short_prefix(title: str, prefix: str) -> None:
    text = document({"/x": {"get": {"operationId": "op"}}}, info={"title": title, "version": "1"})
    assert list(imported(text)) == [f"{prefix}_op"]


def test_the_same_name_twice_gets_a_number() -> None:
    text = document({"/x": {"get": {"operationId": "a-b"}, "put": {"operationId": "a_b"}}})
    assert list(imported(text)) == ["small_a_b", "small_a_b_2"]


def test_a_key_that_is_also_a_parameter_is_requested_once() -> None:
    text = document(
        {"/x": {"get": {"parameters": [{"name": "x-key", "in": "header", "required": True, "schema": {}}]}}},
        security=[{"k": []}],
        components={"securitySchemes": {"k": {"type": "apiKey", "in": "header", "name": "X-Key"}}},
    )
    assert dict(request(imported(text)["small_get_x"]).headers) == {"X-Key": "${SMALL_API_KEY}"}


def test_a_cookie_key_is_sent_as_a_cookie() -> None:
    text = document(
        {"/x": {"get": {}}},
        security=[{"k": []}],
        components={"securitySchemes": {"k": {"type": "apiKey", "in": "cookie", "name": "sid"}}},
    )
    assert dict(request(imported(text)["small_get_x"]).headers) == {"Cookie": "sid=${SMALL_API_KEY}"}


def test_unsupported_security_skips_the_operation() -> None:
    text = document(
        {"/x": {"get": {}}},
        security=[{"cert": []}],
        components={"securitySchemes": {"cert": {"type": "mutualTLS"}}},
    )
    made = tools_from_openapi(text, what="The document")
    assert made == OpenApiImport((), made.skipped)
    assert "cert" in made.skipped[0].reason


def test_an_open_body_is_not_flattened() -> None:
    body: Json = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string"}}
    text = document(
        {"/x": {"post": {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}}}
    )
    tool = imported(text)["small_post_x"]
    assert as_list(as_object(tool["parameters"])["required"]) == ["body"]
    assert request(tool, body={"a": "1", "b": "2"}).body == {"a": "1", "b": "2"}
