"""The machines of a command, and the model or bundle that its argument names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import tvm_split
from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.option import option
from rpc_runtime.program.specs import TensorSpec
from tvm_split.cli.inputs import random_inputs
from tvm_split.cli.options import WrongUseError, flags_named
from tvm_split.display.console import print_note
from tvm_split.errors import ClusterError, ModelImportError, NoExamplesError, OpenAxesError
from tvm_split.frontends import file_suffixes, is_network
from tvm_split.placement.request import PlanRequest
from tvm_split.progress import step_progress
from tvm_split.reached_workers import reached_workers, require_answers
from tvm_split.units import count_text

IN_PROCESS = "in-process"
DEFAULT_WORKERS = {"local": 2, IN_PROCESS: 1}
"""The number of machines of a location that says none."""


class AskedMachines(NamedTuple):
    """A cluster, and the descriptions of its workers that have answered."""

    cluster: tvm_split.Cluster
    described: dict[str, WorkerDescription]


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """The options that choose the machines; by default worker processes on this host."""

    PANEL: ClassVar[str] = "Machines"

    cluster: str | None = option(
        None,
        "A cluster file (YAML), or a location: at:HOST:PORT, tracker:HOST:PORT?key=box, kubernetes:LABELS, "
        "local:3?threads=2, or in-process, which calls the stages in turn without workers. Credentials of listed "
        "workers: ?token_file=F, ?tls_ca=F, &tls_certificate=F, &tls_key=F, or $TVM_SPLIT_TOKEN.",
        metavar="WHERE",
    )
    tracker: str | None = option(None, "Short for --cluster tracker:HOST:PORT, with ?key=KEY.", metavar="HOST:PORT")
    kubernetes: str | None = option(
        None, "Short for --cluster kubernetes:LABELS, with ?namespace=NAME.", metavar="LABELS"
    )
    workers: int | None = option(None, "Instead of a cluster: so many worker processes on this host.", minimum=1)
    threads: int | None = option(
        None, "Threads of each worker process on this host (default: 1), or of this process.", minimum=1
    )

    def __post_init__(self) -> None:
        chosen = [f"--{name}" for name in ("cluster", "tracker", "kubernetes") if getattr(self, name)]
        if len(chosen) > 1:
            raise WrongUseError("give one of them", ", ".join(chosen))
        for name in ("workers", "threads"):
            if getattr(self, name) and self.location_given not in DEFAULT_WORKERS:
                text = f"--cluster {self.location_given} chooses the machines; on this host: local:3?threads=2"
                raise WrongUseError(text, f"--{name}")

    @property
    def location_given(self) -> str:
        """The location as it was given, without ``workers`` and ``threads``."""
        short_forms = {"tracker": self.tracker, "kubernetes": self.kubernetes}
        return self.cluster or next((f"{name}:{value}" for name, value in short_forms.items() if value), "local")

    @property
    def location(self) -> str:
        """The location of the machines, as for `Cluster.at`."""
        named = self.location_given
        if named not in DEFAULT_WORKERS:
            return named
        threads = f"?threads={self.threads}" if self.threads else ""
        return f"{named}:{self.workers or DEFAULT_WORKERS[named]}{threads}"

    @property
    def is_in_process(self) -> bool:
        """Whether all stages run in this process, without workers."""
        return self.location.partition("?")[0].partition(":")[0] == IN_PROCESS

    @property
    def is_elsewhere(self) -> bool:
        """Whether ``cluster`` (other than in-process), ``tracker`` or ``kubernetes`` chooses the machines."""
        return not self.is_in_process and any((self.cluster, self.tracker, self.kubernetes))

    @property
    def words(self) -> str:
        """The command-line option, for messages, that selects these machines; ``--cluster FILE`` for this host."""
        return f"--cluster {self.location}" if self.is_elsewhere else "--cluster FILE"

    def machines(self) -> tvm_split.Cluster:
        """Return the cluster of the machines, and note on stderr those that are left out.

        Raises:
            ClusterError: the cluster file is invalid, or there is no machine to deploy to.
        """
        cluster = tvm_split.Cluster.at(self.location)
        for name, reason in cluster.left_out.items():
            print_note(f"left out: {name}, {reason}")
        return cluster

    def asked(self, request: PlanRequest, *, deploys: bool = False, standby: int = 0) -> AskedMachines:
        """Return the machines with the descriptions of the workers that ``request`` needs; they are asked here.

        ``deploys`` says whether the plan will be deployed, which needs more workers. ``standby`` machines are not used.

        Raises:
            ClusterError: as `machines`.
            WorkerUnavailableError: a needed worker cannot be reached.
        """
        cluster = self.machines().with_standby(standby)
        with step_progress("asking the machines"):
            return AskedMachines(cluster, reached_workers(cluster.planned, request, deploys=deploys))


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The options for a model besides its source."""

    PANEL: ClassVar[str] = "Model"

    batch: int | None = option(None, "The size of an open first axis of the inputs.", metavar="N", minimum=1)
    dimension: tuple[str, ...] = option((), "The size of an open axis, by its name.", metavar="NAME=SIZE")
    input_shape: tuple[str, ...] = option(
        (),
        "Shape and dtype of an input of an nn.Module that comes without example inputs, such as 1,128:int64. One per "
        "input, in order.",
        metavar="SHAPE[:DTYPE]",
    )

    def load(self, source: str, inputs: Sequence[TensorSpec] = ()) -> tvm_split.Model:
        """Import the model; without options, its dynamic sizes are those of ``inputs``, for which a plan was made.

        Raises:
            WrongUseError: there is no such file, module or function, or an option cannot be parsed.
            ModelImportError: the model cannot be imported.
        """
        shapes = [_tensor(text) for text in self.input_shape]
        dimensions = dict(map(_dimension, self.dimension))
        network, examples, batch = source, None, self.batch
        planned_inputs = () if self != ModelOptions() else inputs
        if is_file(source):
            if not Path(source).exists():
                raise WrongUseError(f"there is no file {source!r}", "MODEL")
            if shapes:
                text = "a file knows its inputs; bind open sizes with --batch or --dimension"
                raise WrongUseError(text, "--input-shape")
            shapes = list(planned_inputs)
        else:
            network, examples = _from_python(source)
            shapes = shapes or list(planned_inputs if examples is None else ())
            rows = {spec.shape[:1] for spec in planned_inputs}
            batch = min(rows)[0] if len(rows) == 1 and rows != {()} else batch
        if shapes:
            (examples,) = random_inputs(shapes, 1).stream(1)
        load_tvm()
        try:
            return tvm_split.load_model(network, examples, batch=batch, dimensions=dimensions or None)
        except OpenAxesError as error:
            raise ModelImportError(f"{error.problem}; give sizes, for example {error.options}") from error
        except NoExamplesError as error:
            text = f"{error.problem}: give the shape of each input, such as 1,3,224,224"
            raise WrongUseError(text, "--input-shape") from error
        except ModelImportError as error:
            if not planned_inputs:
                raise
            shown = ", ".join(map(str, planned_inputs))
            raise ModelImportError(f"{error} (the plan was made for the inputs {shown})") from error


