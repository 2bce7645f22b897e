"""What all commands have in common: help, start-up, exit codes, signals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_split
from tests.helpers.toy import toy_plugin_installed
from tests.helpers.waiting import PATIENCE_SECONDS

COMMANDS = ("demo", "plan", "solve", "compile", "tune", "worker", "deploy", "run", "status", "doctor")
HEAVY = ("tvm", "torch", "onnx", "jax", "keras", "numpy", "grpc", "pydantic", "matplotlib")


def test_help_lists_all_commands(invoke):
    text = invoke("--help").stdout
    assert all(f" {command} " in text for command in COMMANDS)
    assert "Exit codes" in text


def test_a_package_adds_a_command(invoke):
    with toy_plugin_installed():
        assert " toy-greet " in invoke("--help").stdout
        assert "--name" in invoke("toy-greet", "--help").stdout
        assert invoke("toy-greet", "--name", "toy").stdout == "Hello, toy!\n"


def test_as_a_module():
    command = [sys.executable, "-m", "tvm_split", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == tvm_split.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bake"], "No such command"),
        (["plan"], "Missing argument"),
        (["run", "x.onnx", "--random", "2", "--inputs", __file__], "give one of them"),
        (["status"], "name the workers to ask"),
        (["worker", "--tls-ca", "ca.pem"], "--tls-ca needs"),
        (["demo", "--workers", "9"], "--workers"),
        (["solve", __file__, "--time-limit", "inf"], "--time-limit: inf is not a number of at most 1e+09"),
        (["status", "--cluster", "local:1", "--timeout", "nan"], "--timeout: "),
    ],
)
def test_wrong_use_is_2_and_said_on_stderr(invoke, arguments, message):
    result = invoke(*arguments, code=2)
    assert message in result.stderr
    assert result.stdout == ""


def test_commands_are_loaded_without_what_they_need_when_they_run():
    code = "import sys, tvm_split.cli.application; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(HEAVY) & set(modules)
    code = "import sys; from tvm_split.cli.application import loaded, registry\n"
    code += "for _, row in registry.items(): loaded(row)\nprint(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"tvm", "torch"} & set(modules)


def test_a_user_without_a_home_is_told_what_to_set(tmp_path):
    code = "import os, sys\nos.path.expanduser = lambda path: path\nsys.argv[1:] = ['cache', 'show']\n"
    code += "from tvm_split.cli.application import run_application\nrun_application()"
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "TVM_SPLIT_CACHE": str(tmp_path)}, check=False
    )
    sentence = (
        "error: this user has no home: set HOME to a folder of this user, where TVM and other libraries keep files\n"
    )
    assert (result.returncode, result.stderr) == (2, sentence)


def test_debug_shows_where(start_process):
    for shown, process in (
        (True, start_process("plan", "missing:name", env={**os.environ, "TVM_SPLIT_DEBUG": "1"})),
        (False, start_process("plan", "missing:name")),
    ):
        _, errors = process.communicate(timeout=60)
        assert ("Traceback" in errors) == shown
        assert errors.splitlines()[-1] == "error: MODEL: cannot import 'missing': No module named 'missing'"
        assert process.returncode == 2


def test_a_reader_that_leaves_early_is_no_error_message(start_process):
    process = start_process("--help")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 1
    assert errors == ""


@pytest.mark.parametrize("text", ["cache show", "cache show --json", "plan MODEL --layers", "solve --help", "tracker"])
def test_a_full_disk_is_one_sentence(start_process, onnx_path, text):
    """However the command writes: at once, as a table, in pieces, or before it runs on."""
    with Path("/dev/full").open("w") as full:
        process = start_process(*text.replace("MODEL", str(onnx_path)).split(), stdout=full)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    sentence = "error: the result cannot be written: No space left on device; make room, or write it elsewhere\n"
    assert (process.returncode, errors) == (1, sentence)


@pytest.mark.parametrize("option", ["plan --output", "plan --write-problem", "plan --picture", "run --output"])
def test_a_file_on_a_full_disk_is_named(invoke, onnx_path, bundle, tmp_path, option):
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")
    command, name = option.split()
    source = [onnx_path, "--estimate"] if command == "plan" else [bundle]
    result = invoke(command, *source, "--cluster", "in-process", name, full, code=1)
    text = f"error: {full} cannot be written: No space left on device; make room, or write it elsewhere"
    assert result.stderr.splitlines()[-1] == text


OUTPUTS = {
    **{f"plan missing.onnx {name}": "folder" for name in ("--output", "--picture", "--write-annotations")},
    **{f"replan missing.onnx --plan a --measured b {name}": "folder" for name in ("--output", "--picture")},
    **{f"compile missing.onnx {options}": "file" for options in ("--output", "--output here --dump")},
    **{"run missing.onnx --output": "folder", "demo --output": "file"},
}
"""What writes, and over what of another kind it does not."""


@pytest.mark.parametrize(
    "text", [*OUTPUTS, "plan missing.onnx --write-problem", "simulate missing.json --trace", "worker-kit"]
)
def test_every_output_goes_into_a_folder_that_is_there(invoke, tmp_path, monkeypatch, text):
    """The error comes before anything is read or measured."""
    monkeypatch.chdir(tmp_path)
    error = invoke(*text.split(), "nowhere/file.svg", code=2).stderr
    name = text.split()[-1] if "--" in text else "OUTPUT"
    assert error == f"error: {name}: there is no folder 'nowhere' to write file.svg into; make it first\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "path"), OUTPUTS.items())
def test_an_output_of_the_wrong_kind_is_refused_first(invoke, tmp_path, monkeypatch, text, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    error = invoke(*text.split(), path, code=2).stderr
    assert text.split()[-1] in error
    assert f"'{path}' is a {'directory' if path == 'folder' else 'file'}" in error


def test_a_folder_with_other_files_is_refused_before_the_model_is_read(invoke, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    error = invoke("compile", "missing.onnx", "--output", tmp_path, code=1).stderr
    assert str(tmp_path) in error
    assert "missing.onnx" not in error


@pytest.mark.parametrize("name", ["schedules", "relay_passes", "rpc_runtime"])
def test_a_file_that_hides_a_package_of_ours_is_named(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", "import tvm_split"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tvm_split.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"'{tmp_path / name}.py' hides the package '{name}' of tvm-split: rename that file" in ended.stderr


TORN_DOWN = """
import atexit

