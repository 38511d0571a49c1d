"""What each verb may be asked, exactly as it may be written."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Action = Literal["run", "sign", "create", "update", "delete", "validate", "why"]
ACTIONS: tuple[Action, ...] = get_args(Action)
Where = Literal["project", "user"]
Text = Annotated[str, Field(max_length=4_000)]
Name = Annotated[str, Field(max_length=400)]


class Request(BaseModel):
    """What every verb is asked with."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)


class ProjectRequest(Request):
    """A request about the items a project sees."""

    item_type: Literal["tool", "directive", "knowledge", "output"] = "tool"
    project_path: Annotated[Text | None, Field(description="Absolute path of the project")] = None


class SearchRequest(ProjectRequest):
    """Find items by what they do."""

    query: Annotated[Text, Field(description="What you need, in words")]
    source: Annotated[
        Literal["local", "all", "project", "user", "builtin", "registry"],
        Field(description="local = project and user; all adds what is built in"),
    ] = "local"
    limit: Annotated[int, Field(ge=1, le=100)] = 10
    sort_by: Literal["score", "date", "name"] = "score"
    tool_type: Annotated[Name | None, Field(description="Only this type")] = None
    category: Name | None = None
    tag: Name | None = None


class LoadRequest(ProjectRequest):
    """Read one item, or copy it to another space."""

    item_id: Annotated[Name, Field(description="Name, name@range or full identity")]
    source: Annotated[Literal["project", "user", "builtin", "registry"] | None, Field(description="Where it is")] = None
    destination: Annotated[Where | None, Field(description="Copy it there, with the executors it needs")] = None
    file: Annotated[Name | None, Field(description="One file of a tool with several")] = None
    offset: Annotated[int, Field(ge=0, description="Where to go on in an output")] = 0
    length: Annotated[int, Field(ge=1, le=1_000_000)] = 64_000


class ExecuteRequest(ProjectRequest):
    """Run an item, or change it."""

    action: Action = "run"
    item_id: Annotated[Name | None, Field(description="The item; create takes it from parameters.tool_id too")] = None
    parameters: Annotated[dict[str, object], Field(description="The tool's own parameters, or the action's")] = {}
    dry_run: Annotated[bool, Field(description="Show the plan, do nothing")] = False
    frozen: Annotated[bool, Field(description="Refuse what differs from the lockfile")] = False


class HelpRequest(Request):
    """Read how Kiwi is used."""

    topic: Annotated[Name | None, Field(description="tool, search, load, execute, create, runtimes, api, errors …")] = (
        None
    )
    project_path: Text | None = None


class InitRequest(Request):
    """Give a project its `.ai` folder."""

    project_path: Text | None = None


class DoctorRequest(Request):
    """Look at the health of this installation."""

    project_path: Text | None = None
