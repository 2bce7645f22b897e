"""stub"""
from dataclasses import dataclass
@dataclass(frozen=True)
class Winograd:
    outputs: int
    rows: int
    staged: bool
