"""The dates of the protocol's revisions from which on a client can read something."""

from __future__ import annotations

from collections.abc import Mapping

STRUCTURED_SINCE = "2025-06-18"
"""The first revision in which results have structured content."""
ANY_STRUCTURE_SINCE = "2026-07-28"
"""The first in which that may be something else than an object."""
NOT_FOUND_IS_INVALID_SINCE = "2026-07-28"
"""The first in which an unknown resource has no error code of its own."""
BLOCKS_SINCE: Mapping[str, str] = {"audio": "2025-03-26", "resource_link": "2025-06-18"}
"""The first revision of each kind of content that was not there from the beginning."""
