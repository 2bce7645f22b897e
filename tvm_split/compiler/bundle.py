"""A bundle: all results of a compilation, as one object and as a folder.

manifest.json       the content and structure of the bundle; lists every other file with its SHA-256
manifest.sha256     the digest of manifest.json, which detects changes in it
blobs/<sha256>      libraries, and the bytes of weights
ir/<name>.py        the readable IR: the whole annotated module, and one file per machine

A bundle contains regular files and folders only.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ConfigDict, TypeAdapter

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, StageSpec
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.messages import message_of, value_of
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.cuda_code import CudaNeeds
from tvm_split.compiler.rows import Rows
from tvm_split.compiler.stage import Kernel
from tvm_split.errors import BundleError
from tvm_split.outputs import is_unfinished, written
from tvm_split.placement.plan import Plan, with_machine_names
from tvm_split.units import Shown

FORMAT = "tvm-split bundle"
VERSION = 6


class Verified(enum.StrEnum):
    """How a bundle's stages were compared with the source framework before the bundle was made."""

    NO = "no"
    AS_COMPILED = "yes"
    COMPILED_AGAIN = "with stages compiled again for this host"
    """Some stages are for another kind of machine. Their import and passes were checked, but their code never ran."""


@dataclass(frozen=True, repr=False)
class Bundle(Shown):
    """A compiled program, the plan it follows, its blobs and its readable IR.

    ``verified`` says how the compiled stages were compared with the source framework.

    ``ir`` holds ``annotated`` and one text per machine. ``kernels`` gives every stage's kernels in the order of their
    calls, under the stage's name or the `kernels_key` of a further replica. ``versions`` are the versions of TVM and
    its FFI, which a worker must have too. ``cuda`` is what GPU stages need of their workers, under the same keys.
    ``output_error`` is the largest measured difference from the source framework, as a share of the largest magnitude
    of an output; None if nothing was compared. ``model_digest`` is the `Model.digest` of what was compiled. ``rows``
    says whether inputs may have any number of rows.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    model: str
    plan: Plan
    program: Program
    ir: Mapping[str, str]
    kernels: Mapping[str, tuple[Kernel, ...]]
    versions: Mapping[str, str]
    verified: Verified
    blobs: BlobFolder = field(compare=False)
    cuda: Mapping[str, CudaNeeds] = field(default_factory=dict)
    output_error: float | None = None
    model_digest: str = ""
    rows: Rows = field(default_factory=Rows)

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest, which contains the digests of all other files."""
        return hashlib.sha256(self._manifest()).hexdigest()

    def blob_path(self, sha256: str) -> Path:
        return self.blobs.path(sha256)

    def save(self, folder: str | Path) -> None:
        """Write the bundle to a folder, which may hold an older bundle but nothing else.

        Raises:
            BundleError: the folder holds other files, a link or an unknown folder; nothing is written.
            OutputError: it cannot be written; an older bundle is still there.
        """
        folder = Path(folder)
        self.require_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with written(folder) as beside:
            for directory in (beside, beside / "blobs", beside / "ir"):
                directory.mkdir()
            for blob in self.blob_specs:
                shutil.copyfile(self.blob_path(blob.sha256), beside / "blobs" / blob.sha256)
            for name, text in self.ir.items():
                _ir_path(beside, name).write_text(text)
            (beside / "manifest.json").write_bytes(self._manifest())
            (beside / "manifest.sha256").write_text(f"{self.digest}\n")

    @staticmethod
    def require_replaceable(folder: Path) -> None:
        """Raise a `BundleError` if the folder holds anything but a bundle, or a link or folder that no bundle has."""
        if not (folder / "manifest.json").exists() and any(not is_unfinished(path) for path in folder.glob("*")):
            raise BundleError(f"{folder} holds other files; give a new folder, or one with a bundle")
        _require_plain(folder)
        for path in (*folder.glob("blobs/*"), *folder.glob("ir/*")):
            if path.is_dir():
                raise BundleError(f"{folder} holds a folder that no bundle has: {path.relative_to(folder)}; remove it")

    @classmethod
    def load(cls, folder: str | Path) -> Bundle:
        """Read a bundle; check its version, its structure and the digest of every file.

        Raises:
            BundleError: a check fails; names the file, and both digests of a changed one. Links and pipes are refused.
        """
        folder = Path(folder)
        _require_plain(folder)
        manifest = _read_manifest(folder)
        try:
            plan = Plan.from_dict(manifest["plan"], source=f"{folder}/manifest.json: plan")
            digests = dict(manifest["ir"])
            content = cls.from_content({**manifest, "ir": {}}, plan, BlobFolder(folder / "blobs"))
            _check_program(content.program, plan)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, TvmSplitError) as error:
            raise BundleError(
                f"{folder}/manifest.json does not describe a bundle: {type(error).__name__}: {error}"
            ) from error
        ir = {name: _checked_text(_ir_path(folder, name), digest) for name, digest in digests.items()}
        bundle = dataclasses.replace(content, ir=ir)
        for blob in bundle.blob_specs:
            _check_blob(bundle.blob_path(blob.sha256), blob)
        return bundle

    def renamed(self, names: Mapping[str, str]) -> Bundle:
        """Return this bundle with other names of machines; ``names`` maps names in this bundle to new names.

        `deploy` checks that the other machines can run their stages, with the planned number of threads. The names of
        sharded stages and the text of the readable IR stay as they are.

        Raises:
            PlanError: as `Plan.renamed`.
        """
        plan = self.plan.renamed(names)
        program: Program = with_machine_names(self.program, names)
        keys = dict(zip(map(kernels_key, self.program.stages), map(kernels_key, program.stages), strict=True))
        kernels = {keys[key]: stage_kernels for key, stage_kernels in self.kernels.items()}
        cuda = {keys[key]: needs for key, needs in self.cuda.items()}
        ir = {names.get(name, name): text for name, text in self.ir.items()}
        return dataclasses.replace(self, plan=plan, program=program, ir=ir, kernels=kernels, cuda=cuda)

    def content(self) -> dict[str, Any]:
        """Return the bundle as JSON values, without its plan and its blobs."""
        return {**_BUNDLE.dump_python(self, mode="json", exclude={"plan", "blobs", "ir"}), "ir": dict(self.ir)}

    @classmethod
    def from_content(cls, content: Mapping[str, Any], plan: Plan, blobs: BlobFolder) -> Bundle:
        """Return a bundle from the result of `content`; raise ValueError, LookupError or TypeError if it is damaged."""
        bundle = _BUNDLE.validate_python({**content, "plan": plan, "blobs": blobs, "ir": {}})
        return dataclasses.replace(bundle, ir=content["ir"])

    @property
    def blob_specs(self) -> tuple[BlobSpec, ...]:
        """The libraries and weights of all stages, each once."""
        return tuple({blob.sha256: blob for stage in self.program.stages for blob in stage.blobs}.values())

    def _manifest(self) -> bytes:
        ir = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.ir.items()}
        fields = {"format": FORMAT, "version": VERSION, "plan": self.plan.to_dict(), "ir": ir}
        content = {**self.content(), **fields}
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


