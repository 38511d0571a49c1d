"""The http driver: an api tool becomes one HTTP request, and its reply a result."""

from kiwi_mcp.drivers.http.driver import Http

create_driver = Http