_LOADING = threading.Lock()


def load_tvm() -> None:
    """Import TVM without torch, which TVM imports for tensor conversion if it is installed, in more than a second.

    Commands pass numpy arrays to TVM; models of torch import torch themselves. Calls may overlap, but no other
    thread may import torch meanwhile.
    """
    with _LOADING:
        if "torch" not in sys.modules:
            sys.modules["torch"] = None  # type: ignore[assignment]
            try:
                importlib.import_module("tvm.relax")
            finally:
                del sys.modules["torch"]


def is_file(source: str) -> bool:
    """Whether a text names a file or folder, not a Python function."""
    return Path(source).suffix.lower() in file_suffixes() or Path(source).is_dir()


def planned(model: tvm_split.Model, machines: AskedMachines, request: PlanRequest, **how: Any) -> tvm_split.Plan:
    """Return the plan of a model, as `tvm_split.plan`; errors in the request name the command-line options."""
    with flags_named(PlanRequest):
        return tvm_split.plan(model, machines.cluster, request=request, described=machines.described, **how)


def planned_once(model: tvm_split.Model, machines: AskedMachines, request: PlanRequest) -> tvm_split.Plan:
    """Return the plan that was kept, or else a new one, for commands whose purpose is not the plan; note remarks."""
    plan = planned(model, machines, request, reuse=True)
    for remark in plan.remarks:
        print_note(remark)
    return plan


def bundle_on_machines(
    folder: str | Path, rename: Sequence[str], machines: MachineOptions
) -> tuple[tvm_split.Bundle, tvm_split.Cluster]:
    """Return the bundle in a folder, with its machines renamed by texts OLD=NEW, and the cluster that runs it.

    Workers elsewhere are asked first: reading the bundle takes seconds.
    """
    pairs = [text.partition("=") for text in rename]
    for old, separator, new in pairs:
        if not (old and separator and new):
            raise WrongUseError(f"{old + separator + new!r} is not OLD=NEW", "--rename")
    names = {old: new for old, _, new in pairs}
    elsewhere = machines.machines() if machines.is_elsewhere else None
    with step_progress(f"reading {folder}"):
        if elsewhere is not None:
            require_answers(elsewhere, {names.get(name, name) for name in _machines_of(folder)})
        load_tvm()
        bundle = tvm_split.Bundle.load(folder)
    bundle = bundle.renamed(names) if names else bundle
    return bundle, elsewhere or _cluster_here(bundle, machines)


