"""Gradient norms by layer, for the page's map of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_METRIC = re.compile(r"(.+)/grad_norm_layer/(\d{2,4}|tower|embedding|head)")
_PLACES = {"tower": -2, "embedding": -1, "head": 10_000}
_MOST = 3


def layer_norms(training: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the layers of each model whose gradient norms were recorded.

    Args:
        training: see `folder.metric_tables`.
    Returns: {model: {"layers": [[layer, its metric]], from the input to the output; "text": a
        sentence on which norms grew most, empty if there are too few}}.
    """
    columns = training["columns"]
    found: dict[str, list[tuple[str, str]]] = {}
    for name in columns:
        if match := _METRIC.fullmatch(name):
            found.setdefault(match[1], []).append((match[2], name))
    models = {}
    for model, layers in found.items():
        layers.sort(key=lambda one: _place(one[0]))
        text = _growth({layer: columns[name] for layer, name in layers})
        models[model] = {"layers": layers, "text": text}
    return models


def _place(layer: str) -> int:
    return _PLACES[layer] if layer in _PLACES else int(layer)


def _growth(values: Mapping[str, Sequence[float | None]]) -> str:
    times = {}
    for layer, own in values.items():
        # A norm is 0 where all rewards of a step are equal.
        known = [value for value in own if value is not None and value > 0]
        tenth = -(-len(known) // 10)
        if len(known) > 1:
            times[layer] = median(known[-tenth:]) / median(known[:tenth])
    if not times:
        return ""
    between = "from the first tenth of the recorded steps to the last (medians)"
    grown = [layer for layer in times if times[layer] > 1]
    if not grown:
        return f"No layer's gradient norm grew {between}."
    grown.sort(key=lambda layer: -times[layer])
    most = [f"{_text(layer)} ({times[layer]:.3g} times)" for layer in grown[:_MOST]]
    return f"Gradient norms that grew most {between}: {', '.join(most)}."


def _text(layer: str) -> str:
    return layer if layer in _PLACES else f"layer {layer}"
