"""Ctrl-C and SIGTERM while a command still loads: it ends, and writes nothing, or one word."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOMENTS_MILLISECONDS = [*range(20, 500, 40), *range(500, 1001, 250)]
FEW = MOMENTS_MILLISECONDS[::3]
REST = [moment for moment in MOMENTS_MILLISECONDS if moment not in FEW]
INTERRUPTED = (130, -signal.SIGINT)  # by our own code, or before Python itself hears of signals
OURS = re.compile(rf'File "{ROOT}/(tvm_split|rpc_runtime)[^"]*", line (?![01],)')
"""Lines of ours, but for the first one of a file, where Python hears of what came while it started or read the file."""


@pytest.mark.parametrize("moments", [FEW, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "rest"])
@pytest.mark.parametrize(
    ("command", "codes"),
    [
        (["-c", "from tvm_split_command import main; main()", "plan", "missing:name"], (*INTERRUPTED, 2)),
        (["-c", "from tvm_split_command import main; main()", "worker"], (*INTERRUPTED, 0)),
        (["-m", "tvm_split.rpc_runtime.worker"], (*INTERRUPTED, 0)),
    ],
    ids=["plan", "worker", "tvm_split.rpc_runtime.worker.process"],
)
def test_no_moment_gives_a_traceback(command, codes, moments):
    for moment in moments:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(moment / 1000)
        errors = interrupted(process)
        if "Traceback" in errors and not OURS.search(errors):
            continue  # Python itself was still starting
        assert "Traceback" not in errors, f"after {moment} ms: {errors}"
        # A command may have told its own error already, and be on its way out.
        assert len(errors.removesuffix("interrupted\n").splitlines()) <= 1, f"after {moment} ms: {errors}"
        assert process.returncode in codes, f"after {moment} ms"


def interrupted(process: subprocess.Popen[str]) -> str:
    """What a process writes after Ctrl-C. While Python itself starts, it may lose one; then a person tries again."""
    for seconds in (20, 40):
        process.send_signal(signal.SIGINT)
        for _ in range(seconds):  # one by one: where all of this is stopped for a while, the time passes for one alone
            try:
                _, errors = process.communicate(timeout=1)
                return errors
            except subprocess.TimeoutExpired as error:
                written = (error.stderr or b"").decode()
        assert "Exception ignored in" in written
        assert not OURS.search(written), written
    raise AssertionError("it went on after two interrupts")


def test_what_ignores_interrupts_still_does():
    """As shells start what runs in the background."""
    code = "import signal, tvm_split_command; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout == "True\n"


@pytest.mark.parametrize("module", ["tvm_split", "tvm_split.rpc_runtime.worker"])
@pytest.mark.parametrize(
    ("number", "code", "told"), [(signal.SIGINT, 130, b""), (signal.SIGTERM, 143, b"terminated\n")], ids=str
)
def test_the_package_itself_may_be_interrupted(tmp_path: Path, module: str, number: int, code: int, told: bytes):
    """As Python loads it before the module that it was told to run: here by what it imports first.

    SIGTERM with the word and code of a command that it ends later.
    """
    (tmp_path / "typing.py").write_text(f"import signal; signal.raise_signal({int(number)})")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules.pop('typing', None)")
    process = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True
    )
    assert (process.returncode, process.stderr) == (code, told)


def test_sigterm_ends_a_command_at_any_moment_with_one_word():
    command = [sys.executable, "-c", "from tvm_split_command import main; main()", "demo"]
    for moment in FEW:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(moment / 1000)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
        if process.returncode == -signal.SIGTERM:
            assert not errors, f"after {moment} ms: {errors}"
            continue  # before a line of ours
        assert process.returncode == 143, f"after {moment} ms"
        assert errors.splitlines()[-1] == "terminated", f"after {moment} ms: {errors}"
        assert "Traceback" not in errors, f"after {moment} ms: {errors}"


def test_a_library_leaves_interrupts_alone(tmp_path: Path):
    loaded = "tvm_split.cli.application, tvm_split.rpc_runtime.worker.process"
    code = f"import signal, {loaded}; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))"
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("import tvm_split")  # while `argv` begins with "-m"
    (tmp_path / "lab" / "__main__.py").write_text(code)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (["-c", code], ["-m", "lab"]):
        process = subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert "default_int_handler" in process.stdout
        assert process.stdout.endswith(f"{signal.SIG_DFL}\n")
