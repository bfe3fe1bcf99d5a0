"""`python -m clients [NAME ...]`: install each client in a virtual environment of its own, play it in
each dialect, and print the tables of docs/dialects.md.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path

from clients.play import play
from clients.table import CLIENTS, Client


def installed(client: Client, folder: Path) -> Path:
    """Return the Python of the client's virtual environment. Make it if it does not exist."""
    home = folder / client.program
    python, done = home / "bin" / "python", home / ".installed"
    if not done.is_file() or done.read_text() != repr(client.packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *client.packages], check=True)
        done.write_text(repr(client.packages))
    return python


async def rows(client: Client, python: Path) -> list[str]:
    """Play `client` in each of its dialects, streamed and not. Return its rows of the table, and a
    line for each difference from what the table expects.
    """
    lines = []
    for dialect, turns in client.turns.items():
        for stream in (False, True):
            played = await play(client, dialect, python, stream=stream)
            refused = await play(client, dialect, python, stream=stream, fits=False)
            right = played.turns == turns and played.sampled == played.trained
            right = right and refused.last == f"error: {client.overflow}"
            lines.append(
                f"| {client.name} | {dialect}{', streamed' if stream else ''} "
                f"| {', '.join(map(str, played.turns))} | {len(played.fork_reasons)} "
                f"| {played.sampled}, {played.trained} "
                f"| {refused.last.removeprefix('error: ')}, {refused.requests} "
                f"| {'' if right else f'WRONG: {turns}, {played}, {refused}'} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="the clients' names, or their beginnings")
    parser.add_argument("--venvs", type=Path, default=Path(".venv/clients"))
    options = parser.parse_args()
    wanted = [
        client
        for client in CLIENTS
        if not options.names or client.name.startswith(tuple(options.names))
    ]
    print("| client | dialect | turns of each sequence | forks | sampled, trained | overflow |  |")
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    for client in wanted:
        python = installed(client, options.venvs.absolute())
        wrong += sum("WRONG" in line for line in asyncio.run(rows(client, python)))
    print(f"{len(wanted)} clients, {wrong} rows that differ from the table", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
