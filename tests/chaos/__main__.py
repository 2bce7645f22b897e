"""Deployments with faults at random moments, on real processes: every result comes right, once and in order.

A seed and a number make a scenario, so that one can be run again; the moments within a phase are as exact as the
machine allows. The exit code is 1 if anything was wrong.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from rich.console import Console

from tests.chaos.director import Director
from tests.chaos.faults import FAULTS
from tests.chaos.judge import Verdict, as_json, table_of, verdict_of
from tests.chaos.lab import Lab
from tests.chaos.scenario import scenario_of
from tests.chaos.subjects import Subjects
from tests.chaos.task import own_folders

SECONDS = 60.0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no scenario later")
    parser.add_argument("--streams", type=int, help="run so many scenarios, however long they take")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one scenario, with the logs of all processes")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only these faults")
    parser.add_argument("--json", type=Path, help="write all scenarios into this file")
    arguments = parser.parse_args(words)
    seed = random.randrange(1 << 20) if arguments.seed is None else arguments.seed
    console = Console(width=max(180, Console().width), highlight=False, markup=False)
    console.print(f"seed {seed}")
    with own_folders() as folder, ExitStack() as until_end:
        lab, subjects = Lab(folder / "lab", until_end), Subjects(folder / "subjects", seed)
        left_out = {name: reason for name, fault in FAULTS.items() if (reason := fault.needs(lab))}
        for name, reason in left_out.items():
            console.print(f"left out: {name}: {reason}")
        faults = [name for name in arguments.fault or FAULTS if name not in left_out]
        begin = time.monotonic()

        def show(*words: object) -> None:
            if arguments.only is not None:
                console.print(f"{time.monotonic() - begin:8.3f}", *words)

        director = until_end.enter_context(Director(lab, folder, show))
        verdicts: list[Verdict] = []
        for number in count() if arguments.only is None else [arguments.only]:
            over = time.monotonic() - begin > arguments.seconds if arguments.streams is None else False
            if over or len(verdicts) == arguments.streams:
                break
            scenario = scenario_of(seed, number, subjects, faults)
            show(str(scenario))
            verdict = verdict_of(scenario, director.run(scenario))
            verdicts.append(verdict)
            if verdict.reasons:
                console.print(f"{'' if verdict.is_right else 'WRONG '}{scenario}")
                for reason in verdict.reasons:
                    console.print(f"    {reason}")
            if not verdict.is_right:
                console.print(f"    again: make chaos SEED={seed} ONLY={number}")
        for name, log in director.logs().items() if arguments.only is not None else ():
            console.print(f"--- {name}\n{log}")
    console.print(table_of(verdicts))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(seed, verdicts, left_out), indent=2) + "\n")
    return 0 if all(verdict.is_right for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
