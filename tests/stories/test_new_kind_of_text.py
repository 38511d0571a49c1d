"""A new kind of Markdown item is data: a type spec in a `types` folder, and no line of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.kernel import Answer
from kiwi_mcp.manifest.type_specs import load_type_specs

Ask = Callable[..., Answer]

RECIPE_TYPE = """\
type: recipe
description: How to cook something
driver: read
needs_executor: none
files: required
effect: pure
result_kind: text
folder: recipes
format:
  suffix: .md
  reader: front_matter
  config: [title, servings]
  defaults: {servings: 4}
config:
  type: object
  additionalProperties: false
  properties:
    title: {type: string}
    servings: {type: integer, minimum: 1}
    links: {type: array}
"""
PANCAKES = """\
---
id: pancakes
title: Pancakes
version: 1.0.0
description: Thin pancakes with lemon and sugar
servings: 2
---

Whisk eggs, milk and flour. See [[batter]].
"""


def add_type(folder: Path, text: str = RECIPE_TYPE) -> None:
    (folder / "types").mkdir(parents=True, exist_ok=True)
    (folder / "types" / "recipe.yaml").write_text(text)


@pytest.mark.parametrize("where", ["project", "user"])
def test_a_new_kind_of_text_is_created_checked_signed_found_and_read(
    where: str, project: Path, home: Path, ask: Ask
) -> None:
    base = project / ".ai" if where == "project" else home / ".ai"
    add_type(base)
    words = {"tool_type": "recipe", "content": PANCAKES, "location": where}
    created = ask("execute", action="create", item_id="pancakes", parameters=words)
    assert created.content["status"] == "created", created.content
    assert created.content["path"] == str(base / "recipes" / "pancakes.md")

    checked = ask("execute", action="validate", item_id="pancakes")
    assert (checked.content["valid"], checked.content["issues"]) == (True, [])
    signed = ask("execute", action="sign", item_id="pancakes", parameters={"location": where})
    assert signed.content["status"] == "signed", signed.content

    loaded = ask("load", item_id="pancakes").content
    assert (as_object(loaded["metadata"])["tool_type"], loaded["integrity"]) == ("recipe", "hashed")
    (found, *_) = as_list(ask("search", query="thin pancakes with lemon").content["results"])
    assert (as_object(found)["name"], as_object(found)["tool_type"]) == ("pancakes", "recipe")
    answer = ask("execute", item_id="pancakes").content
    assert as_object(answer["result"]) == {
        "content": "Whisk eggs, milk and flour. See [[batter]].",
        "links": ["batter"],
    }


def test_a_text_that_its_type_does_not_allow_is_refused_with_every_place(project: Path, ask: Ask) -> None:
    add_type(project / ".ai")
    wrong = PANCAKES.replace("servings: 2", "servings: none\noven: hot")
    answer = ask("execute", action="create", item_id="pancakes", parameters={"tool_type": "recipe", "content": wrong})
    places = {as_object(issue)["place"] for issue in as_list(answer.content["issues"])}
    assert places >= {"config.servings", "config.oven"}
    assert not (project / ".ai" / "recipes").exists()


def test_the_type_of_a_project_turns_no_folder_of_the_user_into_items(project: Path, home: Path, ask: Ask) -> None:
    add_type(project / ".ai", RECIPE_TYPE.replace("folder: recipes", "folder: diary"))
    (home / ".ai" / "diary").mkdir(parents=True)
    (home / ".ai" / "diary" / "pancakes.md").write_text(PANCAKES)
    assert ask("load", item_id="pancakes").content["code"] == "tool_not_found"


@pytest.mark.parametrize("folder", ["directives", "tools", "types", "memory"])
def test_a_new_type_takes_no_folder_that_holds_something_else(folder: str, project: Path) -> None:
    add_type(project / ".ai", RECIPE_TYPE.replace("folder: recipes", f"folder: {folder}"))
    specs = load_type_specs(project / ".ai" / "types")
    assert specs.get("recipe") is None
    assert [issue.place for issue in specs.issues] == ["recipe.yaml.folder"]
