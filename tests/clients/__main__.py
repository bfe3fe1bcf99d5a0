"""`python -m clients [NAME ...]`: install each client in a folder of its own, play it in each
dialect, and print what the tables of docs/dialects.md have: a row for each client."""

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from clients.play import PROGRAMS, play
from clients.table import CLIENTS, Client

HEAD = """\
| client | dialects | turns of each sequence |
|---|---|---|"""
DIALECTS = {"chat": "chat", "responses": "Responses", "messages": "Messages"}
PINNED = ("openai==", "anthropic==", "litellm==", "node@")
STREAMS: dict[tuple[bool, ...], str] = {(False,): ", not streamed", (True,): ", streamed"}


def unpinned(client: Client) -> Client:
    """Return `client` with the newest releases of its packages, but those of `PINNED`: newer SDKs
    break some clients, and a newer Node is not what they are built for."""
    latest = "@latest" if client.program.endswith(".mjs") else ""
    packages = tuple(
        package if package.startswith(PINNED) else re.sub(r"(==|(?<=.)@)[\d.]+$", latest, package)
        for package in client.packages
    )
    return replace(client, packages=packages)


def install(client: Client, folder: Path) -> list[str | Path]:
    """Install the packages of `client` in `folder`. Return the command that runs its program."""
    program = PROGRAMS / client.program
    home = folder / program.stem
    python, done = home / "bin" / "python", home / ".installed"
    node = program.suffix == ".mjs"
    if not done.is_file() or done.read_text() != repr(client.packages):
        if node:
            home.mkdir(parents=True, exist_ok=True)
            npm: list[str | Path] = ["npm", "install", "--prefix", home, "--no-audit", "--no-fund"]
            path = f"{home}/node_modules/.bin:{os.environ['PATH']}"
            for package in client.packages:  # the first may be the Node that the others need
                subprocess.run(
                    [*npm, "--silent", package], check=True, env={**os.environ, "PATH": path}
                )
        else:
            subprocess.run(
                [client.python or sys.executable, "-m", "venv", "--clear", home], check=True
            )
            subprocess.run([python, "-m", "pip", "install", "-q", *client.packages], check=True)
        done.write_text(repr(client.packages))
    if not node:
        return [python, program]
    for source in PROGRAMS.glob("*.mjs"):  # Node looks for packages beside the program
        shutil.copy(source, home)
    own = home / "node_modules" / ".bin" / "node"
    return [own if own.exists() else "node", home / program.name]


async def rows(client: Client, folder: Path) -> list[str]:
    """Play `client` in its dialects. Print its rows of the table, and return what differs from the
    expected values. Dialects with the same sequences have one row."""
    command = install(client, folder)
    name = client.name + STREAMS.get(client.streams, "")
    dialects: dict[str, list[str]] = {}
    differences: list[str] = []
    for dialect, expected in client.expected.items():
        option = ", `--server-tools drop`" if dialect in client.drops else ""
        for stream in client.streams:
            played = await play(client, dialect, command, stream=stream)
            names = dialects.setdefault(", ".join(map(str, played.turns)), [])
            if DIALECTS[dialect] + option not in names:
                names.append(DIALECTS[dialect] + option)
            where = f"{name}, {DIALECTS[dialect]}{', streamed' if stream else ''}"
            differences += [f"{where}: {line}" for line in played.differences(expected)]
    for turns, names in dialects.items():
        print(f"| {name} | {'; '.join(names)} | {turns} |", flush=True)
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="the clients' names, or their beginnings")
    parser.add_argument("--folder", type=Path, default=Path(".venv/clients"))
    parser.add_argument("--newest", action="store_true", help="play each client's newest release")
    options = parser.parse_args()
    names = tuple(options.names) or ("",)
    clients = [client for client in CLIENTS if client.name.startswith(names)]
    if options.newest:
        clients = [unpinned(client) for client in clients]
    print(HEAD, flush=True)
    differences: list[str] = []
    for client in clients:
        try:
            differences += asyncio.run(rows(client, options.folder.absolute()))
        except (AssertionError, TimeoutError, subprocess.CalledProcessError) as error:
            differences.append(f"{client.name}: {error}")  # the other clients are played
    for line in differences:
        print(f"DIFFERS: {line}", file=sys.stderr)
    print(f"{len(clients)} clients, {len(differences)} differences", file=sys.stderr)
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
