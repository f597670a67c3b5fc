"""How likely it is that two pictures that agree show the same thing: a percentage that can be believed.

    same_thing(agreement)                    # 0..1; 0 where nothing agrees

    log-odds = bias + a log(inliers) + b log(evidence) + c log(inside)        a, b, c >= 0, for each engine

`support.py` says what the last two are. What is left out (cosine, share of the area, matches before geometry) adds
nothing on kinds of pictures that were not fitted on. For SIFT the inliers add nothing either (a = 0); for XFeat, whose
features know neither size nor direction and find much that is alike by chance, `inside` adds nothing (c = 0), nor for
activations.
`data/verification.json` holds the parameters;
benchmarks/verification.py fits them, and docs/verification.md says how well.
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
LEAST = 1.0, 1.0, 0.02  # inliers, evidence and inside are not taken for smaller
FILE = DATA / "verification.json"


@dataclass(frozen=True)
class Calibration:
    bias: float
    inliers: float
    evidence: float
    inside: float

    def log_odds(self, *seen: float) -> float:
        """Of inliers, evidence and inside."""
        slopes = self.inliers, self.evidence, self.inside
        return self.bias + sum(a * math.log(max(n, least)) for a, n, least in zip(slopes, seen, LEAST, strict=True))

    def __call__(self, agreement: Agreement) -> float:
        if agreement.inliers == 0:
            return 0.0
        return 1 / (1 + math.exp(-self.log_odds(agreement.inliers, agreement.evidence, agreement.inside)))

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
