"""Install this project as a user does, without its lock file, into a new environment; then run `tvm-split` there.

A wheel of this checkout is installed with three extras. Outside of the checkout, `demo` runs, and `plan --json` of a
torch network and of an ONNX file. Everything is removed afterwards.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("torch", "onnx", "demo")
NETWORK = """
import onnx, torch
from onnx import TensorProto, helper

def make():
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    return torch.nn.Sequential(*layers).eval(), (torch.zeros(1, 3, 8, 8),)

if __name__ == "__main__":
    nodes = [helper.make_node(kind, [kind], [after]) for kind, after in (("Relu", "Tanh"), ("Tanh", "y"))]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64])] for name in ("Relu", "y")]
    graph = helper.make_graph(nodes, "network", *ends)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), "network.onnx")
"""


def wheel(folder: Path, *options: str) -> Path:
    """Build the wheel of this checkout from a copy of the sources, since pip would leave files beside them."""
    unrelated = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=unrelated)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options, "--wheel-dir", str(folder)]
    run([*command, str(folder / "source")], folder)
    (built,) = folder.glob("*.whl")
    return built


def requirements() -> list[Requirement]:
    """Return the requirements of this project and of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    return [Requirement(text) for group in groups for text in group]


def lowest_versions() -> list[str]:
    """Return constraints with which pip installs the lower bound of each requirement."""
    bounds = {
        requirement.name: specifier.version
        for requirement in requirements()
        for specifier in requirement.specifier
        if specifier.operator in (">=", "==")
    }
    return [f"{name}=={version}" for name, version in bounds.items()]


def locked_torch() -> list[str]:
    """Return torch's version from the lock file, which pip has cached; the newest may be a GPU build of gigabytes."""
    return [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch==")]


def run(command: list[str], folder: Path) -> str:
    """Run a command that does not see this checkout and return its standard output; exit if it fails."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout}")
    return done.stdout


def check(python: str, constraints: list[str]) -> None:
    """Install with one Python and run the commands; exit if one of them fails."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tvm-split-install-") as name:
        folder = Path(name)
        (folder / "constraints.txt").write_text("\n".join(constraints))
        (folder / "network.py").write_text(NETWORK)
        run([python, "-m", "venv", "environment"], folder)
        programs = folder / "environment/bin"
        # Do not compile bytecode, since most modules are never imported here.
        install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
        run([*install, "--constraint", "constraints.txt", f"{wheel(folder)}[{','.join(EXTRAS)}]"], folder)
        installed = json.loads(run([str(programs / "python"), "-m", "pip", "list", "--format=json"], folder))
        versions = {canonicalize_name(package["name"]): package["version"] for package in installed}
        names = sorted({canonicalize_name(requirement.name) for requirement in requirements()})
        print(f"{python}, installed in {time.monotonic() - started:.0f} s:", flush=True)
        print(" ".join(f"{name}=={versions[name]}" for name in names), flush=True)
        run([str(programs / "tvm-split"), "demo"], folder)
        run([str(programs / "python"), "network.py"], folder)
        for model in ("network:make", "network.onnx"):
            # Plan for latency, since that calls the solver, a library that has written to standard output before.
            options = ["plan", model, "--objective", "latency", "--json"]
            plan = json.loads(run([str(programs / "tvm-split"), *options], folder))
            print(f"{model}: a plan of {len(plan['stages'])} stages", flush=True)
    print(f"{python}: passed in {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true", help="the lower bound of each requirement, not the newest")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", default=[sys.executable])
    arguments = parser.parse_args()
    for python in arguments.pythons:
        check(python, lowest_versions() if arguments.lowest else locked_torch())


if __name__ == "__main__":
    main()
