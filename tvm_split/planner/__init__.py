"""Which layers run on which machine."""

from tvm_split.planner.plan import Plan, PlannedMachine, PlannedStage
from tvm_split.planner.planning import plan

__all__ = ["Plan", "PlannedMachine", "PlannedStage", "plan"]
