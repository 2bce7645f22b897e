"""Chooses the codecs of a plan's transfers: those that the cluster names, or the fastest ones."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.hardware import memory_domain
from rpc_runtime.program.codecs import CODECS, NONE, fitting
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.transports.transport import AUTO, DEFAULT, uses_codecs
from tvm_split.cluster.cluster import Workers
from tvm_split.cluster.machine import AUTO_CODEC, Link
from tvm_split.compiler.targets import host_target, runs_here
from tvm_split.compiler.verification import one_by_one, verification_inputs
from tvm_split.compiling import compile
from tvm_split.errors import PlanError
from tvm_split.placement.plan import Plan, PlannedCodec
from tvm_split.placement.prediction import CodedLink, Prediction, predict
from tvm_split.placement.profile import ClusterProfile
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.solution import Solution
from tvm_split.planning.codec_trials import CodecTrial, CodecTrials
from tvm_split.planning.planner import Planner
from tvm_split.profiling.link_probing import probe_links
from tvm_split.profiling.store import default_folder
from tvm_split.progress import StepProgress
from tvm_split.units import short_list

LEAST_GAIN = 0.05
"""Share of a tensor's transfer time that a codec must save; a smaller gain is below the noise of measurements."""
Ends = tuple[str, str]
"""Source and destination of a link."""
Choices = Mapping[Route, CodecTrial]
"""The trial of the chosen codec of each route."""


def with_codecs(planner: Planner, plan: Plan, solution: Solution | None) -> Plan:
    """Return the plan with the codecs that the cluster requests: named ones, or the fastest one for ``auto``.

    If any link requests a codec, the plan's stages are compiled and run here on the model's example inputs. Every
    candidate codec is timed on the transferred tensors. Link speeds come from ``profile``, else from the cluster, else
    they are measured now. Without inputs, a named codec counts with its encoded size (fixed for lossy codecs) and no
    coding time. The plan of a ``solution`` is predicted again with them.

    Raises:
        PlanError: a link's codec is ``auto``, and the model has no inputs to try codecs on or the link's speed is
            unknown.
    """
    cluster, request, on_progress = planner.workers, planner.request, planner.on_progress
    if cluster.launcher.in_process or all(link.codec == NONE for link in cluster.links):
        return plan
    profile = None if solution is None else planner.profile
    has_no_codec = _links_without_codecs(cluster, profile, planner.described)
    report = on_progress or (lambda what, done, steps: None)
    bundle = compile(planner.model, _runnable_here(plan), verify=False, database=request.database, on_progress=report)
    links = {route: cluster.link(*_ends(route)) for route in bundle.program.routes}
    routes = {route: link for route, link in links.items() if link is not None and link.codec != NONE}
    inputs = verification_inputs(planner.model)
    remarks = tuple(_remarks(routes, has_no_codec))
    speeds = {(link.source, link.destination): link.bytes_per_second for link in cluster.links if link.bytes_per_second}
    speeds |= {(link.source, link.destination): link.bytes_per_second for link in (profile.links if profile else ())}
    if inputs is None:
        choices: Choices = {route: _untried(route, link) for route, link in routes.items()}
    else:
        report("trying codecs", 0, 1)
        with closing(CodecTrials(one_by_one(bundle.program)[0], bundle.blob_path, inputs)) as trials:
            sizes = [route.tensor.size_bytes for route in routes]
            probe = partial(_probed, cluster, request, sizes, on_progress)
            choices = _Choosing(trials, plan, request.allow_lossy, speeds, probe, has_no_codec).choose(routes)
        report("trying codecs", 1, 1)
    codecs = tuple(_planned(choices, tried=inputs is not None))
    prediction = plan.prediction
    if solution is not None and codecs:
        coded = {route: trial for route, trial in choices.items() if not has_no_codec(_ends(route))}
        prediction = predict(planner.problem, solution, planner.profile, _coded_links(coded, speeds))
    return dataclasses.replace(plan, codecs=codecs, prediction=prediction, remarks=remarks)


def _ends(route: Route) -> Ends:
    return route.source, route.destination


def _plain(route: Route) -> CodecTrial:
    """Return the trial of a route's tensor without a codec."""
    return CodecTrial(route.tensor.name, NONE, route.tensor.size_bytes, route.tensor.size_bytes)


