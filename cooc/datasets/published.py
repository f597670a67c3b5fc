"""The benchmarks that cooc knows: what is published of each, and where."""

from __future__ import annotations

from dataclasses import dataclass

from cooc.errors import check_name

# The Paris page's own list (corrupt.txt): files that hold an error page instead of a picture.
CORRUPT_PARIS = frozenset(
    f"paris_{place}_{number:06d}"
    for place, numbers in {
        "louvre": (136, 146),
        "moulinrouge": (422,),
        "museedorsay": (1059,),
        "notredame": (188,),
        "pantheon": (284, 960, 974),
        "pompidou": (195, 196, 201, 467, 640),
        "sacrecoeur": (299, 330, 353),
        "triomphe": (662, 833, 863, 867),
    }.items()
    for number in numbers
)


@dataclass(frozen=True)
class Spec:
    """What is known of a published set before its files are read."""

    name: str
    protocols: tuple[str, ...]
    where: str
    size: int | None = None  # pictures in the database
    queries: int | None = None
    folders: tuple[str, ...] = ()  # names that its folder may have below the data folder
    pattern: str = r".+"  # of its pictures' names, where the ground truth does not list the database
    corrupt: frozenset[str] = frozenset()


_OXFORD = "Oxford Buildings (pictures and ground truth): https://www.robots.ox.ac.uk/~vgg/data/oxbuildings/"
_PARIS = "Paris Buildings (pictures and ground truth): https://www.robots.ox.ac.uk/~vgg/data/parisbuildings/"
REVISITED = "gnd_{}.pkl and the million distractors: http://cmp.felk.cvut.cz/revisitop/"
_HOLIDAYS = "INRIA Holidays (jpg1, jpg2 and the evaluation package): https://lear.inrialpes.fr/people/jegou/data.php"
_OXFORD_FOLDERS = ("oxford5k", "roxford5k", "oxford", "oxbuildings")
_PARIS_FOLDERS = ("paris6k", "rparis6k", "paris", "parisbuildings")

DATASETS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("oxford5k", ("oxford",), _OXFORD, 5063, 55, _OXFORD_FOLDERS, r"(?!paris_)[a-z_]+_\d{6}"),
        Spec(
            "roxford5k",
            ("roxford-easy", "roxford-medium", "roxford-hard"),
            f"{_OXFORD}\n{REVISITED.format('roxford5k')}",
            4993,
            70,
            ("roxford5k", *_OXFORD_FOLDERS),
        ),
        Spec("paris6k", ("paris",), _PARIS, 6392, 55, _PARIS_FOLDERS, r"paris_[a-z]+_\d{6}", CORRUPT_PARIS),
        Spec(
            "rparis6k",
            ("rparis-easy", "rparis-medium", "rparis-hard"),
            f"{_PARIS}\n{REVISITED.format('rparis6k')}",
            6322,
            70,
            ("rparis6k", *_PARIS_FOLDERS),
            corrupt=CORRUPT_PARIS,
        ),
        Spec("holidays", ("holidays",), _HOLIDAYS, 1491, 500, ("holidays", "Holidays"), r"\d{6}"),
    )
}


def find_spec(name: str) -> Spec:
    check_name("data set", name, DATASETS)
    return DATASETS[name]