def _machines_of(folder: str | Path) -> set[str]:
    """Return the machines of a bundle's stages, without TVM; none of a damaged bundle, which `Bundle.load` refuses."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_bytes())
        return {str(stage["machine"]) for stage in manifest["program"]["stages"]}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()


def _cluster_here(bundle: tvm_split.Bundle, machines: MachineOptions) -> tvm_split.Cluster:
    """Return the cluster of this host that the options choose, with the bundle's machine names.

    Raises:
        ClusterError: the bundle is for machines elsewhere, this host cannot run its code, or there are too few workers.
    """
    from tvm_split.cluster.machine import Machine
    from tvm_split.compiler.targets import runs_here  # loads TVM
    from tvm_split.launchers.local import InProcess, Local

    used = [bundle.plan.machine(name) for name in bundle.program.machines]
    elsewhere = ", ".join(f"{machine.name} at {machine.address}" for machine in used if machine.address is not None)
    if elsewhere and machines.workers is None and not machines.is_in_process:
        raise ClusterError(
            f"the bundle was compiled for {elsewhere}: give --cluster with the file that names them, or try it on this "
            f"host with --workers {len(used)}"
        )
    for machine in used:
        if not runs_here(machine.target):
            raise ClusterError(
                f"the stages of {machine.name!r} are compiled for {dict(machine.target)}, which this host cannot run; "
                "give --cluster with the machines that the bundle was compiled for, or compile for this host"
            )
    if not machines.is_in_process and (machines.workers or len(used)) < len(used):
        names = ", ".join(machine.name for machine in used)
        raise ClusterError(f"the bundle needs {len(used)} workers ({names}), --workers gives {machines.workers}")
    planned_threads = sorted({machine.threads for machine in used})
    if machines.threads and planned_threads != [machines.threads]:
        listed = " or ".join(count_text(count, "thread") for count in planned_threads)
        print_note(
            f"the kernels stay those that were compiled for {listed}; to use --threads {machines.threads}, plan and "
            "compile with it too"
        )
    launcher = InProcess() if machines.is_in_process else Local()
    machines_here = tuple(Machine(machine.name, machines.threads or machine.threads) for machine in used)
    return tvm_split.Cluster(machines_here, launcher=launcher)


def _from_python(reference: str) -> tuple[Any, Any]:
    """Return the model and the example inputs (or None) that ``module:name`` refers to."""
    module_name, separator, name = reference.partition(":")
    if not (separator and module_name and name):
        lacking = "" if Path(reference).exists() else "there is no file or folder of that name; "
        text = f"{reference!r} is not a bundle's folder, nor a file that ends in {' or '.join(file_suffixes())}"
        raise WrongUseError(f"{text}, and not MODULE:NAME; {lacking}give one of these", "MODEL")
    # Users expect scripts in the current folder to be found, but installed console scripts do not search it.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
        try:
            tvm_split.require_own_packages()
        except ImportError as error:
            raise WrongUseError(str(error), "MODEL") from error
    try:
        value = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        meant = f"; give the module, without its ending: {module_name[:-3]}:{name}" * module_name.endswith(".py")
        raise WrongUseError(f"cannot import {module_name!r}: {error}{meant}", "MODEL") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise WrongUseError(f"{module_name!r} has no {name!r}", "MODEL")
        value = getattr(value, part)
    if not is_network(value) and callable(value):
        _require_callable_alone(value, reference)
        value = value()
    model, examples = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if is_network(model) and hasattr(model, "eval"):
        model.eval()  # a network in training mode, for example with dropout, is not deterministic
    return model, examples


def _require_callable_alone(function: Any, reference: str) -> None:
    """Raise a `WrongUseError` for a function or class that requires arguments, and say what to name instead."""
    try:
        inspect.signature(function).bind()
    except ValueError:
        pass  # implemented in C, without a signature
    except TypeError as error:
        name = reference.rpartition(":")[2]
        expression = f"{name}(…)" if isinstance(function, type) else f"{name}(…), (example inputs,)"
        raise WrongUseError(
            f"{reference!r} cannot be called without arguments ({error}): name an nn.Module, or a function without "
            f"parameters that returns one and its example inputs, such as `def network(): return {expression}`",
            "MODEL",
        ) from error


def _dimension(text: str) -> tuple[str, int]:
    name, separator, size = text.partition("=")
    if not (name and separator and size.isdigit() and int(size) > 0):
        raise WrongUseError(f"{text!r} is not NAME=SIZE", "--dimension")
    return name, int(size)


def _tensor(text: str) -> TensorSpec:
    sizes, _, dtype = text.partition(":")
    if not all(size.strip().isdigit() for size in sizes.split(",")):
        raise WrongUseError(f"{text!r} is not a shape like 1,3,224,224 or 1,128:int64", "--input-shape")
    try:
        np.dtype(dtype or "float32")
    except TypeError as error:
        raise WrongUseError(f"{dtype!r} is not a dtype of numpy", "--input-shape") from error
    return TensorSpec("input", tuple(int(size) for size in sizes.split(",")), dtype or "float32")
