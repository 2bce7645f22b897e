"""The table of all commands, and their common handling of exit codes, errors and signals.

Ctrl-C, SIGTERM and SIGHUP end a command within two seconds, with one line of output and exit code 130, 143 or 129.

The main thread may be inside TVM, which may return to Python only after minutes, and turns a KeyboardInterrupt in a
callback into errors of its own. So nothing is raised there: another thread waits for signals, cleans up the command's
temporary files and processes, and ends the process. A command that handles a signal itself is left alone.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup

import tvm_split
from rpc_runtime import DEBUG_VARIABLE, is_debugging
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.files import FULL, NO_HOME, SET_HOME
from rpc_runtime.processes import clear_away, take_stdout
from rpc_runtime.registry import PluginWarning, Registry
from tvm_split.cli.options import has_hidden, with_groups
from tvm_split.display.console import STDOUT, print_error, print_note
from tvm_split.errors import CacheWarning, CompileWarning, NoPlanError, RecoveryWarning, UntriedVersionWarning

UsageError: type[Exception] = cast(type[Exception], typer.BadParameter.__base__)
"""The class of all that typer refuses; typer does not export it."""
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
END_SECONDS = 20.0
"""The time limit for cleaning up, longer than it takes; then the process ends with exit code 1."""
SHOW_CURSOR = "\r\x1b[K\x1b[?25h"
"""Erases the line of a progress bar and shows the cursor, which the bar has hidden."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let the signals of `WORDS` end the process in this context, unless ignored at the start (main thread only)."""
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)  # before the handlers, so that no signal is lost
    threading.Thread(target=_wait, args=(wakeup_reader,), name="signals", daemon=True).start()
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _heard)
    try:
        yield
    finally:
        _leave_the_end_to_signals()  # cleaning up may cause errors here; they must not end the process


_HEARD: set[int] = set()


def _leave_the_end_to_signals() -> None:
    """Never return if a signal ends this process; the error may be that a child process got the same signal."""
    if _HEARD:
        threading.Event().wait()


def _heard(number: int, frame: FrameType | None) -> None:
    """Record a signal; Python writes a signal's number to the wakeup pipe only if it has a Python handler."""
    _HEARD.add(number)


def _wait(heard: int) -> None:
    while True:
        for number in os.read(heard, 64):
            # The command may have installed its own handler before this thread ran. Python runs pending handlers
            # before it installs another one, so check the current handler first, then the recorded signals.
            if signal.getsignal(number) is _heard or number in _HEARD:
                _HEARD.add(number)
                _end(signal.Signals(number))


def _end(number: signal.Signals) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    # A timer that works without the GIL, in case cleaning up hangs while it holds the GIL.
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=nothing)
    text = SHOW_CURSOR if sys.stderr.isatty() else ""
    errors = os.dup(2)
    # Hide the output of everything that fails from now on because of the cleaning up.
    for stream in (1, 2, STDOUT.file.fileno()):
        os.dup2(nothing, stream)
    with suppress(OSError):  # the same signal may have ended the reader
        os.write(errors, f"{text}{WORDS[number]}\n".encode())
    os.close(errors)
    try:
        clear_away()
        # Other child processes, such as builders and linkers, remove their files on SIGTERM.
        _kill_children(signal.SIGTERM)
        time.sleep(0.2)
        _kill_children(signal.SIGKILL)
        clear_away()  # the main thread has gone on meanwhile
    finally:
        os._exit(128 + number)


def _kill_children(number: signal.Signals) -> None:
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for child in (task / "children").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), number)


FAILED = 1
WRONG_USE = 2
PLANS_TOO = "It takes the planning options of `tvm-split plan` as well."
START, PLAN, BUILD, RUN, MACHINES = "Start", "Plan", "Build", "Run", "Machines"


class Command(NamedTuple):
    """A command: a function of the same name (with underscores), whose docstring is its help.

    The function is in ``module``, imported when the command is called; without a dot, a module of this package. By
    default the module is named like the command.
    """

    name: str
    panel: str
    summary: str
    module: str = ""
    parses_arguments: bool = False
    """Whether the function parses its arguments itself, ``--help`` included."""

    @property
    def function(self) -> str:
        return self.name.replace("-", "_")


