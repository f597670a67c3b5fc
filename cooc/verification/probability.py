"""How likely it is that two pictures that agree show the same thing: a percentage that can be believed.

    same_thing(agreement)                    # 0..1; 0 where nothing agrees

    log-odds = bias + a log(inliers) + b log(spread)        a, b >= 0, for each engine

Two numbers and no more: what they leave out (cosine, share of the area, matches before geometry) adds nothing on kinds
of pictures that were not fitted on. `data/verification.json` holds the parameters, what they were fitted on, and how
well they fit (benchmarks/verification.py fits them).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache

from cooc.errors import InputError
from cooc.files import DATA
from cooc.verification.agreement import Agreement

PROVEN = 0.5  # from which two pictures are said to show the same thing
SMALLEST = 0.02  # spread is not taken for smaller
FILE = DATA / "verification.json"


@dataclass(frozen=True)
class Calibration:
    bias: float
    inliers: float
    spread: float

    def log_odds(self, inliers: float, spread: float) -> float:
        return self.bias + self.inliers * math.log(inliers) + self.spread * math.log(max(spread, SMALLEST))

    def __call__(self, agreement: Agreement) -> float:
        if agreement.inliers == 0:
            return 0.0
        return 1 / (1 + math.exp(-self.log_odds(agreement.inliers, agreement.spread)))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@cache
def load_calibration(engine: str) -> Calibration:
    """The parameters that ship with the package."""
    known = json.loads(FILE.read_text())["engines"]
    if engine not in known:
        raise InputError(f"No probabilities were fitted for the engine {engine!r}. There are: {', '.join(known)}.")
    return Calibration(**known[engine])


def same_thing(agreement: Agreement) -> float:
    """The probability that the two pictures show the same thing."""
    return load_calibration(agreement.engine)(agreement)
