"""Chooses the codecs of a plan's transfers: those that the cluster names, or the fastest ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.hardware import memory_domain
from rpc_runtime.program.codecs import CODECS, NONE, fitting
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.transports.transport import AUTO, DEFAULT, uses_codecs
from tvm_split.cluster.cluster import Workers
from tvm_split.cluster.machine import AUTO_CODEC, Link
from tvm_split.compiler.machine_targets import reached_workers
from tvm_split.compiler.targets import host_target, runs_here
from tvm_split.compiler.verification import one_by_one, verification_inputs
from tvm_split.compiling import compile
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.codec_choice import CodecTrial, PlannedCodec, fastest, may_limit
from tvm_split.planner.plan import Plan
from tvm_split.planner.predict import CodedLink
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.request import PlanRequest
from tvm_split.profiling.codec_trials import CodecTrials
from tvm_split.profiling.link_probing import probe_links
from tvm_split.profiling.store import default_folder
from tvm_split.steps import StepProgress
from tvm_split.units import short_list

PredictCoded = Callable[[Mapping[tuple[str, str], CodedLink]], Prediction]
"""Function from the effect of codecs on links, by (source, destination), to the plan's prediction."""


@dataclass(frozen=True)
class _Choice:
    """A route, its trial without a codec, and the trial of its chosen codec."""

    route: Route
    plain: CodecTrial
    chosen: CodecTrial

    @property
    def ends(self) -> tuple[str, str]:
        return self.route.source, self.route.destination


def with_codecs(
    model: Model,
    cluster: Workers,
    plan: Plan,
    request: PlanRequest,
    profile: ClusterProfile | None = None,
    predict_coded: PredictCoded | None = None,
    on_progress: StepProgress | None = None,
    *,
    workers: Mapping[str, WorkerDescription] | None = None,
) -> Plan:
    """Return the plan with the codecs that the cluster requests: named ones, or the fastest one for ``auto``.

    If any link requests a codec, the plan's stages are compiled and run here on the model's example inputs. Every
    candidate codec is timed on the transferred tensors. Link speeds come from ``profile``, else from the cluster, else
    they are measured now. Without inputs, a named codec counts with its encoded size (fixed for lossy codecs) and no
    coding time. ``workers`` are the descriptions of reached workers, if they are already known.

    Raises:
        PlanError: a link leaves the choice, and there are no inputs to try codecs on, or a link's speed is unknown.
    """
    if cluster.launcher.in_process or all(link.codec == NONE for link in cluster.links):
        return plan
    shared = _Uncoded(cluster, profile, workers)
    report = on_progress or (lambda what, done, steps: None)
    bundle = compile(model, _runnable_here(plan), verify=False, database=request.database, on_progress=report)
    routes = {route: link for route in bundle.program.routes if (link := _asking(cluster, route)) is not None}
    inputs = verification_inputs(model)
    remarks = tuple(_remarks(routes, shared))
    speeds = _Speeds(cluster, request, profile, [route.tensor.size_bytes for route in routes], on_progress)
    if inputs is None:
        choices = list(_untried(routes))
    else:
        report("trying codecs", 0, 1)
        with CodecTrials(one_by_one(bundle.program)[0], bundle.blob_path, inputs) as trials:
            choices = _Choosing(trials, plan, request, speeds, shared).choose(routes)
        report("trying codecs", 1, 1)
    codecs = tuple(_planned(choices, tried=inputs is not None))
    prediction = plan.prediction
    if predict_coded is not None and codecs:
        prediction = predict_coded(_coded_links([each for each in choices if not shared.joins(*each.ends)], speeds))
    return dataclasses.replace(plan, codecs=codecs, prediction=prediction, remarks=remarks)


def _runnable_here(plan: Plan) -> Plan:
    machines = (
        each if runs_here(each.target) else dataclasses.replace(each, target=host_target(each.threads))
        for each in plan.machines
    )
    return dataclasses.replace(plan, machines=tuple(machines))


def _asking(cluster: Workers, route: Route) -> Link | None:
    link = cluster.link(route.source, route.destination)
    return None if link is None or link.codec == NONE else link