def _runnable_here(plan: Plan) -> Plan:
    machines = (
        machine if runs_here(machine.target) else dataclasses.replace(machine, target=host_target(machine.threads))
        for machine in plan.machines
    )
    return dataclasses.replace(plan, machines=tuple(machines))


def _links_without_codecs(
    cluster: Workers, profile: ClusterProfile | None, workers: Mapping[str, WorkerDescription]
) -> Callable[[Ends], bool]:
    """Return a function that tells whether a link uses no codec: its ends share memory, or GPUs send directly.

    The function decides by the link's transport. That is the one that the cluster names, else the measured one, else
    the one that the workers' descriptions (those that are known) allow.
    """
    settings = cluster.link_settings
    links = () if profile is None else profile.links
    measured = {(link.source, link.destination): link.transport for link in links if link.transport}

    domains = {CLIENT: memory_domain()} | {name: worker.memory_domain for name, worker in workers.items()}
    if cluster.launcher.on_this_host:
        domains = dict.fromkeys((CLIENT, *cluster.machine_names), memory_domain())

    def has_no_codec(ends: Ends) -> bool:
        setting = settings.get(ends, DEFAULT)
        transport = measured.get(ends, AUTO) if setting.wanted == AUTO else setting.wanted
        if transport == AUTO:
            transport = setting.expected(*(domains.get(end, "") for end in ends))
        return not uses_codecs(transport)

    return has_no_codec


def _remarks(routes: Mapping[Route, Link], has_no_codec: Callable[[Ends], bool]) -> Iterator[str]:
    """Yield remarks about named codecs that have no effect, and why."""
    unused: dict[str, list[str]] = {}
    for route, link in routes.items():
        if link.codec == AUTO_CODEC:
            continue
        ends, why = f"{route.source} → {route.destination}", CODECS[link.codec](route.tensor).unfit
        if why:
            yield f"{ends}: {route.tensor.name} is sent without a codec: {why}"
        elif has_no_codec(_ends(route)):
            unused.setdefault(f"{ends}: {link.codec}", []).append(route.tensor.name)
    for codec, tensors in unused.items():
        yield f"{codec} is not used if both ends share memory, which is expected; {short_list(tensors)} is then exact"


def _untried(route: Route, link: Link) -> CodecTrial:
    """Return the named codec without a trial, for a model without inputs; the size of lossy ones is known."""
    if link.codec == AUTO_CODEC:
        raise PlanError(
            f"the codec of the link from {link.source!r} to {link.destination!r} is {AUTO_CODEC}, and the model has "
            "no example inputs to try codecs on: load it with example_inputs, or name a codec"
        )
    codec = fitting(link.codec, route.tensor)
    return dataclasses.replace(_plain(route), codec=codec, encoded_bytes=CODECS[codec](route.tensor).encoded_bytes)


def _planned(choices: Choices, *, tried: bool) -> Iterator[PlannedCodec]:
    """Yield the chosen codecs, with their known ratio and output error."""
    for route, trial in choices.items():
        if trial.codec != NONE:
            ratio = trial.ratio if tried or CODECS[trial.codec].is_lossy else None
            yield PlannedCodec(trial.tensor, *_ends(route), trial.codec, ratio, trial.output_error if tried else None)


def _probed(
    cluster: Workers, request: PlanRequest, sizes_bytes: Sequence[int], on_progress: StepProgress | None
) -> Mapping[Ends, float]:
    """The measured bytes per second of links; none if the request is to measure nothing."""
    if request.estimate:
        return {}
    probe = probe_links(
        cluster, sizes_bytes, on_progress=on_progress, cache_folder=default_folder(), refresh=request.refresh
    )
    return {(link.source, link.destination): link.bytes_per_second for link in probe.links}


