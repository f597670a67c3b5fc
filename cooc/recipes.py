"""Named descriptors, each with its source. A name may carry changes: `paper-bilinear-topdown+dim=4096+ms`.

find_recipe("paper-linear-topdown").config       the frozen DescriptorConfig
find_recipe("gem+p=4+size=640")                  any setting or pooling option, joined by "+"
find_recipe("crow+ms")                           ms: at scales 1, 1/sqrt 2, 1/2;  raw: without whitening
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from cooc.descriptor import MULTI_SCALE, DescriptorConfig
from cooc.errors import InputError, UnknownNameError

__all__ = ["RECIPES", "Recipe", "find_recipe"]

SKETCH = (("dim", 8192), ("seed", 0))


@dataclass(frozen=True)
class Recipe:
    name: str
    config: DescriptorConfig
    source: str


def _linear(pooling: str, source: str, mask: str = "none", cooccurrence: str = "none") -> tuple[DescriptorConfig, str]:
    config = DescriptorConfig(pooling=pooling, mask=mask, cooccurrence=cooccurrence, whitening="landmarks", dim=512)
    return config, source


def _bilinear(
    source: str, mask: str = "none", cooccurrence: str = "direct", dim: int = 512, scales: tuple[float, ...] = (1.0,)
) -> tuple[DescriptorConfig, str]:
    config, _ = _linear("compact-bilinear", source, mask, cooccurrence)
    return replace(config, options=SKETCH, dim=dim, scales=scales), source


def _learned(source: str, dim: int = 512, scales: tuple[float, ...] = (1.0,)) -> tuple[DescriptorConfig, str]:
    config, _ = _bilinear(source, dim=dim, scales=scales)
    return replace(config, cooccurrence="learned", filter="landmarks"), source


def _light(source: str) -> tuple[DescriptorConfig, str]:
    """The paper's linear pooling on a network for people without a GPU."""
    config, _ = _linear("chco-sct", source, cooccurrence="direct")
    return config.replace(backbone="efficientnet-lite0", layer=""), source


_TABLE: dict[str, tuple[DescriptorConfig, str]] = {
    "ucrow": _linear("ucrow", "table 1 and 6: ucrow"),
    "crow": _linear("crow", "table 1 and 6: crow (Kalantidis et al. 2016)"),
    "spoc": _linear("spoc", "table 6: SPoC (Babenko and Lempitsky 2015)"),
    "mac": _linear("mac", "table 6: MAC (Tolias et al. 2016)"),
    "rmac": _linear("rmac", "table 6: R-MAC (Tolias et al. 2016)"),
    "gem": _linear("gem", "table 6: GeM, p = 3 (Radenovic et al. 2018)"),
    "chco": _linear("chco", "ablation of Eq. 7: channel weights alone", cooccurrence="direct"),
    "sct": _linear("sct", "ablation of Eq. 7: spatial weights alone", cooccurrence="direct"),
    "paper-linear": _linear("chco-sct", "table 1: ChCO-SC_T", cooccurrence="direct"),
    "paper-linear-topdown": _linear("chco-sct", "table 1, 5 and 6: ChCO-SC_T + SpTD", "top-down", "direct"),
    "paper-linear-centre": _linear("chco-sct", "table 1 and 5: ChCO-SC_T + SpCt", "centre", "direct"),
    "shih-linear-topdown": _linear("chco-sct", "table 5: Shih ChCO-SC_T + SpTD", "top-down", "shih"),
    "paper-bilinear-aa": _bilinear("table 2: BP(AA)", cooccurrence="none"),
    "paper-bilinear": _bilinear("table 2: BP(AC_T)"),
    "paper-bilinear-topdown": _bilinear("table 2, 3 and 5: BP(AC_T) + SpTD", "top-down"),
    "paper-bilinear-topdown-1024": _bilinear("table 3: BP(AC_T) + SpTD, 1024", "top-down", dim=1024),
    "paper-bilinear-topdown-2048": _bilinear("table 3: BP(AC_T) + SpTD, 2048", "top-down", dim=2048),
    "paper-bilinear-topdown-4096": _bilinear("table 3 and 5: BP(AC_T) + SpTD, 4096", "top-down", dim=4096),
    "shih-bilinear-topdown": _bilinear("table 5: Shih BP(AC_T) + SpTD, 512", "top-down", "shih"),
    "shih-bilinear-topdown-4096": _bilinear("table 5: Shih BP(AC_T) + SpTD, 4096", "top-down", "shih", 4096),
    "paper-bilinear-aa-ms": _bilinear("table 4: BP(AA) + ms, 8192", "none", "none", 8192, MULTI_SCALE),
    "light": _light("our measurement: docs/performance.md"),
    "paper-bilinear-ms": _bilinear("table 4 and 6: BP(AC_T) + ms, 8192", "none", "direct", 8192, MULTI_SCALE),
    "learned": _learned("section 5, our filter: BP(AC_T) learned"),
    "learned-ms": _learned("table 4 and 6, our filter: BP(AC_T) learned + ms, 8192", 8192, MULTI_SCALE),
}

RECIPES: dict[str, Recipe] = {name: Recipe(name, config, source) for name, (config, source) in _TABLE.items()}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, with the changes that follow it after "+"."""
    base, *changes = name.split("+")
    if base not in RECIPES:
        raise UnknownNameError("recipe", base, RECIPES)
    config = RECIPES[base].config
    for change in changes:
        config = _change(config, change)
    return Recipe(name, config, RECIPES[base].source + (f", changed: {' '.join(changes)}" if changes else ""))


def _change(config: DescriptorConfig, change: str) -> DescriptorConfig:
    key, _, text = change.partition("=")
    if change == "ms":
        return config.replace(scales=MULTI_SCALE)
    if change == "raw":
        return config.replace(whitening="", dim=0)
    kinds = {field.name: field.type for field in fields(config) if field.name != "options"}
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