class _Uncoded:
    """Finds links that use no codec, because they share memory or GPUs send directly.

    It uses the transport that the cluster names or that was measured, else the hosts that reachable workers report.
    """

    def __init__(
        self, cluster: Workers, profile: ClusterProfile | None, workers: Mapping[str, WorkerDescription] | None
    ) -> None:
        self._cluster = cluster
        self._workers = workers
        self._settings = cluster.link_settings
        links = () if profile is None else profile.links
        self._measured = {(link.source, link.destination): link.transport for link in links if link.transport}

    def joins(self, source: str, destination: str) -> bool:
        setting = self._settings.get((source, destination), DEFAULT)
        if setting.wanted == AUTO and (source, destination) in self._measured:
            return not uses_codecs(self._measured[source, destination])
        if setting.wanted != AUTO:
            return not uses_codecs(setting.wanted)
        ends = (self._domains.get(end, "") for end in (source, destination))
        return not uses_codecs(setting.expected(*ends))

    @cached_property
    def _domains(self) -> dict[str, str]:
        if self._cluster.launcher.on_this_host:
            return dict.fromkeys((CLIENT, *self._cluster.machine_names), memory_domain())
        workers = self._workers if self._workers is not None else reached_workers(self._cluster)
        return {CLIENT: memory_domain()} | {name: worker.memory_domain for name, worker in workers.items()}


def _remarks(routes: Mapping[Route, Link], shared: _Uncoded) -> Iterator[str]:
    """Yield remarks about named codecs that have no effect, and why."""
    passed_over: dict[str, list[str]] = {}
    for route, link in routes.items():
        if link.codec == AUTO_CODEC:
            continue
        ends, why = f"{route.source} → {route.destination}", CODECS[link.codec](route.tensor).unfit
        if why:
            yield f"{ends}: {route.tensor.name} travels as it is: {why}"
        elif shared.joins(route.source, route.destination):
            passed_over.setdefault(f"{ends}: {link.codec}", []).append(route.tensor.name)
    for codec, tensors in passed_over.items():
        whole = short_list(tensors)
        yield f"{codec} is passed over if both ends share memory, as is expected: {whole} then stays exact"


def _untried(routes: Mapping[Route, Link]) -> Iterator[_Choice]:
    """Yield the named codecs without a trial, for a model without inputs; the size of lossy ones is known."""
    for route, link in routes.items():
        if link.codec == AUTO_CODEC:
            raise PlanError(
                f"the link from {link.source!r} to {link.destination!r} leaves its codec to the plan, which tries "
                "codecs on example inputs, and the model has none: load it with example_inputs, or name a codec"
            )
        codec, tensor = fitting(link.codec, route.tensor), route.tensor
        yield _Choice(
            route, _plain(route), CodecTrial(tensor.name, codec, tensor.size_bytes, CODECS[codec](tensor).encoded_bytes)
        )


def _planned(choices: Sequence[_Choice], *, tried: bool) -> Iterator[PlannedCodec]:
    """Yield the chosen codecs, with their known ratio and output error."""
    for each in choices:
        trial = each.chosen
        if trial.codec != NONE:
            ratio = trial.ratio if tried or CODECS[trial.codec].is_lossy else None
            yield PlannedCodec(trial.tensor, *each.ends, trial.codec, ratio, trial.output_error if tried else None)


class _Speeds:
    """Bytes per second of links, by (source, destination); measures them at the first request for an unknown one."""

    def __init__(
        self,
        cluster: Workers,
        request: PlanRequest,
        profile: ClusterProfile | None,
        sizes_bytes: Sequence[int],
        on_progress: StepProgress | None,
    ) -> None:
        self._cluster = cluster
        self._request = request
        self._sizes = sizes_bytes
        self._on_progress = on_progress
        known = [] if profile is None else profile.links
        self._speeds = {(link.source, link.destination): link.bytes_per_second for link in known}
        for link in cluster.links:
            if link.bytes_per_second:
                self._speeds.setdefault((link.source, link.destination), link.bytes_per_second)

    def find(self, source: str, destination: str) -> float | None:
        return self._speeds.get((source, destination))

    def of(self, source: str, destination: str) -> float:
        """Return the bytes per second of a link; raises a `PlanError` if they are unknown and must not be measured."""
        if (source, destination) not in self._speeds and not self._request.estimate:
            folder: Path = default_folder()
            found = probe_links(
                self._cluster,
                self._sizes,
                on_progress=self._on_progress,
                cache_folder=folder,
                refresh=self._request.refresh,
            )
            for link in found.links:
                self._speeds.setdefault((link.source, link.destination), link.bytes_per_second)
        if (source, destination) not in self._speeds:
            raise PlanError(
                f"nothing is known of the speed of the link from {source!r} to {destination!r}, by which its codec is "
                "chosen: give its bytes_per_second, name a codec, or let the plan be measured"
            )
        return self._speeds[source, destination]


