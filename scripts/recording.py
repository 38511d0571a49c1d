"""Record `kiwi setup` on a terminal, with real MCP servers and a home made for it, as docs/pictures/setup.svg.

`make recording` runs it; it needs the npm and PyPI registries.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "setup.svg"
COMMAND = "kiwi setup --yes"
SECONDS = 600
COLUMNS, LINE, TOP, CHARACTER = 100, 20, 30, 8.0
COLORS = {"31": "#f2777a", "32": "#a3d977", "33": "#ffcc66", "36": "#7fdbca", "1": "#ffffff"}
SGR = re.compile(r"\x1b\[([\d;]*)m")
PACKAGE = "@modelcontextprotocol/server-"


def servers(home: Path) -> dict[str, object]:
    """Return the servers in the file of the client."""
    token = {"GITHUB_PERSONAL_ACCESS_TOKEN": "github_pat_example_0123456789"}
    graph = {"MEMORY_FILE_PATH": f"{home}/memory/graph.jsonl"}
    return {
        "filesystem": {"command": "npx", "args": ["-y", f"{PACKAGE}filesystem", f"{home}/notes"]},
        "memory": {"command": "npx", "args": ["-y", f"{PACKAGE}memory"], "env": graph},
        "github": {"command": "npx", "args": ["-y", f"{PACKAGE}github"], "env": token},
        "git": {"command": "uvx", "args": ["mcp-server-git", "--repository", f"{home}/kiwi"]},
        "time": {"command": "uvx", "args": ["mcp-server-time"]},
    }


def record(home: Path) -> list[str]:
    """Run the command on a terminal in a new home, and return the lines that stay on the screen, with their colours."""
    for name in (".cursor", "notes", "kiwi"):
        (home / name).mkdir()
    (home / ".cursor" / "mcp.json").write_text(json.dumps({"mcpServers": servers(home)}), encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KIWI_", "XDG_"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**kept, "HOME": str(home), "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PATH": path}
    terminal, inner = pty.openpty()
    # A session of its own; the end of the command ends what the terminal shows.
    command = subprocess.Popen(
        COMMAND.split(), cwd=home, env=env, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
    )
    os.close(inner)
    shown = _read(terminal)
    os.close(terminal)
    if command.wait(timeout=SECONDS) != 0:
        raise SystemExit(shown.decode(errors="replace"))
    return lines_of(shown.decode())


def _read(terminal: int) -> bytes:
    shown = b""
    while select.select([terminal], [], [], SECONDS)[0]:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # the command has ended
            break
        shown += data
    return shown


def lines_of(shown: str) -> list[str]:
    """Return the lines of an output; of a progress line that is drawn again and again, what is there at the end."""
    lines = (re.split(r"\r|\x1b\[2K", line.rstrip("\r"))[-1] for line in shown.split("\n"))
    kept = [re.sub(r"\x1b\[[\d;?]*[A-Za-ln-z]", "", line) for line in lines]
    return [line for line in kept if SGR.sub("", line).strip()]


def svg(lines: list[str]) -> str:
    """Return the lines as a terminal that shows one after another."""
    rows = [f"\x1b[32m$\x1b[0m {COMMAND}", *lines]
    height = TOP + LINE * len(rows) + 8
    texts = []
    for number, row in enumerate(rows):
        delay = 0 if number == 0 else 1 + 0.4 * number
        place = f'x="16" y="{TOP + LINE * number}" style="animation-delay:{delay:.1f}s"'
        texts.append(f"<text {place}>{_spans(row)}</text>")
    width = round(32 + CHARACTER * max(COLUMNS, *(len(SGR.sub("", row)) for row in rows)))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{COMMAND}">
<style>
text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #d8d8d2; white-space: pre }}
text {{ animation: show .1s backwards }}
@keyframes show {{ from {{ opacity: 0 }} }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#22251f"/>
{chr(10).join(texts)}
</svg>
"""


def _spans(row: str) -> str:
    parts, color = [], ""
    for number, part in enumerate(SGR.split(row)):
        if number % 2:
            color = next((COLORS[code] for code in part.split(";") if code in COLORS), "")
        elif part:
            parts.append(f'<tspan fill="{color}">{escape(part)}</tspan>' if color else escape(part))
    return "".join(parts)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        PICTURE.write_text(svg(record(Path(folder))), encoding="utf-8")
