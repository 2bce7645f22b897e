"""Templates as MetaSchedule sees them: decisions in a trace, from which the same kernel comes again."""

from tests.helpers.schedules.template_cases import TRAITS, template_and_function
from tvm_split.schedules.blocks import new_schedule
from tvm_split.schedules.template import CHOICES_ATTRIBUTE, choices_from, scheduled_function
from tvm_split.schedules.tuning.space import sample_and_schedule


def test_choices_are_decisions_of_the_trace():
    template, function = template_and_function("matmul")
    space = template.space(function, TRAITS)
    sampled = new_schedule(function)
    sample_and_schedule(sampled, template, TRAITS)
    decided = scheduled_function(sampled)
    assert space.contains(choices_from(decided.attrs[CHOICES_ATTRIBUTE]))
    assert len(sampled.trace.decisions) >= len(space.axes)
    again = new_schedule(function)
    sampled.trace.apply_to_schedule(again, remove_postproc=False)
    assert scheduled_function(again).attrs[CHOICES_ATTRIBUTE] == decided.attrs[CHOICES_ATTRIBUTE]
