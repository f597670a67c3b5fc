"""Named descriptors, each with its source. A name may carry changes: `paper-bilinear-topdown+dim=4096+ms`.

find_recipe("paper-linear-topdown").config       the frozen DescriptorConfig
find_recipe("gem+p=4+size=640")                  any setting or pooling option, joined by "+"
find_recipe("crow+ms")                           ms: at scales 1, 1/sqrt 2, 1/2;  raw: without whitening
find_recipe("runs/mine")                         a folder: what `cooc train` and Descriptor.save_pretrained write

Such a folder is an artefact: see cooc/artefacts.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cooc.activations import BACKBONES
from cooc.errors import InputError, UnknownNameError, WhiteningError, check_name
from cooc.files import DATA
from cooc.pooling import MASKS, POOLINGS
from cooc.weights import weights_home
from cooc.whitening import Whitening
from cooc.whitening import load as load_whitening

MULTI_SCALE = (1.0, math.sqrt(0.5), 0.5)
COOCCURRENCES = ("direct", "learned", "shih", "none")
ARTEFACT = "descriptor.json"
GIVEN = "given:"  # before the name of a method whose vectors were imported: no network of ours makes them
SKETCH = (("dim", 8192), ("seed", 0))


@dataclass(frozen=True)
class DescriptorConfig:
    """Everything that a vector depends on. `options` are the pooling's own, as sorted pairs; a dict is taken too."""

    backbone: str = "vgg16-caffe"
    layer: str = ""  # "" is the backbone's default
    size: int = 1024  # longest side in pixels; smaller pictures keep their size,
    least: int = 0  # but for those whose longest side is smaller than this: they are enlarged to it
    scales: tuple[float, ...] = (1.0,)
    mask: str = "none"
    sigma: float = 0.5  # of the centre mask, in units of the shorter side
    cooccurrence: str = "direct"
    radius: int = 4
    filter: str = ""  # of "learned": a file, or the name of one that ships with cooc
    tuning: str = ""  # what training changed in the network: a file, or the name of one that ships; "" is nothing
    pooling: str = "chco-sct"
    options: tuple[tuple[str, float], ...] = ()
    whitening: str = ""  # a file, or the set that one which ships with cooc was fitted on; "" is none
    dim: int = 0  # after whitening; 0 keeps all
    dtype: str = "auto"

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "options", tuple(sorted((name, _plain(value)) for name, value in dict(self.options).items())))
        put(self, "sigma", float(self.sigma))  # equal configs must have one hash: 1 and 1.0 are written differently
        put(self, "scales", tuple(float(scale) for scale in self.scales))
        if not self.backbone.startswith(("timm:", GIVEN)):
            if self.backbone not in BACKBONES:
                raise UnknownNameError("backbone", self.backbone, [*BACKBONES, "timm:NAME"])
            layers = BACKBONES[self.backbone].layers
            put(self, "layer", self.layer or next(iter(layers)))
            check_name(f"layer of {self.backbone}", self.layer, layers)
        for kind, name, known in (
            ("mask", self.mask, MASKS),
            ("pooling", self.pooling, POOLINGS),
            ("co-occurrence", self.cooccurrence, COOCCURRENCES),
        ):
            check_name(kind, name, known)
        for option, _ in self.options:
            if option not in POOLINGS[self.pooling].options:
                choices = _settings() + POOLINGS[self.pooling].options
                raise UnknownNameError(f"setting, or option of {self.pooling},", option, choices)
        in_range = bool(self.scales) and all(0 < scale <= 1 for scale in self.scales)
        if self.size < 1 or self.least < 0 or self.dim < 0 or not in_range:
            raise InputError("size must be at least 1, least and dim at least 0, and scales lie in (0, 1].")
        if self.radius < 0 or not 0 < self.sigma < math.inf:
            raise InputError("radius must be at least 0, and sigma more than 0.")
        if self.cooccurrence == "learned" and not self.filter:
            raise InputError('cooccurrence="learned" needs filter=, a filter file (.npy or .safetensors).')

    def replace(self, **changes: Any) -> DescriptorConfig:
        _check_settings(changes)
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"scales": list(self.scales), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DescriptorConfig:
        _check_settings(values)
        options = tuple(dict(values.get("options", ())).items())
        return cls(**{**values, "scales": tuple(values.get("scales", (1.0,))), "options": options})

    @property
    def hash(self) -> str:
        """Of all that a vector depends on; dtype is left out: bfloat16 and float32 vectors may be compared."""
        return self._digest("dtype")

    @property
    def pooling_hash(self) -> str:
        """Of the vector before whitening: the key of a cache of raw vectors."""
        return self._digest("dtype", "whitening", "dim")

    @property
    def space_hash(self) -> str:
        """Of the space that raw vectors live in, at any image size: what a whitening is fitted for."""
        return self._digest("dtype", "whitening", "dim", "size", "least", "scales")

    @property
    def space(self) -> str:
        """The same for people: names the whitening files that ship with cooc. A layer is named unless it is the
        backbone's default."""
        default = next(iter(BACKBONES[self.backbone].layers)) if self.backbone in BACKBONES else ""
        parts = [self.backbone, *[self.layer] * (self.layer != default), self.pooling]
        if POOLINGS[self.pooling].cooccurrence:
            parts.append({"direct": "act", "none": "aa"}.get(self.cooccurrence, self.cooccurrence))
        if dict(self.options).get("sqrt"):
            parts.append("root")
        return "-".join(parts + [self.mask] * (self.mask != "none") + ["tuned"] * bool(self.tuning))

    @property
    def weights(self) -> str:
        """The name of its network's weights."""
        return self.backbone if self.backbone.startswith("timm:") else BACKBONES[self.backbone].weights

    @property
    def given(self) -> str:
        """The name of the method whose vectors were imported; "" where a network of ours makes them."""
        return self.backbone.removeprefix(GIVEN) if self.backbone.startswith(GIVEN) else ""

    @property
    def depthwise(self) -> bool:
        """Does its network do little with large maps? Of timm's it is not known before they are built."""
        return self.backbone in BACKBONES and BACKBONES[self.backbone].depthwise

    @property
    def scale_power(self) -> float:
        """The exponent of the mean over scales: GeM's own, else 1."""
        return float(dict(self.options).get("p", 3.0)) if self.pooling == "gem" else 1.0

    def score_space(self, dim: int, fingerprint: str = "") -> str | None:
        """The name of its scores: what a calibration is kept by.

        A whitening or a filter of the user's own has no common name: there the descriptor's fingerprint is one.
        """
        if any(Path(file).suffix for file in (self.whitening, self.filter, self.tuning)):
            return f"{self.space}-own-{fingerprint[:16]}-{dim}" if fingerprint else None
        parts = [self.space, self.whitening or "raw", str(dim)] + ["ms"] * (len(self.scales) > 1)
        return "-".join(parts)

    def _digest(self, *without: str) -> str:
        values = {key: value for key, value in self.as_dict().items() if key not in without}
        if self.filter:  # what counts is what is in the file, not where it lies
            values["filter"] = hashlib.sha256(find_filter(self.filter).read_bytes()).hexdigest()
        if self.tuning:
            values["tuning"] = hashlib.sha256(find_tuning(self).read_bytes()).hexdigest()
        else:
            del values["tuning"]  # hashes are older than tunings
        if not self.least:
            values.pop("least", None)  # and than this
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def no_network(config: DescriptorConfig) -> InputError:
    return InputError(
        f"The vectors of {config.given!r} were imported, and cooc cannot make them for other pictures. Search by a "
        "whole picture of the index, or import the vectors of others: cooc import FILE.npy --paths FILE.txt"
    )