COMMANDS = (
    Command("demo", START, "Train a small network, split it, and show what happens."),
    Command("doctor", START, "Check this installation, or the machines of a cluster."),
    Command("plan", PLAN, "Show the best split of a model over the machines."),
    Command("replan", PLAN, "Improve a plan that has run by what was measured of it.", "plan"),
    Command("simulate", PLAN, "Say what a plan would do, without machines."),
    Command("profile", PLAN, "Time the kernels of a model here, or its pieces on a cluster.", "compile"),
    Command("solve", PLAN, "Plan numbers instead of a model.", "simulate"),
    Command("compile", BUILD, "Compile each stage of a plan for its machine, and check the result."),
    Command("tune", BUILD, "Measure better choices for a model's kernels.", "compile"),
    Command("run", RUN, "Stream inputs through a bundle or a model.", "running"),
    Command("bench", RUN, "Measure latency and throughput beside what the plan predicts.", "running"),
    Command("deploy", RUN, "Send a bundle's files to its machines, and check that they can run it.", "running"),
    Command(
        "worker", MACHINES, "Run stages on this machine until Ctrl-C or SIGTERM.", "services", parses_arguments=True
    ),
    Command("worker-kit", MACHINES, "Pack a worker for a machine without internet.", "up"),
    Command("up", MACHINES, "Start workers over ssh."),
    Command("down", MACHINES, "End the workers that `up` started.", "up"),
    Command("tracker", MACHINES, "Run a TVM RPC tracker until Ctrl-C or SIGTERM.", "services"),
    Command("certs", MACHINES, "Make the certificates of a lab's machines and people.", "trust"),
    Command("token", MACHINES, "Make a caller's token, and its line for workers.", "trust"),
    Command("status", MACHINES, "Ask workers what they are."),
    Command("drain", MACHINES, "Move all stages away from a machine, for maintenance.", "status"),
    Command("trace", MACHINES, "Record what a running deployment does.", "status"),
    Command("dashboard", MACHINES, "Show what a running deployment does, in a browser.", "status"),
    Command("report", RUN, "Show a saved trace, or write it as a page.", "status"),
    Command("cache", MACHINES, "Show or clear what is kept on this host."),
)
registry = Registry[Command](
    "tvm_split.commands", "command", {row.name: row for row in COMMANDS}, Command, instances=True
)


class Commands(TyperGroup):
    """The group of all registered commands; an expected error ends the process with a message and an exit code.

    The code is 1 if the command failed, and 2 if it was used wrongly.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, _ in registry.items()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return ListedCommand(registry[cmd_name]) if cmd_name in registry else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _end_with(error, _usage_text(error), wrong_use=True)
        except TvmSplitError as error:
            _end_with(error, str(error), wrong_use=isinstance(error, ValueError) and not isinstance(error, NoPlanError))
        except RuntimeError as error:
            if str(error) != NO_HOME:
                raise
            _end_with(error, f"this user has no home: {SET_HOME}", wrong_use=True)
        except BrokenPipeError:
            raise  # the reader of the output has gone; typer ends without a message
        except OSError as error:
            if error.filename is None and error.errno not in FULL:
                raise
            if error.filename is None:
                _discard(STDOUT.file)  # what is left in it would fail again
            _end_with(error, _os_error_text(error), wrong_use=False)


class ListedCommand(TyperCommand):
    """A command in the list of commands; its own module is imported only when the command is called."""

    def __init__(self, row: Command) -> None:
        super().__init__(row.name, help=row.summary, rich_help_panel=row.panel)
        self._row = row

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return loaded(self._row).make_context(info_name, args, parent, **extra)


class LoadedCommand(TyperCommand):
    """A command that runs with ``sys.stdout`` redirected to the context's object, a stream for libraries, if any."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.obj is None:
            return super().invoke(ctx)
        with redirect_stdout(ctx.obj):
            return super().invoke(ctx)