_BUNDLE = TypeAdapter(Bundle)
"""Reads and writes manifests, except ``ir``: pydantic would change names that are not valid Unicode."""


def kernels_key(stage: StageSpec) -> str:
    """The key of a stage's kernels in a bundle: the stage's name, and for replicas after the first also the machine."""
    return stage.name if stage.replica == 0 else f"{stage.name} on {stage.machine}"


def _require_plain(folder: Path) -> None:
    """Raise a `BundleError` for links, which lead out of the folder, and for pipes and devices, which block readers."""
    for path in chain(folder.glob("*"), folder.glob("*/*")):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "a link" if stat.S_ISLNK(mode) else "a pipe, socket or device"
            raise BundleError(
                f"{path} is {kind}, and a bundle holds files and folders only: do not trust it, or remove it"
            )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        content = path.read_bytes()
        recorded = (folder / "manifest.sha256").read_text(errors="replace").strip()
    except OSError as error:
        raise BundleError(f"{folder} is not a bundle: cannot read {error.filename}: {error.strerror}") from error
    _require_digest(path, hashlib.sha256(content).hexdigest(), recorded, "manifest.sha256")
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from error
    form = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if form != (FORMAT, VERSION):
        raise BundleError(
            f"{path} is a {form[0]!r} of version {form[1]}; this version of tvm-split reads {FORMAT!r} of version "
            f"{VERSION}. Compile the model again"
        )
    return dict(manifest)


def _check_program(program: Program, plan: Plan) -> None:
    """Raise the error that a worker would raise for an inconsistent program."""
    for tensor in (*program.client_tensors, *program.outputs):
        value_of(type(tensor), message_of(pb.Tensor, tensor))
    for stage in program.stages:
        value_of(StageSpec, message_of(pb.Stage, stage))
        plan.machine(stage.machine)
    program.handovers  # noqa: B018  (refuses tensors that no stage makes, and stages that wait for each other)


def _ir_path(folder: Path, name: str) -> Path:
    """The path of a machine's IR. Any text may be the machine's name, so it is quoted to stay in the folder."""
    return folder / "ir" / f"{quote(name, safe=' ', errors='surrogatepass')}.py"


def _checked_text(path: Path, digest: str) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(f"the bundle lacks {path}: {error.strerror}") from error
    _require_digest(path, hashlib.sha256(content).hexdigest(), digest)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not valid UTF-8: {error}") from error


def _check_blob(path: Path, blob: BlobSpec) -> None:
    if not path.is_file():
        raise BundleError(f"the bundle lacks the blob {path}")
    if path.stat().st_size != blob.size_bytes:
        raise BundleError(f"{path} has {path.stat().st_size} bytes, the manifest says {blob.size_bytes}")
    with path.open("rb") as file:
        _require_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), blob.sha256)


def _require_digest(path: Path, actual: str, recorded: str, said_by: str = "the manifest") -> None:
    if actual != recorded:
        raise BundleError(f"{path} was changed: its SHA-256 is {actual}, {said_by} says {recorded}")
