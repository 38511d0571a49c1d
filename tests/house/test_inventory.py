"""Everything is data or an operation: each package, table and route has a tag, and each table is used."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from kiwi_mcp.store.database import Database
from kiwi_mcp.surfaces.gateway.auth import VisitedKernel
from kiwi_mcp.surfaces.gateway.mcp import MCP
from kiwi_mcp.surfaces.gateway.oauth import WELL_KNOWN
from kiwi_mcp.surfaces.gateway.server import HEALTH, verb_routes

TAGS = {"memory", "tool", "component", "API", "external"}
Inventory = Mapping[str, Mapping[str, str]]
ROUTE = re.compile(r"\b(?:Route|Mount|WebSocketRoute)\((.+?), ")


@pytest.fixture(scope="module")
def inventory(root: Path) -> Inventory:
    pages: Inventory = yaml.safe_load((root / "docs" / "inventory.yaml").read_text(encoding="utf-8"))
    return pages


def differences(found: Iterable[str], tagged: Collection[str]) -> list[str]:
    """What has no tag or several, and tags of what is not there."""
    matches = {one: [pattern for pattern in tagged if fnmatchcase(one, pattern)] for one in found}
    used = {pattern for some in matches.values() for pattern in some}
    return sorted([one for one, some in matches.items() if len(some) != 1] + [one for one in tagged if one not in used])


def packages(root: Path) -> set[str]:
    package = root / "src" / "kiwi_mcp"
    folders = {path.parent for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "data"}
    return {path.relative_to(package).as_posix().removeprefix(".") for path in folders} | {"data"}


def tables(database: Database) -> set[str]:
    """The tables and views of a store."""
    listed = {
        "sqlite": "select name from sqlite_master where type in ('table', 'view') and name not like 'sqlite_%'",
        "postgres": "select table_name::text from information_schema.tables where table_schema = current_schema()",
    }
    return {str(name) for (name,) in database.read(listed[database.dialect])}


def routes() -> set[str]:
    """Every route of the gateway: of verbs, of a registry, and the few of its own."""
    verbs = verb_routes(VisitedKernel(), lambda endpoint: endpoint)
    own = {f"GET {HEALTH}", f"GET {WELL_KNOWN}", f"GET {WELL_KNOWN}/resource", f"MCP {MCP}"}
    layout = {f"{method} /registry/{name}" for method in ("GET", "PUT") for name in ("index.json", "blobs/sha256/x")}
    methods = {f"{method} {route.path}" for route in verbs for method in (route.methods or ()) if method != "HEAD"}
    return methods | own | layout | {"GET /registry/oci-layout"}


@pytest.mark.req("A1")
def test_every_tag_is_one_of_five(inventory: Inventory) -> None:
    assert set(inventory) == {"packages", "tables", "routes"}
    assert {tag for part in inventory.values() for tag in part.values()} == TAGS
    assert set(inventory["tables"].values()) == {"memory"}  # data lies nowhere but in memory


@pytest.mark.req("A1")
def test_every_package_and_route_has_a_tag(inventory: Inventory, root: Path) -> None:
    assert differences(packages(root), inventory["packages"]) == []
    assert differences(routes(), inventory["routes"]) == []


@pytest.mark.req("A1")
def test_every_table_has_a_tag(inventory: Inventory, database: Database) -> None:
    found = tables(database)
    assert found - {*inventory["tables"]} == set()
    # A server has every table that a file has, and some of its own.
    assert database.dialect == "sqlite" or {*inventory["tables"]} == found


@pytest.mark.req("A1")
def test_routes_are_made_where_the_inventory_looks_for_them(root: Path) -> None:
    """A route in another place would be one without a tag."""
    package = root / "src" / "kiwi_mcp"
    made = {
        (path.relative_to(package).as_posix(), first)
        for path in package.rglob("*.py")
        for first in ROUTE.findall(path.read_text(encoding="utf-8"))
    }
    assert made == {
        ("surfaces/gateway/server.py", first)
        for first in ("HEALTH", "LAYOUT", "INDEX", 'BLOBS + "/{digest}"', "path", "OPENAPI", "path_of(one)")
    }


@pytest.mark.req("A1")
@pytest.mark.parametrize(
    ("part", "added"),
    [("packages", "tools"), ("packages", "kernel/tools"), ("tables", "tool_state"), ("routes", "POST /v1/tools/call")],
)
def test_what_is_added_without_a_tag_is_reported(inventory: Inventory, part: str, added: str) -> None:
    known = [one.replace("*", "x") for one in inventory[part]]
    assert differences(known, inventory[part]) == []
    assert differences([*known, added], inventory[part]) == [added]
    assert differences(known[1:], inventory[part]) == [next(iter(inventory[part]))]


def test_the_code_uses_every_table(root: Path, database: Database) -> None:
    package = root / "src" / "kiwi_mcp"
    code = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    used = {*re.findall(r"\b(?:from|join|into|update) (\w+)\b", code), *re.findall(r'insert\(\s*"(\w+)"', code)}
    # The counter of changes is written by triggers and read by name.
    assert tables(database) - used - {"change_counter"} == set()