class _Choosing:
    """Chooses codecs by trials and by the links' ``speeds``, which are extended by ``probe`` if one is missing."""

    def __init__(
        self,
        trials: CodecTrials,
        plan: Plan,
        largest_error: float,
        speeds: dict[Ends, float],
        probe: Callable[[], Mapping[Ends, float]],
        has_no_codec: Callable[[Ends], bool],
    ) -> None:
        self._trials, self._plan, self._largest_error = trials, plan, largest_error
        self._speeds, self._probe, self._has_no_codec = speeds, probe, has_no_codec
        self._candidates = [
            name for name, codec in CODECS.items() if codec.is_available() and (largest_error > 0 or not codec.is_lossy)
        ]
        self._tried: dict[tuple[str, str], CodecTrial] = {}

    def choose(self, routes: Mapping[Route, Link]) -> Choices:
        """Choose a codec (or none) for each route; the lossy ones together keep to the allowed output error."""
        transferred = {route: link for route, link in routes.items() if route.tensor.name in self._trials.transferred}
        named = {
            route: self._trial(route, fitting(link.codec, route.tensor))
            for route, link in transferred.items()
            if link.codec != AUTO_CODEC
        }
        refused: set[tuple[str, str]] = set()
        while True:
            free = {route: self._fastest(route, refused) for route in transferred if route not in named}
            lossy = {trial.tensor: trial for trial in free.values() if CODECS[trial.codec].is_lossy}
            together = self._trials.output_error({name: trial.codec for name, trial in lossy.items()})
            if not lossy or together <= self._largest_error:
                return named | free
            worst = max(lossy.values(), key=lambda trial: trial.output_error)
            refused.add((worst.tensor, worst.codec))

    def _fastest(self, route: Route, refused: set[tuple[str, str]]) -> CodecTrial:
        plain, ends = _plain(route), _ends(route)
        if self._has_no_codec(ends) or not may_limit(self._plan.prediction, self._plan.objective, *ends):
            return plain
        trials = [
            self._trial(route, codec)
            for codec in self._candidates
            if not CODECS[codec](route.tensor).unfit and (route.tensor.name, codec) not in refused
        ]
        return fastest(plain, trials, self._speed(ends), self._largest_error)

    def _speed(self, ends: Ends) -> float:
        if ends not in self._speeds:
            self._speeds.update({**self._probe(), **self._speeds})
        if ends not in self._speeds:
            raise PlanError(
                f"no codec can be chosen for the link from {ends[0]!r} to {ends[1]!r}, since its speed is unknown: "
                "give its bytes_per_second, name a codec, or plan with measurements"
            )
        return self._speeds[ends]

    def _trial(self, route: Route, codec: str) -> CodecTrial:
        key = (route.tensor.name, codec)
        if key not in self._tried:
            self._tried[key] = _plain(route) if codec == NONE else self._trials.trial(route.tensor, codec)
        return self._tried[key]


def _coded_links(choices: Choices, speeds: Mapping[Ends, float]) -> dict[Ends, CodedLink]:
    """The effect of codecs on the links whose speed is known."""
    coded_links = {}
    for ends in dict.fromkeys(map(_ends, choices)):
        link_choices = {route: trial for route, trial in choices.items() if _ends(route) == ends}
        speed = speeds.get(ends)
        size = sum(route.tensor.size_bytes for route in link_choices)
        if speed and size:
            coded = sum(trial.seconds(speed) * route.when.share for route, trial in link_choices.items())
            plain = sum(_plain(route).seconds(speed) * route.when.share for route in link_choices)
            encoded = sum(trial.encoded_bytes for trial in link_choices.values())
            coded_links[ends] = CodedLink(coded / plain, encoded / size)
    return coded_links


def fastest(
    plain: CodecTrial, trials: Iterable[CodecTrial], bytes_per_second: float, largest_error: float
) -> CodecTrial:
    """The trial that transfers a tensor fastest, among those that change outputs by at most ``largest_error``.

    ``plain`` is the tensor without a codec; it is returned unless a codec saves more than `LEAST_GAIN` of its time.
    """
    allowed = [trial for trial in trials if trial.output_error <= largest_error or not CODECS[trial.codec].is_lossy]
    best = min(allowed, key=lambda trial: trial.seconds(bytes_per_second), default=plain)
    is_worth_it = best.seconds(bytes_per_second) < (1 - LEAST_GAIN) * plain.seconds(bytes_per_second)
    return best if is_worth_it else plain


def may_limit(prediction: Prediction | None, objective: str, source: str, destination: str) -> bool:
    """Whether the plan might be better if this link took less time.

    Always true for latency, or without a prediction. For throughput it is true if the source takes longer to send, or
    the destination longer to receive, than the slowest machine takes to compute.
    """
    if prediction is None or objective == "latency":
        return True
    slowest = max(machine.compute_seconds for machine in prediction.machines)
    return any(
        (machine.machine == source and machine.send_seconds > slowest)
        or (machine.machine == destination and machine.receive_seconds > slowest)
        for machine in prediction.machines
    )
