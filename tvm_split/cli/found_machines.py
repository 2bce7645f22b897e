"""Where commands find machines whose workers run already: in a file, at a tracker, or as pods."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tvm_split.cli import options
from tvm_split.cli.console import print_note
from tvm_split.cli.options import WrongUseError

if TYPE_CHECKING:
    from rpc_runtime.wire.security import TlsFiles
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.cluster.discovery import AskedMachine
    from tvm_split.launchers.tracker import TrackedMachine

OF_A_FILE = ("cluster",)


@dataclasses.dataclass(frozen=True)
class FoundMachines:
    """The machines of a cluster file, those that a tracker lists, or pods."""

    cluster: options.ClusterOption = None
    tracker: options.TrackerOption = None
    key: options.KeyOption = None
    kubernetes: options.KubernetesOption = None
    namespace: options.NamespaceOption = None
    token_file: options.TokenFileOption = None
    tls_ca: options.TlsAuthorityOption = None
    tls_certificate: options.TlsCertificateOption = None
    tls_key: options.TlsKeyOption = None

    def __post_init__(self) -> None:
        if self.cluster is not None:
            self.require_none("a cluster file says this for each machine")
        if self.tracker is not None and self.kubernetes is not None:
            raise WrongUseError("give one of them", "--tracker, --kubernetes")
        if self.tracker is None and self.key is not None:
            raise WrongUseError("belongs to --tracker", "--key")
        if self.kubernetes is None and self.namespace is not None:
            raise WrongUseError("belongs to --kubernetes", "--namespace")

    @property
    def is_given(self) -> bool:
        """Whether the command line says where to find machines."""
        return self.cluster is not None or self.tracker is not None or self.kubernetes is not None

    @property
    def words(self) -> str:
        """The options that find these machines again."""
        if self.tracker is not None:
            return f"--tracker {self.tracker}" + f" --key {self.key}" * bool(self.key)
        if self.kubernetes is not None:
            return f"--kubernetes {self.kubernetes}" + f" --namespace {self.namespace}" * bool(self.namespace)
        return f"--cluster {self.cluster or 'FILE'}"

    def found(self) -> Cluster | None:
        """The machines; None if the command line does not say where. Those that are left out are noted on stderr.

        Raises:
            WrongUseError: options that contradict each other.
            ClusterError: the file does not fit, or there is no machine to deploy to.
        """
        from tvm_split.cluster.cluster import Cluster

        if self.cluster is not None:
            return Cluster.from_yaml(self.cluster)
        if self.kubernetes is not None:
            found = Cluster.from_kubernetes(self.kubernetes, namespace=self.namespace, token=self.token, tls=self.tls)
        elif self.tracker is not None:
            from rpc_runtime.wire.tracker import TrackerAddress

            address = TrackerAddress.parse(self.tracker)
            found = Cluster.from_tracker(address.host, address.port, self.key, token=self.token, tls=self.tls)
        else:
            return None
        for name, reason in found.left_out.items():
            print_note(f"left out: {name}, {reason}")
        return found

    def pods(self, timeout_seconds: float) -> tuple[AskedMachine, ...]:
        """Every pod with the labels, also those that are not ready."""
        from tvm_split.launchers.kubernetes import pod_machines

        return pod_machines(self.kubernetes or "", self.namespace, self.token, self.tls, timeout_seconds)

    def tracked(self, timeout_seconds: float) -> tuple[TrackedMachine, ...]:
        """Everything that the tracker lists, also what cannot be deployed to."""
        from rpc_runtime.wire.tracker import TrackerAddress
        from tvm_split.launchers.tracker import tracked_machines

        address = TrackerAddress.parse(self.tracker or "")
        return tracked_machines(address, self.key, self.token, self.tls, timeout_seconds)

    @property
    def token(self) -> str | None:
        from rpc_runtime.wire.security import token_from

        found = token_from(self.token_file)
        return None if found is None else found.text

    @property
    def tls(self) -> TlsFiles | None:
        from rpc_runtime.wire.security import TlsFiles

        if not (self.tls_ca or self.tls_certificate or self.tls_key):
            return None
        return TlsFiles(self.tls_ca, self.tls_certificate, self.tls_key)

    def require_none(self, why: str) -> None:
        """Raise a `WrongUseError` if any of these, of this class or one below it, was given beside a cluster file."""
        for field in dataclasses.fields(self):
            if field.name not in OF_A_FILE and getattr(self, field.name):
                raise WrongUseError(why, "--" + field.name.replace("_", "-"))
