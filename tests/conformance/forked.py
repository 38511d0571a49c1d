"""One scenario for a client that waits: `python -I -S forked.py SOCKET URL`. It loads next to nothing itself."""

from __future__ import annotations

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    environ = {name: value for name, value in os.environ.items() if name.startswith("MCP_")}
    sent = json.dumps({"url": sys.argv[2], "environ": environ}).encode()
    socket.send_fds(connection, [sent], [1, 2])
    sys.exit(connection.recv(16) != b"done")
