"""Where the viewers are, and what they are shown."""

import os
from pathlib import Path
from typing import NamedTuple

from tvm_split.deployment.deployment import DeploymentStatistics
from tvm_split.observing.trace import Trace

FOLDER = Path(os.environ["VIEWERS"])
"""The folder that `make test-extra NAME=viewers` fills."""
COUNT = 25


class Run(NamedTuple):
    """A recorded stream of `COUNT` micro-batches, and the statistics of its deployment, which computed nothing else."""

    trace: Trace
    folder: Path
    statistics: DeploymentStatistics
