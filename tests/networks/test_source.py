"""Networks by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from ttapca.errors import OptionError, UntrainedWarning
from ttapca.networks import Normalisation
from ttapca.networks.source import NetworkSource


def test_networks_by_name() -> None:
    assert NetworkSource("digits").load().training is False
    with pytest.warns(UntrainedWarning, match="no weights were given, so `torch.nn:Identity`"):
        NetworkSource("torch.nn:Identity").load()
    assert isinstance(NetworkSource("torch.nn:Identity").load(doubt=False), nn.Identity)
    with pytest.raises(OptionError, match="`weights=` has no meaning for `digits`"):
        NetworkSource("digits", Path("w.pth")).load()
    with pytest.raises(OptionError, match="`any_size=` has no meaning for"):
        NetworkSource("torch.nn:Identity", any_size=True).load()
    assert NetworkSource("x.pth", eps=1e-3).words()["--eps"] == 1e-3
    stated = NetworkSource("x.pth", normalisation=Normalisation((0.5, 0.25, 1.0), (1.0,))).words()
    given = {name: value for name, value in stated.items() if value is not None}
    assert given == {"--mean": "0.5,0.25,1.0", "--std": "1.0"}
