"""The templates as MetaSchedule spaces: every choice is a ``sample_categorical`` decision of the trace.

For TVM's own tuner: ``ms.tune_tir(…, space=metaschedule_space(template, traits), strategy="replay-func")``.
The choices decide about loops by their values, so the function must be run anew for each sample: ``replay-func`` does.
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir import meta_schedule

from tvm_split.schedules.template import CHOICES_ATTRIBUTE, Choices, Space, Template, text_of
from tvm_split.schedules.traits import Traits

ATTEMPTS = 100


def metaschedule_space(template: Template, traits: Traits) -> meta_schedule.space_generator.ScheduleFn:
    """The space of a template for MetaSchedule; functions of other families are left alone."""
    return meta_schedule.space_generator.ScheduleFn(
        lambda schedule: sample_and_schedule(schedule, template, traits), sch_rules=[], postprocs=[], mutator_probs={}
    )


def sample_and_schedule(schedule: s_tir.Schedule, template: Template, traits: Traits) -> None:
    """Schedule the function of a fresh schedule by sampled choices, or the cost rule's where sampling finds none."""
    function = schedule.mod["main"]
    space = template.space(function, traits)
    if space is None:
        return
    choices = next((each for each in (_sample(schedule, space) for _ in range(ATTEMPTS)) if space.contains(each)), None)
    chosen = choices or space.default
    template.schedule(function, traits, chosen).trace.apply_to_schedule(schedule, remove_postproc=False)
    schedule.annotate(schedule.get_sblock("root"), CHOICES_ATTRIBUTE, text_of(chosen))


def _sample(schedule: s_tir.Schedule, space: Space) -> Choices:
    sampled = {}
    for name, values in space.axes.items():
        decision = schedule.sample_categorical(list(range(len(values))), [1 / len(values)] * len(values))
        sampled[name] = values[int(schedule.get(decision))]
    return sampled
