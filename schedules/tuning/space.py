"""The templates as MetaSchedule spaces: every choice is a ``sample_categorical`` decision of the trace.

For TVM's own tuner: ``ms.tune_tir(…, space=metaschedule_space(template, traits), strategy="replay-func")``.
The choices decide about loops by their values, so the function must be run anew for each sample: ``replay-func`` does.
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir import meta_schedule

from schedules.template import CHOICES_ATTRIBUTE, Choices, Template, text_of
from schedules.traits import Traits

ATTEMPTS = 100


def metaschedule_space(template: Template, traits: Traits) -> meta_schedule.space_generator.ScheduleFn:
    """The space of a template for MetaSchedule; functions of other families are left alone."""

    def sample(schedule: s_tir.Schedule) -> None:
        function = schedule.mod["main"]
        space = template.space(function, traits)
        if space is None:
            return
        for _ in range(ATTEMPTS):
            choices: Choices = {
                name: values[
                    int(
                        schedule.get(
                            schedule.sample_categorical(list(range(len(values))), [1 / len(values)] * len(values))
                        )
                    )
                ]
                for name, values in space.axes.items()
            }
            if space.contains(choices):
                break
        else:
            choices = space.default
        made = template.schedule(function, traits, choices)
        made.trace.apply_to_schedule(schedule, remove_postproc=False)
        schedule.annotate(schedule.get_sblock("root"), CHOICES_ATTRIBUTE, text_of(choices))

    return meta_schedule.space_generator.ScheduleFn(sample, sch_rules=[], postprocs=[], mutator_probs={})