def _plain(value: float) -> float:
    """3.0 -> 3: one way to write a number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _settings() -> list[str]:
    return [field.name for field in dataclasses.fields(DescriptorConfig)]


def _check_settings(names: Iterable[str]) -> None:
    for name in names:
        check_name("setting", name, _settings())


def find_filter(name: str) -> Path:
    """A learned filter: a file, or the name of one that ships with cooc."""
    path = Path(name) if Path(name).suffix else shipped("filters", name)
    if path is None:
        raise InputError(f"No filter {name!r} ships with cooc; give a .safetensors or .npy file.")
    if not path.is_file():
        raise InputError(f"{path}: no such filter file. Train one (`cooc train`), or give .npy or .safetensors.")
    return path


def find_tuning(config: DescriptorConfig) -> Path:
    """What training changed in a config's network: a file, or one that ships with cooc."""
    name = config.tuning
    path = Path(name) if Path(name).suffix else shipped("tuning", f"{name}--{config.backbone}")
    if path is None or not path.is_file():
        raise InputError(f"{name}: no such tuning of a network. Train one: `cooc train --train block5`.")
    return path


def find_whitening(config: DescriptorConfig) -> Whitening:
    """The whitening that a config names, a file or one that ships with cooc; refused if it is for other vectors."""
    named = Path(config.whitening)
    path = named if named.suffix else shipped("whitening", f"{named}--{config.space}")
    if path is None:
        raise WhiteningError(
            f"No whitening {config.whitening!r} for {config.space} ships with cooc. Fit one on your own pictures, "
            "`cooc whiten FOLDER --recipe RECIPE -o FILE.safetensors`, and use RECIPE+whitening=FILE.safetensors; "
            "or use RECIPE+raw, without whitening."
        )
    whitening = load_whitening(path)
    if whitening.meta.get("space_hash") != config.space_hash:
        raise WhiteningError(
            f"{path} was fitted for other vectors ({whitening.meta.get('space', 'unknown')}), not for {config.space}. "
            "Fit one for this recipe: `cooc whiten FOLDER --recipe RECIPE -o FILE.safetensors`."
        )
    return whitening


