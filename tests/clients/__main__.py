"""`python -m clients [NAME ...]`: install each client in a folder of its own, play it in each
dialect, and print the table of docs/dialects.md.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from clients.play import PROGRAMS, Played, play
from clients.table import CLIENTS, Client

HEAD = """\
| client | dialect | turns of each sequence | forks | sampled, trained | overflow: error, requests |
|---|---|---|---|---|---|"""


def install(client: Client, folder: Path) -> list[str | Path]:
    """Install the packages of `client`, if they are not in `folder`. Return the command that runs
    its program.
    """
    program = PROGRAMS / client.program
    home = folder / program.stem
    python, done = home / "bin" / "python", home / ".installed"
    node = program.suffix == ".mjs"
    if not done.is_file() or done.read_text() != repr(client.packages):
        if node:
            home.mkdir(parents=True, exist_ok=True)
            npm: list[str | Path] = [
                "npm",
                "install",
                "--prefix",
                home,
                "--no-audit",
                "--no-fund",
                "--silent",
            ]
            subprocess.run([*npm, *client.packages], check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *client.packages], check=True)
        done.write_text(repr(client.packages))
    if not node:
        return [python, program]
    for source in PROGRAMS.glob("*.mjs"):  # Node looks for packages beside the program
        shutil.copy(source, home)
    return ["node", home / program.name]


def row(client: Client, dialect: str, played: Played) -> str:
    """Return a row of the table."""
    return (
        f"| {client.name} | {dialect} | {', '.join(map(str, played.turns))} "
        f"| {len(played.forks)} | {played.sampled}, {played.trained} "
        f"| {played.overflow.removeprefix('error: ')}, {played.requests} |"
    )


async def differing(client: Client, command: list[str | Path]) -> int:
    """Print the rows of `client`, and what differs from the table. Return the number of rows that
    differ.
    """
    count = 0
    for dialect, expected in client.expected.items():
        for stream in client.streams:
            played = await play(client, dialect, command, stream=stream)
            print(row(client, f"{dialect}{', streamed' * stream}", played), flush=True)
            differences = played.differences(expected)
            count += bool(differences)
            for line in differences:
                print(f"  DIFFERS: {line}", flush=True)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="the clients' names, or their beginnings")
    parser.add_argument("--folder", type=Path, default=Path(".venv/clients"))
    options = parser.parse_args()
    clients = [
        client
        for client in CLIENTS
        if not options.names or client.name.startswith(tuple(options.names))
    ]
    print(HEAD)
    count = 0
    for client in clients:
        count += asyncio.run(differing(client, install(client, options.folder.absolute())))
    print(f"{len(clients)} clients, {count} rows that differ from the table", file=sys.stderr)
    sys.exit(bool(count))


if __name__ == "__main__":
    main()
