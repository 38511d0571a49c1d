"""What only the owner decides: which registries there are, and so where versions and tokens go."""

from __future__ import annotations

from kiwi_mcp.domain.errors import PolicyDenied
from kiwi_mcp.kernel.requests import ExecuteRequest, RegistryRequest, Request
from kiwi_mcp.kernel.settings import RegistrySettings

_WORDS = {"publish": "to", "pull": "from"}
"""The word of each action that names a remote."""


def refuse_strangers(request: Request, settings: RegistrySettings) -> None:
    """Refuse a request that is not from the owner's hand and names a remote that the owner did not."""
    match request:
        case RegistryRequest(action="add"):
            raise PolicyDenied(
                "Only the owner says which registries there are.",
                suggestion="Ask the owner to type `kiwi registry add NAME URL`.",
            )
        case RegistryRequest(remote=str(address)):
            _demand_known(address, settings)
        case ExecuteRequest(action=action, parameters=words) if isinstance(words.get(_WORDS.get(action, "")), str):
            _demand_known(str(words[_WORDS[action]]), settings)


def _demand_known(address: str, settings: RegistrySettings) -> None:
    if address not in settings.remotes:
        known = ", ".join(settings.remotes) or "none yet"
        raise PolicyDenied(
            "Only registries that the owner named can be asked, or sent anything.",
            suggestion=f"Name one of these: {known}; or ask the owner to type `kiwi registry add NAME URL`.",
        )
