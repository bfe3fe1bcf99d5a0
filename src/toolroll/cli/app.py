"""The commands and their options.

A command imports what it needs when it runs, so that `toolroll --help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from toolroll.cli.audit import audit
from toolroll.cli.display import Output, page_line, print_line, show_reports
from toolroll.cli.env_commands import Env, EnvArgs, Split, check_env, new_env
from toolroll.cli.options import (
    flag_of,
    help_of,
    option_parameters,
    used_options,
    with_parameters,
)
from toolroll.cli.outcomes import files_line, show_outcomes
from toolroll.cli.serve_command import serve as serve_endpoint
from toolroll.evaluation.run_config import PANELS, RunConfig, json_object, load_config
from toolroll.rollout.errors import RolloutError, ToolrollError, UsageError
from toolroll.rollout.runtime.event_loop import run as run_loop
from toolroll.rollout.runtime.targets import is_target
from toolroll.rollout.runtime.threads import end_within
from toolroll.rollout.settings import EmbeddedEngineSettings

T = TypeVar("T")
EXIT_SECONDS = 10.0
app = typer.Typer(help="Token-exact multi-turn tool rollouts for SGLang.", no_args_is_help=True)
console = Output()
app.command(name="serve")(serve_endpoint)
app.command()(audit)
app.command(name="new-env")(new_env)
app.command(name="check-env")(check_env)


def _version(*, value: bool) -> None:
    if value:
        typer.echo(f"toolroll {version('toolroll')}")
        raise typer.Exit


def command() -> None:
    """Run `main` as a program, which ends within `EXIT_SECONDS` after its work is done."""
    for number in range(3):  # a file or socket that took the number of a closed one would get text
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    status = 1
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        raise
    finally:
        _discard_unwritable()
        end_within(EXIT_SECONDS, status)


def main() -> None:
    """Run the `toolroll` command. Print toolroll's errors and the system's on one line."""
    try:
        app()
    except (ToolrollError, OSError) as error:
        line = str(error)
        if isinstance(error, OSError):
            line = f"{error.filename or 'standard output'}: {error.strerror or error}"
        message = Text.assemble(("toolroll:", "bold red"), f" {line}")
        with suppress(OSError):
            Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)


def _discard_unwritable() -> None:
    """Discard what standard output or standard error cannot write, so that Python's own attempt at
    the end does not change the exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@app.callback()
