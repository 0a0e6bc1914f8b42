"""Which basis a layer gets, on which side, and which kind of basis a saved filter holds."""

from __future__ import annotations

import math

from torch import nn

from ttapca.spectral.basis import Basis, Dense
from ttapca.spectral.cosine import Cosine
from ttapca.spectral.cosine_transform import has_cosines
from ttapca.spectral.folded import Folded, is_affine
from ttapca.spectral.image_statistics import is_image

# `ttapca.fit` decomposes matrices of up to this many rows: 8 n^2 bytes (512 MB) and some minutes.
MATRIX_LIMIT = 8192

# Bytes of a basis of vectors, on disk and at test time. For images, cosines take its place above.
LARGEST_DENSE = 2**27

# Numbers of an image, up to which principal components are the default: they are found at once, and
# on centred digits of 8 x 8 they were 5 points better than cosines. From 3 x 32 x 32 on, cosines
# were as good on four networks (docs/closed-form-evidence.md).
SMALL = 1024

# By the name of the route that finds it, which saved filters hold, and whether it acts on the
# layer's input.
BASES: dict[tuple[str, bool], type[Basis]] = {
    (route, side): kind
    for kind in (Folded, Dense, Cosine)
    for route in kind.routes
    for side in kind.sides
}
ROUTE_NAMES = ("folded", *Dense.routes, *Cosine.routes)


def basis_kind(route: str, *, at_input: bool) -> type[Basis]:
    """Return the kind of basis that a route finds, on that side of the layer if it can be there."""
    return BASES.get((route, at_input)) or BASES[route, not at_input]


def takes_images(input_shape: tuple[int, ...] | None, data_shape: tuple[int, ...] | None) -> bool:
    """Return whether a layer's input has the shape of the images that the model is given."""
    return input_shape == data_shape and is_image(input_shape)


def acts_on_input(
    layer: nn.Module,
    input_shape: tuple[int, ...] | None,
    output_shape: tuple[int, ...],
    data_shape: tuple[int, ...] | None = None,
) -> bool:
    """Return whether a filter should act on a layer's input, given the shapes of single samples."""
    if input_shape is None or not is_affine(layer):
        return False
    # On images that the model is given, cosines serve even if matrices would be too large, and
    # single wrong pixels can be seen: at the patch embedding of a transformer.
    smaller = math.prod(input_shape) < math.prod(output_shape)
    return smaller or takes_images(input_shape, data_shape)


def cosines_serve(shape: tuple[int, ...], data_shape: tuple[int, ...] | None) -> bool:
    """Return whether cosines do as well as principal components: for a model's larger images."""
    return takes_images(shape, data_shape) and has_cosines(shape) and math.prod(shape) > SMALL


def usual_basis(
    layer: nn.Module,
    input_shape: tuple[int, ...] | None,
    output_shape: tuple[int, ...],
    n_components: int = 1,
    data_shape: tuple[int, ...] | None = None,
    *,
    asked: bool = True,
) -> tuple[type[Basis], tuple[int, ...]]:
    """Return the kind of basis that `ttapca.fit` finds by default, and the shape it filters."""
    kind: type[Basis] = Dense
    shape = output_shape
    at_input = acts_on_input(layer, input_shape, output_shape, data_shape)
    if at_input and input_shape is not None:
        kind, shape = Folded, input_shape
    size = math.prod(shape)
    if not asked and cosines_serve(shape, data_shape):
        return Cosine, shape
    large = 4 * kind.cost(shape, min(size, n_components)).numbers > LARGEST_DENSE
    return (Cosine if large and size > MATRIX_LIMIT and has_cosines(shape) else kind), shape