class _Choosing:
    def __init__(
        self, trials: CodecTrials, plan: Plan, request: PlanRequest, speeds: _Speeds, shared: _Uncoded
    ) -> None:
        self._trials = trials
        self._plan = plan
        self._largest_error = float(request.allow_lossy)
        self._speeds = speeds
        self._shared = shared
        lossy_too = self._largest_error > 0
        self._candidates = [
            name for name, codec in CODECS.items() if codec.is_available() and (lossy_too or not codec.is_lossy)
        ]
        self._tried: dict[tuple[str, str], CodecTrial] = {}

    def choose(self, routes: Mapping[Route, Link]) -> list[_Choice]:
        """Choose a codec (or none) for each route; the lossy ones together keep to the allowed output error."""
        crossing = {route: link for route, link in routes.items() if route.tensor.name in self._trials.crossing}
        named = [self._named(route, link) for route, link in crossing.items() if link.codec != AUTO_CODEC]
        free = [route for route, link in crossing.items() if link.codec == AUTO_CODEC]
        refused: set[tuple[str, str]] = set()
        while True:
            found = [self._fastest(route, refused) for route in free]
            lossy = {each.chosen.tensor: each.chosen for each in found if CODECS[each.chosen.codec].is_lossy}
            together = self._trials.output_error({name: each.codec for name, each in lossy.items()})
            if not lossy or together <= self._largest_error:
                return [*named, *found]
            worst = max(lossy.values(), key=lambda trial: trial.output_error)
            refused.add((worst.tensor, worst.codec))

    def _named(self, route: Route, link: Link) -> _Choice:
        return _Choice(route, _plain(route), self._trial(route, fitting(link.codec, route.tensor)))

    def _fastest(self, route: Route, refused: set[tuple[str, str]]) -> _Choice:
        plain, ends = _plain(route), (route.source, route.destination)
        if self._shared.joins(*ends) or not may_limit(self._plan.prediction, self._plan.objective, *ends):
            return _Choice(route, plain, plain)
        trials = [
            self._trial(route, codec)
            for codec in self._candidates
            if not CODECS[codec](route.tensor).unfit and (route.tensor.name, codec) not in refused
        ]
        return _Choice(route, plain, fastest(plain, trials, self._speeds.of(*ends), self._largest_error))

    def _trial(self, route: Route, codec: str) -> CodecTrial:
        if codec == NONE:
            return _plain(route)
        key = (route.tensor.name, codec)
        if key not in self._tried:
            self._tried[key] = self._trials.trial(route.tensor, codec)
        return self._tried[key]


def _plain(route: Route) -> CodecTrial:
    return CodecTrial(route.tensor.name, NONE, route.tensor.size_bytes, route.tensor.size_bytes)


def _coded_links(choices: Sequence[_Choice], speeds: _Speeds) -> dict[tuple[str, str], CodedLink]:
    """Return the effect of codecs on the links whose speed is known, by (source, destination)."""
    found = {}
    for ends in dict.fromkeys(each.ends for each in choices):
        here, speed = [each for each in choices if each.ends == ends], speeds.find(*ends)
        size = sum(each.plain.size_bytes for each in here)
        if speed and size:
            coded = sum(each.chosen.seconds(speed) * each.route.when.share for each in here)
            plain = sum(each.plain.seconds(speed) * each.route.when.share for each in here)
            found[ends] = CodedLink(coded / plain, sum(each.chosen.encoded_bytes for each in here) / size)
    return found
