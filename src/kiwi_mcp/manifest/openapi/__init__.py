"""OpenAPI documents as API tools."""

from kiwi_mcp.manifest.openapi.tools import OpenApiImport, tools_from_openapi

__all__ = ["OpenApiImport", "tools_from_openapi"]
