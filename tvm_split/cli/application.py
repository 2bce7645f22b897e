"""All commands in one application, and what is common to them: exit codes, errors, signals."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Annotated, Any, TextIO, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

import tvm_split
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.result_stream import take_stdout
from tvm_split.cli import (
    bench,
    cache,
    compile,
    demo,
    deploy,
    doctor,
    plan,
    profile,
    replan,
    run,
    simulate,
    solve,
    status,
    tune,
    up,
    worker,
    worker_kit,
)
from tvm_split.cli.console import STDOUT, print_error, print_note
from tvm_split.cli.hidden_torch import hide_torch_from_tvm
from tvm_split.cli.interrupts import ended_by_signals
from tvm_split.errors import MeasurementsWarning, UntriedVersionWarning

DEBUG_VARIABLE = "TVM_SPLIT_DEBUG"
FAILED = 1
WRONG_USE = 2


class Commands(TyperGroup):
    """Turns expected errors into one line and an exit code: 1 for what failed, 2 for what cannot be meant."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TvmSplitError as error:
            _end_with(error, str(error), wrong_use=isinstance(error, ValueError))
        except BrokenPipeError:
            raise  # whoever read the output has left; typer ends quietly
        except OSError as error:
            if error.filename is None:
                raise
            _end_with(error, f"{error.filename}: {error.strerror}", wrong_use=False)


class Command(TyperCommand):
    """While a command runs, ``sys.stdout`` is the stream for libraries, if there is one: the context's object."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.obj is None:
            return super().invoke(ctx)
        with redirect_stdout(ctx.obj):
            return super().invoke(ctx)


def _end_with(error: Exception, text: str, *, wrong_use: bool) -> None:
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        traceback.print_exception(error)
    print_error(text)
    raise typer.Exit(WRONG_USE if wrong_use else FAILED) from error


app = typer.Typer(
    name="tvm-split",
    cls=Commands,
    help="Split a neural network over unequal machines, compile each part for its machine, run them as one pipeline.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use. TVM_SPLIT_DEBUG=1 shows where an error was raised.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(tvm_split.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error was raised.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose parameters that are frozen dataclasses become one option for each of their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [
                inspect.Parameter(field, parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
                for field, each in inspect.signature(groups[name], eval_str=True).parameters.items()
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    del with_options.__wrapped__  # typer is to see the options
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


app.command("demo")(demo.demo)
app.command("plan")(with_groups(plan.plan))
app.command("replan")(with_groups(replan.replan))
app.command("solve")(solve.solve)
app.command("simulate")(simulate.simulate)
app.command("compile")(with_groups(compile.compile))
app.command("tune")(with_groups(tune.tune))
app.command("worker", context_settings=worker.PASSED_ON)(worker.worker)
app.command("worker-kit")(worker_kit.worker_kit)
app.command("up")(up.up)
app.command("down")(up.down)
app.command("deploy")(with_groups(deploy.deploy))
app.command("run")(with_groups(run.run))
app.command("bench")(with_groups(bench.bench))
app.command("profile")(with_groups(profile.profile))
app.command("cache")(cache.cache)
app.command("status")(with_groups(status.status))
app.command("doctor")(doctor.doctor)
for _registered in app.registered_commands:
    _registered.cls = Command


def run_application() -> None:
    """Run the command of this process's arguments and end the process."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries, about code that the user of a command cannot change
        for category in (MeasurementsWarning, UntriedVersionWarning):
            warnings.simplefilter("always", category)
        # Without the place in our code, which tells the user of a command nothing.
        warnings.showwarning = lambda message, *_, **__: _print_warning(str(message))
    hide_torch_from_tvm()
    # Help and shell completion, which come before a command, are results too, and typer writes them to `sys.stdout`.
    for_libraries = sys.stdout
    sys.stdout = STDOUT.file = take_stdout()
    gc.set_threshold(50_000)  # new objects, not 700: most are of modules that commands load, none of which is garbage
    with ended_by_signals():
        try:
            app(obj=for_libraries)
        finally:
            _flush(STDOUT.file)


@functools.cache
def _print_warning(text: str) -> None:
    """Print each text once: Python forgets what it has shown whenever a library changes the filters of warnings."""
    print_note(f"warning: {text}")


def _flush(stream: TextIO) -> None:
    """Write what is buffered; where nobody reads it any more, drop it, or Python would complain of it at its end."""
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