def loaded(row: Command) -> Any:
    """Import a command's module, and return the command with its options as an object of typer."""
    name = row.module or row.function
    module = importlib.import_module(name if "." in name else f"{__package__}.{name}")
    function = getattr(module, row.function)
    help = (function.__doc__ or row.summary) + (f"\n\n{PLANS_TOO}" if has_hidden(function) else "")
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    names: list[str] = [] if row.parses_arguments else ["-h", "--help"]
    settings = {
        "help_option_names": names,
        "allow_extra_args": row.parses_arguments,
        "ignore_unknown_options": row.parses_arguments,
    }
    alone.command(row.name, cls=LoadedCommand, help=help, context_settings=settings)(with_groups(function))
    return typer.main.get_command(alone)


def _end_with(error: Exception, text: str, *, wrong_use: bool) -> None:
    _leave_the_end_to_signals()
    if is_debugging():
        traceback.print_exception(error)
    print_error(text)
    raise typer.Exit(WRONG_USE if wrong_use else FAILED) from error


def _usage_text(error: Any) -> str:
    """Return typer's error without markup, followed by the command that lists the options."""
    from tvm_split.values import plain  # imported here, since it loads pydantic

    wrong = re.sub(r"^Invalid value for '(.*?)': ", r"\1: ", plain(error.format_message())).rstrip(".")
    command = error.ctx.command_path if error.ctx else "tvm-split"
    return f"{wrong}; `{command} --help` lists what there is"


def _os_error_text(error: OSError) -> str:
    if error.filename is None:
        return f"the result cannot be written: {error.strerror}; make room, or write it elsewhere"
    remedy = "; repair its owner or mode (chown, chmod), or name another one" * isinstance(error, PermissionError)
    return f"{error.filename}: {error.strerror}{remedy}"


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


def _print_version(requested: bool) -> None:
    if requested:
        print(tvm_split.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error was raised, and what libraries log.")
    ] = False,
) -> None:
    if debug:
        os.environ.update({DEBUG_VARIABLE: "1", "GRPC_VERBOSITY": "ERROR"})
    if not is_debugging():
        # TensorFlow reports its devices, and that it uses oneDNN, which no log level leaves out.
        for variable, value in (("TF_CPP_MIN_LOG_LEVEL", "1"), ("TF_ENABLE_ONEDNN_OPTS", "0")):
            os.environ.setdefault(variable, value)


def run_application() -> None:
    """Run the command of this process's arguments and end the process."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # from libraries, about code that a user cannot change
        for category in (CacheWarning, CompileWarning, PluginWarning, RecoveryWarning, UntriedVersionWarning):
            warnings.simplefilter("always", category)
        # Leave out the position in our code, which does not help a user.
        warnings.showwarning = lambda message, *_, **__: _print_warning(str(message))
    # typer writes help and shell completion to `sys.stdout`; they are results, so redirect before any command runs.
    for_libraries = sys.stdout
    sys.stdout = STDOUT.file = take_stdout()
    with suppress(AttributeError):  # not a stream of text
        sys.stdout.reconfigure(errors="replace")  # type: ignore[attr-defined]
    gc.set_threshold(50_000)  # instead of 700: most new objects belong to loaded modules, and are never garbage
    with ended_by_signals():
        _end_at_once(_exit_code(for_libraries))


def _exit_code(for_libraries: IO[str]) -> int:
    """Run the command; return its exit code once its output is written. Libraries print to ``for_libraries``."""
    try:
        try:
            app(obj=for_libraries)
        finally:
            _flush(STDOUT.file)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
    return 0


def _end_at_once(code: int) -> None:
    """End the process without freeing what TVM and torch hold, which takes seconds after the last output."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, also by the parent process
            stream.flush()
    _leave_the_end_to_signals()
    os._exit(code)


@functools.cache
def _print_warning(text: str) -> None:
    """Print each text only once. Python's own record of shown warnings is lost when a library changes the filters."""
    print_note(f"warning: {text}")


def _discard(stream: IO[str]) -> None:
    """Redirect a stream to the null device, so that flushing its buffer at Python's exit cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush(stream: IO[str]) -> None:
    try:
        stream.flush()
    except OSError as error:
        _discard(stream)
        if error.errno in FULL:
            print_error(_os_error_text(error))
            raise SystemExit(FAILED) from error
