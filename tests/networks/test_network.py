"""What all networks have in common: normalisation, and the images that they take."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from ttapca.datasets import Images
from ttapca.errors import InputTypeError, OptionError, ShapeError
from ttapca.networks import Normalisation, build, normalisation_of
from ttapca.networks.network import looks_untrained


def test_normalisation_is_part_of_the_network_and_not_of_its_weights() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    plain = build("wrn-10-1").eval()
    normal = build("wrn-10-1", normalisation=Normalisation(mean, std)).eval()
    assert list(normal.state_dict()) == list(plain.state_dict())
    images = torch.rand(4, 3, 32, 32)
    scaled = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normal(images), plain(scaled))
    for other in (copy.deepcopy(normal), pickle.loads(pickle.dumps(normal))):
        assert torch.equal(other(images), normal(images))


def test_normalisation_of_a_data_set() -> None:
    pixels = torch.randint(0, 256, (20, 4, 4, 3), generator=torch.Generator().manual_seed(0))
    pixels[..., 2] = 51
    images = Images(pixels.to(torch.uint8).numpy(), torch.zeros(20).long().numpy(), ("a",))
    found = normalisation_of(images)
    scaled = pixels.double() / 255
    assert found.mean == pytest.approx(scaled.mean((0, 1, 2)).tolist(), abs=1e-4)
    deviations = scaled.std((0, 1, 2), correction=0).tolist()
    assert found.std == pytest.approx([*deviations[:2], 1.0], abs=1e-4)  # one channel is constant


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("resnet20", normalisation="cifar"), "Did you mean `cifar10`"),
        *(
            (partial(build, "small-cnn", input_shape=shape), "`input_shape.* must be")
            for shape in ((32, 32), (3, 0, 32), (3, 10**6, 10**6), (3.0, 32, 32))
        ),
        (lambda: Normalisation((0.5,), (0.0,)), "above 0; found"),
        (lambda: Normalisation((), (1.0,)), "`mean` must be a list of 1 to 1,024 entries; found 0"),
        (lambda: Normalisation((float("nan"),), (1.0,)), r"`mean\[0\]` must be a finite number"),
        (
            lambda: build("resnet20", normalisation=Normalisation((0.1, 0.2), (1.0,))),
            "one for each of the 3 channels; found 2",
        ),
    ],
)
def test_what_makes_no_sense(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_images_of_another_size_or_type() -> None:
    network = build("wrn-10-1").eval()
    with pytest.raises(ShapeError, match=r"of shape 3x32x32; found 3x64x64. Resize .* `size=`"):
        network(torch.rand(1, 3, 64, 64))
    with pytest.raises(InputTypeError, match=r"in \[0, 1\]; found uint8. Convert pixels"):
        network(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    network.take_any_size()
    assert network(torch.zeros(1, 3, 40, 24)).shape == (1, 10)
    with pytest.raises(OptionError, match=r"CompactTransformer takes images of 3x32x32 only"):
        build("cct-2").take_any_size()


def test_the_first_step_of_a_training_shows() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert looks_untrained(network)
    network(torch.rand(4, 2))
    assert not looks_untrained(network)
    assert not looks_untrained(nn.Linear(2, 3))
