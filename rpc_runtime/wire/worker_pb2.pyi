from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CudaDevice(_message.Message):
    __slots__ = ("index", "arch", "memory_bytes", "memory_free_bytes", "bus_identity", "bus_bytes_per_second", "bus_latency_seconds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUS_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    BUS_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BUS_LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    arch: str
    memory_bytes: int
    memory_free_bytes: int
    bus_identity: str
    bus_bytes_per_second: float
    bus_latency_seconds: float
    def __init__(self, index: _Optional[int] = ..., arch: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., bus_identity: _Optional[str] = ..., bus_bytes_per_second: _Optional[float] = ..., bus_latency_seconds: _Optional[float] = ...) -> None: ...

class Cuda(_message.Message):
    __slots__ = ("driver", "problem", "compiler")
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    COMPILER_FIELD_NUMBER: _ClassVar[int]
    driver: int
    problem: str
    compiler: str
    def __init__(self, driver: _Optional[int] = ..., problem: _Optional[str] = ..., compiler: _Optional[str] = ...) -> None: ...

class HeldDeployment(_message.Message):
    __slots__ = ("name", "model", "owner", "weight_bytes", "micro_batches_per_second")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    owner: str
    weight_bytes: int
    micro_batches_per_second: float
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., owner: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., micro_batches_per_second: _Optional[float] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("protocol_version", "machine", "hostname", "architecture", "cpu_features", "cores", "threads", "memory_total_bytes", "memory_free_bytes", "tvm_version", "tvm_ffi_version", "numpy_version", "cuda_devices", "secure", "deployments", "clock_nanoseconds", "process_id", "core_numbers", "core_quota", "quota_group", "boot_id", "memory_domain", "cuda")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CPU_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TVM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TVM_FFI_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMPY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CUDA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    CORE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CORE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    QUOTA_GROUP_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    machine: str
    hostname: str
    architecture: str
    cpu_features: _containers.RepeatedScalarFieldContainer[str]
    cores: int
    threads: int
    memory_total_bytes: int
    memory_free_bytes: int
    tvm_version: str
    tvm_ffi_version: str
    numpy_version: str
    cuda_devices: _containers.RepeatedCompositeFieldContainer[CudaDevice]
    secure: bool
    deployments: _containers.RepeatedCompositeFieldContainer[HeldDeployment]
    clock_nanoseconds: int
    process_id: int
    core_numbers: _containers.RepeatedScalarFieldContainer[int]
    core_quota: float
    quota_group: str
    boot_id: str
    memory_domain: str
    cuda: Cuda
    def __init__(self, protocol_version: _Optional[int] = ..., machine: _Optional[str] = ..., hostname: _Optional[str] = ..., architecture: _Optional[str] = ..., cpu_features: _Optional[_Iterable[str]] = ..., cores: _Optional[int] = ..., threads: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., tvm_version: _Optional[str] = ..., tvm_ffi_version: _Optional[str] = ..., numpy_version: _Optional[str] = ..., cuda_devices: _Optional[_Iterable[_Union[CudaDevice, _Mapping]]] = ..., secure: bool = ..., deployments: _Optional[_Iterable[_Union[HeldDeployment, _Mapping]]] = ..., clock_nanoseconds: _Optional[int] = ..., process_id: _Optional[int] = ..., core_numbers: _Optional[_Iterable[int]] = ..., core_quota: _Optional[float] = ..., quota_group: _Optional[str] = ..., boot_id: _Optional[str] = ..., memory_domain: _Optional[str] = ..., cuda: _Optional[_Union[Cuda, _Mapping]] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("sha256", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class MissingBlobsRequest(_message.Message):
    __slots__ = ("deployment", "blobs")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    blobs: _containers.RepeatedCompositeFieldContainer[Blob]
    def __init__(self, deployment: _Optional[str] = ..., blobs: _Optional[_Iterable[_Union[Blob, _Mapping]]] = ...) -> None: ...

class MissingBlobsReply(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sha256: _Optional[_Iterable[str]] = ...) -> None: ...

class PutBlobRequest(_message.Message):
    __slots__ = ("blob", "chunk", "deployment")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    blob: Blob
    chunk: bytes
    deployment: str
    def __init__(self, blob: _Optional[_Union[Blob, _Mapping]] = ..., chunk: _Optional[bytes] = ..., deployment: _Optional[str] = ...) -> None: ...

class PutBlobReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Weight(_message.Message):
    __slots__ = ("tensor", "blob")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    tensor: Tensor
    blob: Blob
    def __init__(self, tensor: _Optional[_Union[Tensor, _Mapping]] = ..., blob: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("index", "name", "machine", "layers", "device", "library", "weights", "inputs", "outputs", "replica", "turns", "target")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    machine: str
    layers: _containers.RepeatedScalarFieldContainer[str]
    device: str
    library: Blob
    weights: _containers.RepeatedCompositeFieldContainer[Weight]
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    replica: int
    turns: _containers.RepeatedScalarFieldContainer[int]
    target: str
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., machine: _Optional[str] = ..., layers: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., library: _Optional[_Union[Blob, _Mapping]] = ..., weights: _Optional[_Iterable[_Union[Weight, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., replica: _Optional[int] = ..., turns: _Optional[_Iterable[int]] = ..., target: _Optional[str] = ...) -> None: ...

class RouteCodec(_message.Message):
    __slots__ = ("tensor", "source", "destination", "codec")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    source: str
    destination: str
    codec: str
    def __init__(self, tensor: _Optional[str] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class InputCut(_message.Message):
    __slots__ = ("tensor", "input", "axis", "begin")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    tensor: Tensor
    input: str
    axis: int
    begin: int
    def __init__(self, tensor: _Optional[_Union[Tensor, _Mapping]] = ..., input: _Optional[str] = ..., axis: _Optional[int] = ..., begin: _Optional[int] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("inputs", "outputs", "stages", "codecs", "cuts")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    codecs: _containers.RepeatedCompositeFieldContainer[RouteCodec]
    cuts: _containers.RepeatedCompositeFieldContainer[InputCut]
    def __init__(self, inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., codecs: _Optional[_Iterable[_Union[RouteCodec, _Mapping]]] = ..., cuts: _Optional[_Iterable[_Union[InputCut, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("machine", "address", "tls", "transport")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    machine: str
    address: str
    tls: bool
    transport: str
    def __init__(self, machine: _Optional[str] = ..., address: _Optional[str] = ..., tls: bool = ..., transport: _Optional[str] = ...) -> None: ...

class LinkSecret(_message.Message):
    __slots__ = ("source", "destination", "secret")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    secret: bytes
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class LoadStagesRequest(_message.Message):
    __slots__ = ("deployment", "machine", "program", "link_secrets")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    LINK_SECRETS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    machine: str
    program: Program
    link_secrets: _containers.RepeatedCompositeFieldContainer[LinkSecret]
    def __init__(self, deployment: _Optional[str] = ..., machine: _Optional[str] = ..., program: _Optional[_Union[Program, _Mapping]] = ..., link_secrets: _Optional[_Iterable[_Union[LinkSecret, _Mapping]]] = ...) -> None: ...

class LoadStagesReply(_message.Message):
    __slots__ = ("weight_bytes",)
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    weight_bytes: int
    def __init__(self, weight_bytes: _Optional[int] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("deployment", "peers", "timeout_seconds")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    timeout_seconds: float
    def __init__(self, deployment: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatistics]
    def __init__(self, links: _Optional[_Iterable[_Union[LinkStatistics, _Mapping]]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    def __init__(self, deployment: _Optional[str] = ...) -> None: ...

class UnloadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("deployment", "model", "owner")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    model: str
    owner: str
    def __init__(self, deployment: _Optional[str] = ..., model: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("stage", "finished")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    stage: str
    finished: int
    def __init__(self, stage: _Optional[str] = ..., finished: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "peer", "message")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Failure.Kind]
        STAGE: _ClassVar[Failure.Kind]
        LINK: _ClassVar[Failure.Kind]
        PROTOCOL: _ClassVar[Failure.Kind]
        INTERNAL: _ClassVar[Failure.Kind]
    UNKNOWN: Failure.Kind
    STAGE: Failure.Kind
    LINK: Failure.Kind
    PROTOCOL: Failure.Kind
    INTERNAL: Failure.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: Failure.Kind
    peer: str
    message: str
    def __init__(self, kind: _Optional[_Union[Failure.Kind, str]] = ..., peer: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("stages", "activity", "failure")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageProgress]
    activity: int
    failure: Failure
    def __init__(self, stages: _Optional[_Iterable[_Union[StageProgress, _Mapping]]] = ..., activity: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class StatisticsRequest(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    def __init__(self, deployment: _Optional[str] = ...) -> None: ...

class StageStatistics(_message.Message):
    __slots__ = ("name", "micro_batches", "compute_seconds", "median_compute_seconds", "wait_seconds", "receive_seconds", "send_seconds", "bytes_received", "bytes_sent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    micro_batches: int
    compute_seconds: float
    median_compute_seconds: float
    wait_seconds: float
    receive_seconds: float
    send_seconds: float
    bytes_received: int
    bytes_sent: int
    def __init__(self, name: _Optional[str] = ..., micro_batches: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., median_compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., receive_seconds: _Optional[float] = ..., send_seconds: _Optional[float] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ...) -> None: ...

class LinkStatistics(_message.Message):
    __slots__ = ("source", "destination", "transport", "reason")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    transport: str
    reason: str
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StatisticsReply(_message.Message):
    __slots__ = ("stages", "processor_seconds")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageStatistics]
    processor_seconds: float
    def __init__(self, stages: _Optional[_Iterable[_Union[StageStatistics, _Mapping]]] = ..., processor_seconds: _Optional[float] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    def __init__(self, deployment: _Optional[str] = ...) -> None: ...

class TraceEvent(_message.Message):
    __slots__ = ("stage", "sequence", "kind", "start_nanoseconds", "end_nanoseconds", "size_bytes", "peer")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    END_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    stage: str
    sequence: int
    kind: str
    start_nanoseconds: int
    end_nanoseconds: int
    size_bytes: int
    peer: str
    def __init__(self, stage: _Optional[str] = ..., sequence: _Optional[int] = ..., kind: _Optional[str] = ..., start_nanoseconds: _Optional[int] = ..., end_nanoseconds: _Optional[int] = ..., size_bytes: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TraceEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TraceEvent, _Mapping]]] = ...) -> None: ...

class TimedKernel(_message.Message):
    __slots__ = ("function", "arguments", "weights", "results")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    function: str
    arguments: _containers.RepeatedCompositeFieldContainer[Tensor]
    weights: _containers.RepeatedScalarFieldContainer[int]
    results: int
    def __init__(self, function: _Optional[str] = ..., arguments: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., weights: _Optional[_Iterable[int]] = ..., results: _Optional[int] = ...) -> None: ...

class LoadKernelsRequest(_message.Message):
    __slots__ = ("deployment", "machine", "device", "library", "kernels", "weight_bytes", "target")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    machine: str
    device: str
    library: Blob
    kernels: _containers.RepeatedCompositeFieldContainer[TimedKernel]
    weight_bytes: int
    target: str
    def __init__(self, deployment: _Optional[str] = ..., machine: _Optional[str] = ..., device: _Optional[str] = ..., library: _Optional[_Union[Blob, _Mapping]] = ..., kernels: _Optional[_Iterable[_Union[TimedKernel, _Mapping]]] = ..., weight_bytes: _Optional[int] = ..., target: _Optional[str] = ...) -> None: ...

class LoadKernelsReply(_message.Message):
    __slots__ = ("allocated_bytes",)
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    allocated_bytes: int
    def __init__(self, allocated_bytes: _Optional[int] = ...) -> None: ...

class TimeKernelsRequest(_message.Message):
    __slots__ = ("deployment", "minimum_rounds", "minimum_seconds", "limit_seconds")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    minimum_rounds: int
    minimum_seconds: float
    limit_seconds: float
    def __init__(self, deployment: _Optional[str] = ..., minimum_rounds: _Optional[int] = ..., minimum_seconds: _Optional[float] = ..., limit_seconds: _Optional[float] = ...) -> None: ...

class KernelTime(_message.Message):
    __slots__ = ("function", "seconds", "rounds", "error")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    function: str
    seconds: float
    rounds: int
    error: str
    def __init__(self, function: _Optional[str] = ..., seconds: _Optional[float] = ..., rounds: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class TimeKernelsReply(_message.Message):
    __slots__ = ("times",)
    TIMES_FIELD_NUMBER: _ClassVar[int]
    times: _containers.RepeatedCompositeFieldContainer[KernelTime]
    def __init__(self, times: _Optional[_Iterable[_Union[KernelTime, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "deployment", "source", "destination", "secret", "offers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    deployment: str
    source: str
    destination: str
    secret: bytes
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, protocol_version: _Optional[int] = ..., deployment: _Optional[str] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., secret: _Optional[bytes] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "offer")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    transport: str
    offer: bytes
    def __init__(self, transport: _Optional[str] = ..., offer: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("transport", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: str
    reason: str
    def __init__(self, transport: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("answer", "refused")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    answer: Offer
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    def __init__(self, answer: _Optional[_Union[Offer, _Mapping]] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("transport",)
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transport: str
    def __init__(self, transport: _Optional[str] = ...) -> None: ...
