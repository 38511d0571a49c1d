"""The request driver: an api tool becomes one HTTP request, and its reply a result."""

from kiwi_mcp.drivers.request.drive import Request

driver = Request()