def _root(
    *,
    show: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version and exit", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Token-exact multi-turn tool rollouts for SGLang."""


def _play(
    env: str | None,
    config: Path | None,
    recorded: Path | None,
    *,
    trust: bool | None,
    **options: Any,
) -> None:
    """Play an environment against an engine, and print the results.

    With --out, it continues a run that was stopped. With --from, it plays a recorded run again.

    Example: toolroll run desk --engine http://127.0.0.1:30000 --model Qwen/Qwen3-8B --out out/desk
    """
    from toolroll.evaluation.recorded_run import RUNNING, recorded_run, refuse_code

    again = None if recorded is None else recorded_run(recorded, env)
    values = {} if again is None else again.values
    used = used_options(RunConfig, options)
    if again is not None and not trust:
        named = used.keys() | ({"env"} if is_target(env or "") else set())
        refuse_code(values, sorted(RUNNING - named), how="give this setting in the command")
    env = env if again is None or is_target(env or "") else values["env"]
    settings = load_config(config, {"env": env, **used}, values)
    with console.status("Starting"):  # imports take a second or two
        from toolroll.cli.run_command import run as run_environment
    outcome = _run(run_environment(settings, console, again))
    show_outcomes({outcome.summary.env: outcome}, console, max_lost=settings.max_lost)


_ENV = typer.Argument(help=f"{help_of('env')} Or see --from, --config.", show_default=False)
_FROM = typer.Option(
    "--from",
    help="The folder or run.json of a run, to play it again. Other options override its settings.",
    rich_help_panel="Files",
)
_TRUST = typer.Option(
    "--trust", help="Run the code that a recorded run names.", rich_help_panel="Files"
)
_CONFIG = typer.Option(help="A YAML file with the same settings.", rich_help_panel="Files")


def _optional(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


app.command(name="run")(
    with_parameters(
        _play,
        [
            _optional("env", Annotated[str | None, _ENV]),
            *option_parameters(RunConfig.model_fields, PANELS),
            _optional("config", Annotated[Path | None, _CONFIG]),
            _optional("recorded", Annotated[Path | None, _FROM]),
            _optional("trust", Annotated[bool | None, _TRUST]),
        ],
    )
)


@app.command()
def envs() -> None:
    """List the environments, and the commands that install missing packages.

    Example: toolroll envs
    """
    from toolroll.cli.display import show_environments
    from toolroll.rollout.runs.registry import environment_names, find_environment

    show_environments([find_environment(name) for name in environment_names()], console)


@app.command()
def frameworks() -> None:
    """List the adapters for training frameworks: versions, names to configure, what they support.

    Example: toolroll frameworks
    """
    from toolroll.cli.display import show_frameworks
    from toolroll.trainers.frameworks import FRAMEWORKS

    show_frameworks(FRAMEWORKS, console)


@app.command()
def tasks(
    env: Env,
    split: Split = None,
    tasks: Annotated[str | None, typer.Option(help=help_of("tasks"))] = None,
    env_args: EnvArgs = None,
    out: Annotated[Path | None, typer.Option(help="the file to write; default: stdout")] = None,
) -> None:
    """Write an environment's tasks as JSON lines, to be used as a trainer's prompt data.

    Example: toolroll tasks desk --out tasks.jsonl
    """
    from toolroll.cli.tasks import task_lines, write_lines

    lines = task_lines(env, split, tasks, json_object(env_args, "--env-args"))
    if out is None:
        typer.echo(b"\n".join(lines))
    else:
        write_lines(lines, out)
        print_line(console, f"{len(lines)} tasks: {out}")


@app.command()
def check_template(
    model: Annotated[
        str,
        typer.Argument(help="folder or name of a tokenizer; `embedded` for the one in the package"),
    ],
    chat_template: Annotated[str | None, typer.Option(help=help_of("chat_template"))] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help=help_of("chat_template_kwargs"))
    ] = None,
    *,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=help_of("trust_remote_code"))
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the report as JSON")] = False,
) -> None:
    """Report what a chat template does to the tokens of tool-calling episodes.

    Exit with 1 if the tokens cannot be exact.

    Example: toolroll check-template Qwen/Qwen3-8B
    """
    from toolroll.cli.check_template import report, show

    kwargs = json_object(chat_template_kwargs, "--chat-template-kwargs")
    certificate = report(model, chat_template, kwargs, trust_remote_code=trust_remote_code)
    show(certificate, console, as_json=as_json)
    if not certificate.exact:
        raise typer.Exit(1)