class Held:
    def __del__(self):
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)

held = Held()
atexit.register(lambda: print("at exit"))
"""


def test_a_command_ends_at_once_after_its_last_words(start_process, tmp_path):
    """Freeing what a process holds takes seconds, in which Ctrl-C would change the exit code; exit handlers run."""
    (tmp_path / "held.py").write_text(TORN_DOWN)
    process = start_process(
        "plan", "held:network", cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    error = "error: MODEL: 'held' has no 'network'\n"
    assert (process.returncode, output, errors) == (2, "at exit\n", error)


INTERRUPTED_IMPORT = """
import signal, sys

class Interrupting:
    def find_spec(self, name, *places):
        if name == "tvm_split.cli.application":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from tvm_split.__main__ import main
main()
"""


def test_ctrl_c_while_a_command_is_loaded_has_the_same_exit_code():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("plan", "x.onnx", "--objective", "speed"), "--objective: 'speed' is not one of 'throughput', 'latency'; "),
        (("plan", "x.onnx", "--workers", "two"), "--workers: must be a whole number; "),
        (("plan", "x.onnx", "--allow-lossy", "2"), "--allow-lossy: must be less than or equal to 1; "),
    ],
)
def test_a_wrong_value_of_an_option_is_one_line_in_plain_words(invoke, arguments, error):
    (line,) = invoke(*arguments, code=2).stderr.splitlines()
    assert line.startswith(f"error: {error}")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--pin", "conv_1=machin-a"], "the cluster has machine-a, machine-b (did you mean 'machine-a'?)"),
        (["--split", "machineb=conv_1"], "the cluster has machine-a, machine-b (did you mean 'machine-b'?)"),
        (["--split", "machine-c=conv_1"], "the cluster has machine-a, machine-b\n"),  # both are as near
    ],
)
def test_a_misspelt_machine_gets_a_suggestion(invoke, onnx_path, options, error):
    result = invoke("plan", onnx_path, "--workers", "2", "--estimate", *options, code=2)
    assert error in result.stderr


def test_sentences_are_whole_where_there_is_no_terminal(invoke, onnx_path):
    lines = invoke("plan", onnx_path, "--workers", "2", "--estimate").stdout.splitlines()
    assert any(line.startswith("Limited by ") and line.endswith("; estimated") for line in lines)


def test_the_usual_options_come_first_and_no_word_is_broken(invoke):
    text = invoke("plan", "--help").stdout
    first = text.index("─ Options ─")
    assert first < text.index("--objective") < text.index("─ Planning ─") < text.index("--minimum-throughput")
    assert "…" not in text
