"""What each action on a registry may be told, beside the item's name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from kiwi_mcp.domain.registry import Visibility
from kiwi_mcp.kernel.requests import Name, Where

Reason = Annotated[str, Field(max_length=1_000)]
Address = Annotated[str, Field(max_length=2_000)]


class Words(BaseModel):
    """The parameters of one action."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PublishWords(Words):
    """Where an item is published, for whom, and what its history will say."""

    namespace: Name | None = None
    visibility: Visibility | None = None
    changelog: Annotated[str, Field(max_length=20_000)] = ""
    location: Where | None = None
    to: Address | None = None


class PullWords(Words):
    """From which remote an item is pulled; without one, from the registry that is in use.

    What nobody vouches for comes in by the owner's word: to take it unsigned, to trust a key, to go back.
    """

    remote: Annotated[Address | None, Field(alias="from")] = None
    accept_unsigned: bool = False
    trust_key: Name | None = None
    allow_rollback: bool = False


class DiffWords(Words):
    """Which two versions are compared; a folder's own item counts as `project` or `user`."""

    first: Annotated[Name | None, Field(alias="from")] = None
    second: Annotated[Name | None, Field(alias="to")] = None


class MarkWords(Words):
    """Why a version is marked, or that the mark is taken back."""

    reason: Reason = ""
    undo: bool = False


class RollbackWords(Words):
    """Back to which version, and why."""

    to: Name | None = None
    reason: Reason = ""


class ListWords(Words):
    """Which items of the registry are listed."""

    namespace: Name | None = None
    tool_type: Name | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 100


class NoWords(Words):
    """Nothing but the item's name."""