@app.command()
def view(
    folder: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[
        Path | None, typer.Option(help="the file to write; default: view.html in the folder")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="a tokenizer (folder, name or `embedded`); default: the run's own"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=0, help="show tokens of the first N episodes; default: 20 million tokens"),
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="serve the page, to which new episodes are added")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of --follow; 0: a free one")] = 0,
) -> None:
    """Print the table of a run, finished or not, and write a page with its episodes and tokens.

    Example: toolroll view out/demo
    """
    from toolroll.cli.follow import follow as follow_run
    from toolroll.cli.view import view as view_run

    if follow:
        say = partial(print_line, console)
        _run(follow_run(folder, port, tokenizer=tokenizer, tokens=tokens, say=say))
        return
    page, count, messages, reports = view_run(folder, out=out, tokenizer=tokenizer, tokens=tokens)
    show_reports(reports, console)
    for line in messages:
        print_line(console, line)
    print_line(console, page_line(page, f"{count} episodes, "))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[Path, typer.Option(help="a new folder")],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="parquet (training samples) or atif (Harbor's trajectories with token ids)",
        ),
    ] = "parquet",
    env: Annotated[str | None, typer.Option(help="export only this environment")] = None,
) -> None:
    """Write a run in another format: a data set of training samples, or trajectories.

    Example: toolroll export out/desk --out out/desk-parquet
    """
    from toolroll.cli.export import export as export_run

    for line in export_run(folder, kind, out, env):
        print_line(console, line)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="runs: the baseline, then the others")],
    allow_different: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="a difference that does not matter, such as template"),
    ] = None,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            metavar="REWARD",
            min=0.0,
            help="exit with 3 if the mean reward fell by more, and with 4 if that is not clear",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(metavar="REWARD", min=0.0, help="test whether they differ by less"),
    ] = None,
    power_for: Annotated[
        float | None,
        typer.Option(metavar="REWARD", min=0.001, help="how many tasks show this difference"),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="the comparison as JSON")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="the comparison as Markdown")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a page with the episodes of both")
    ] = None,
) -> None:
    """Compare runs with a baseline run, paired by task and sample (docs/compare.md).

    Example: toolroll compare out/base out/new --fail-if-worse 0.02
    """
    if len(folders) < 2:
        raise UsageError("give at least two folders: the baseline, and what is compared with it")
    from toolroll.cli.compare import as_text, compare_folders, exit_status, json_text
    from toolroll.evaluation.compare import Question

    question = Question(allow_different or (), fail_if_worse, margin, power_for)
    comparisons, messages = compare_folders(folders, question, page)
    if as_json:
        typer.echo(json_text(comparisons))
    else:
        for comparison in comparisons:
            typer.echo(as_text(comparison, markdown=markdown))
    if page is not None:
        messages.append(page_line(page))
    for message in messages:
        print_line(Console(stderr=True), message)
    if fail_if_worse is not None:
        raise typer.Exit(exit_status(comparisons))


@app.command()
def regrade(
    folder: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[Path, typer.Option(help="a new folder, for the run with the new rewards")],
    env: Annotated[
        str | None, typer.Option(help="the environment's FILE.py:NAME, if it is not installed")
    ] = None,
    *,
    trust: Annotated[bool, typer.Option(help="run the file that run.json names")] = False,
) -> None:
    """Replay a run's actions in new environments, without an engine.

    Print the new table, the rewards that changed, and the episodes that the environment does not
    repeat. Exit with 1 if an episode had a reward and has none now.

    Example: toolroll regrade out/desk --out out/desk-regraded
    """
    from toolroll.cli.regrade import regrade_folder
    from toolroll.evaluation.report import read_summary

    lines, lost = _run(regrade_folder(folder, out, env, trust=trust))
    if out.exists():  # no episode, no folder
        show_reports(read_summary(out), console)
        lines.append(files_line([str(out)]))
    for line in lines:
        print_line(console, line)
    if lost:
        raise typer.Exit(1)


def _engine(**options: Any) -> None:
    """Serve the embedded engine: SGLang's /generate, with a small model or scripted replies.

    Example: toolroll engine --port 30000
    """
    _one_blas_thread()
    from toolroll.testing.serve import serve

    used = used_options(EmbeddedEngineSettings, options)
    _run(serve(EmbeddedEngineSettings.read(used, name_of=flag_of)))


_ENGINE = EmbeddedEngineSettings.model_fields
app.command(name="engine")(
    with_parameters(_engine, option_parameters(_ENGINE, {"Options": " ".join(_ENGINE)}))
)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="folder of the episodes; an earlier demo in it is replaced")
    ] = Path("out/demo"),
    samples: Annotated[int, typer.Option(min=1, help="episodes of each task")] = 2,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Play desk with the model in this package, and BFCL with its reference actions: no GPU.

    Example: toolroll demo --out out/demo
    """
    _one_blas_thread()
    from toolroll.cli.demo import run_demo

    show_outcomes(_run(run_demo(console, out, samples=samples, seed=seed)), console, resumes=False)


def _one_blas_thread() -> None:
    """Make OpenBLAS use one thread, unless OPENBLAS_NUM_THREADS is already set. Call this before
    numpy is imported.

    The matrices of a small model are too small to gain from more threads, and each operation would
    wait for the slowest one.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end. Raise `RolloutError` if code of others in `main` exits, whatever its
    exit status is.
    """
    try:
        return run_loop(main)
    except SystemExit as exits:
        raise RolloutError(f"code in this process exited: {exits!r}") from None
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None
