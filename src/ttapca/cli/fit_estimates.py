"""What fitting a filter at each layer of a network would cost, for `ttapca layers`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, get_args

from ttapca._checks import OneOf, check_option

if TYPE_CHECKING:
    from torch import nn

    from ttapca.fitting.fit_plan import FitPlan
    from ttapca.networks import LayerTable

TIMED = 2  # images


def planned_fits(
    network: nn.Module,
    shape: tuple[int, ...],
    table: LayerTable,
    components: int | None,
    images: int,
    route: str,
) -> dict[str, FitPlan | None]:
    """Return the plan of a fit at each layer; None where it needs more memory than there is."""
    from ttapca.errors import OutOfMemoryError
    from ttapca.fitting.fit_plan import NetworkTimes, RouteChoice, plan_of
    from ttapca.fitting.model_inputs import KEPT_PARTS, kept_of_a_batch
    from ttapca.fitting.route_costs import Problem
    from ttapca.spectral.basis import Cosine, cosines_serve

    check_option("route", route, OneOf(get_args(RouteChoice)))
    asked = cast("RouteChoice", route)
    whole, measured, classes = _passes(network, shape, images)
    kept = KEPT_PARTS * kept_of_a_batch(math.prod(shape))
    plans: dict[str, FitPlan | None] = {}
    for layer in table.layers:
        filtered = layer.input_shape if layer.folds else layer.output_shape
        default = components is None and cosines_serve(filtered or (), shape)
        problem = Problem(
            layer.input_shape,
            layer.output_shape,
            layer.folds,
            None if default else min(layer.components, images - 1),
            images,
            classes=classes,
            data_shape=shape,
        )
        impossible = asked == "folded" and not problem.folds
        impossible |= asked == "dct" and not Cosine.takes(problem.filtered_shape)
        plans[layer.name] = None
        if not impossible:
            first = problem.folds and layer.input_shape == shape
            times = NetworkTimes(
                fetching=0.0,
                up_to_layer=0.0 if first else whole,
                whole=whole,
                measuring=whole,
                measured=measured,
                compared=min(images, kept),
            )
            try:
                plans[layer.name] = plan_of(problem, asked, times=times)
            except OutOfMemoryError:
                continue
    return plans


def _passes(network: nn.Module, shape: tuple[int, ...], images: int) -> tuple[float, int, int]:
    """Return seconds for an image, how many run through the whole network, and its classes."""
    import torch

    from ttapca.fitting.measuring_rule import measuring_rule
    from ttapca.fitting.network_cost import seconds_of, watched
    from ttapca.fitting.source_channels import found_logits
    from ttapca.support.modules import device_and_dtype, evaluation_mode

    device, dtype = device_and_dtype(network, network)
    batch = torch.zeros(TIMED, *shape, device=device, dtype=dtype)
    with torch.no_grad(), evaluation_mode(network):
        with watched(network, TIMED) as cost:  # the first run is slow, and not timed
            logits = found_logits(network(batch))
        seconds = seconds_of(lambda: network(batch)) / TIMED
    classes = 0 if logits is None else logits.shape[1]
    rule = measuring_rule(
        network, images, classes, numbers=math.prod(shape), multiply_adds=cost.multiply_adds
    )
    return seconds, rule.expected or 0, classes