def shipped(folder: str, name: str) -> Path | None:
    path = DATA / folder / f"{name}.safetensors"
    return path if path.is_file() else None


@dataclass(frozen=True)
class Recipe:
    name: str
    config: DescriptorConfig
    source: str


def _recipe(name: str, source: str, base: DescriptorConfig, **changes: Any) -> Recipe:
    return Recipe(name, base.replace(**changes), source)


_LINEAR = DescriptorConfig(cooccurrence="none", whitening="landmarks", dim=512)
_WEIGHTED = _LINEAR.replace(cooccurrence="direct")
_BILINEAR = _WEIGHTED.replace(pooling="compact-bilinear", options=SKETCH)
_TOP_DOWN = _BILINEAR.replace(mask="top-down")
_LEARNED = _BILINEAR.replace(cooccurrence="learned", filter="landmarks")
# The filter and the network's last block, learned together.
_DEEP = _LEARNED.replace(layer="conv5_3", mask="top-down", filter="landmarks-deep", tuning="landmarks")
# What a laptop can bear: a fifth of VGG16's arithmetic, and pictures of 640 pixels; thumbnails are enlarged.
_RESNET = _LINEAR.replace(pooling="gem", backbone="resnet50-caffe", layer="", size=640, least=384)
_MS = {"dim": 8192, "scales": MULTI_SCALE}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("ucrow", "table 1 and 6: ucrow", _LINEAR, pooling="ucrow"),
        _recipe("crow", "table 1 and 6: crow (Kalantidis et al. 2016)", _LINEAR, pooling="crow"),
        _recipe("spoc", "table 6: SPoC (Babenko and Lempitsky 2015)", _LINEAR, pooling="spoc"),
        _recipe("mac", "table 6: MAC (Tolias et al. 2016)", _LINEAR, pooling="mac"),
        _recipe("rmac", "table 6: R-MAC (Tolias et al. 2016)", _LINEAR, pooling="rmac"),
        _recipe("gem", "table 6: GeM, p = 3 (Radenovic et al. 2018)", _LINEAR, pooling="gem"),
        _recipe("chco", "ablation of Eq. 7: channel weights alone", _WEIGHTED, pooling="chco"),
        _recipe("sct", "ablation of Eq. 7: spatial weights alone", _WEIGHTED, pooling="sct"),
        _recipe("paper-linear", "table 1: ChCO-SC_T", _WEIGHTED),
        _recipe("paper-linear-topdown", "table 1, 5 and 6: ChCO-SC_T + SpTD", _WEIGHTED, mask="top-down"),
        _recipe("paper-linear-centre", "table 1 and 5: ChCO-SC_T + SpCt", _WEIGHTED, mask="centre"),
        _recipe("shih-linear-topdown", "table 5: Shih ChCO-SC_T + SpTD", _LINEAR, mask="top-down", cooccurrence="shih"),
        _recipe("paper-bilinear-aa", "table 2: BP(AA)", _BILINEAR, cooccurrence="none"),
        _recipe("paper-bilinear", "table 2: BP(AC_T)", _BILINEAR),
        _recipe("paper-bilinear-topdown", "table 2, 3 and 5: BP(AC_T) + SpTD", _TOP_DOWN),
        _recipe("paper-bilinear-topdown-1024", "table 3: BP(AC_T) + SpTD, 1024", _TOP_DOWN, dim=1024),
        _recipe("paper-bilinear-topdown-2048", "table 3: BP(AC_T) + SpTD, 2048", _TOP_DOWN, dim=2048),
        _recipe("paper-bilinear-topdown-4096", "table 3 and 5: BP(AC_T) + SpTD, 4096", _TOP_DOWN, dim=4096),
        _recipe("shih-bilinear-topdown", "table 5: Shih BP(AC_T) + SpTD, 512", _TOP_DOWN, cooccurrence="shih"),
        _recipe(
            "shih-bilinear-topdown-4096",
            "table 5: Shih BP(AC_T) + SpTD, 4096",
            _TOP_DOWN,
            cooccurrence="shih",
            dim=4096,
        ),
        _recipe("paper-bilinear-aa-ms", "table 4: BP(AA) + ms, 8192", _BILINEAR, cooccurrence="none", **_MS),
        _recipe("resnet-gem", "our measurement: docs/performance.md", _RESNET),
        _recipe("resnet-tuned", "our measurement: docs/training.md", _RESNET, tuning="landmarks"),
        _recipe("light", "our measurement: docs/performance.md", _WEIGHTED, backbone="efficientnet-lite0", layer=""),
        _recipe("paper-bilinear-ms", "table 4 and 6: BP(AC_T) + ms, 8192", _BILINEAR, **_MS),
        _recipe("learned", "section 5, our filter: BP(AC_T) learned", _LEARNED),
        _recipe("learned-deep", "our filter and last block: BP(AC_T) + SpTD learned", _DEEP),
        _recipe("learned-deep-ms", "our filter and last block: BP(AC_T) + SpTD learned + ms, 8192", _DEEP, **_MS),
        _recipe(
            "learned-linear",
            "our last two blocks: ChCO-SC_T + SpTD",
            _WEIGHTED,
            layer="conv5_3",
            mask="top-down",
            tuning="landmarks-linear",
        ),
        _recipe("learned-ms", "table 4 and 6, our filter: BP(AC_T) learned + ms, 8192", _LEARNED, **_MS),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or the artefact in that folder, with the changes that follow it after "+"."""
    base, *changes = name.split("+")
    if Path(name).is_dir():
        base, changes = name, []
    found = RECIPES.get(base) or read_artefact(_artefact(base))
    config = found.config
    for change in changes:
        config = _change(config, change)
    return Recipe(name, config, found.source + (f", changed: {' '.join(changes)}" if changes else ""))


def kept_artefacts() -> Path:
    """Where `cooc weights import` puts descriptors that were brought from elsewhere, each in a folder of its name."""
    return weights_home().parent / "descriptors"


def _artefact(name: str) -> Path:
    here = Path(name)
    if here.is_dir():
        return here
    kept = {folder.name: folder for folder in kept_artefacts().glob("*") if folder.is_dir()}
    if name not in kept:
        raise UnknownNameError("recipe", name, [*RECIPES, *kept])
    return kept[name]


def read_artefact(folder: Path) -> Recipe:
    file = folder / ARTEFACT
    try:
        if not file.is_file() and (folder / "run.json").is_file():
            return _old_run(folder)
        content = json.loads(file.read_text(encoding="utf-8"))
        values = content["config"]
        for name in ("filter", "whitening", *(["tuning"] if "tuning" in values else [])):  # older ones have none
            if values[name]:
                values[name] = str(folder / Path(values[name]).name)
        return Recipe(str(folder), DescriptorConfig.from_dict(values), str(content.get("source", file)))
    except FileNotFoundError as error:
        raise InputError(f"There is no descriptor in {folder} ({ARTEFACT} is missing). Name a recipe.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no descriptor that cooc wrote ({error}). Write or copy it again.") from error


def _old_run(folder: Path) -> Recipe:
    """What `cooc train` left before it wrote artefacts: the recipe's name, a filter and a whitening."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if "judged" in run:  # by then it wrote one, unless nothing was gained
        raise FileNotFoundError(folder / ARTEFACT)
    trained, searching = DescriptorConfig.from_dict(run["config"]["descriptor"]), find_recipe(run["recipe"]).config
    config = trained.replace(size=searching.size, scales=searching.scales, dtype="auto")
    if "filter" in run:
        config = config.replace(cooccurrence="learned", filter=str(folder / "filter.safetensors"))
    if "exponent" in run:
        name = "p" if config.pooling == "gem" else "b"
        config = config.replace(options=dict(config.options) | {name: run["exponent"]})
    if "whitening" in run:
        config = config.replace(whitening=str(folder / "whitening.safetensors"), dim=run["whitening"]["dim"])
    return Recipe(str(folder), config, f"trained on {run['data']['name']}")


def _change(config: DescriptorConfig, change: str) -> DescriptorConfig:
    key, _, text = change.partition("=")
    if change == "ms":
        return config.replace(scales=MULTI_SCALE)
    if change == "raw":
        return config.replace(whitening="", dim=0)
    kinds = {field.name: field.type for field in dataclasses.fields(config) if field.name != "options"}
    if not text:
        raise UnknownNameError("change of a recipe", change, ["ms", "raw", *(f"{k}=..." for k in kinds)])
    try:
        if key not in kinds:  # an option of the pooling, such as p of GeM
            return config.replace(options=dict(config.options) | {key: _number(text)})
        value: Any = text
        if kinds[key] in ("int", "float"):
            value = int(text) if kinds[key] == "int" else float(text)
        elif key == "scales":
            value = tuple(float(part) for part in text.split(","))
        if key == "backbone":  # the layers of one network mean nothing to another
            return config.replace(backbone=text, layer="")
        if key == "filter":
            return config.replace(filter=text, cooccurrence="learned")
        return config.replace(**{key: value})
    except InputError:
        raise  # says by itself what is wrong
    except ValueError as error:
        raise InputError(f"Cannot read {change!r} in a recipe's name: {error}") from error


def _number(text: str) -> float | int | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else float(text)
