"""The digits network with a filter, and services around it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ttapca
from serving.clients import Client
from ttapca import networks
from ttapca.datasets import TensorBatches, read_digits
from ttapca.serving import PoolLimits, StreamPool, StreamStore
from ttapca.serving.limits import RequestLimits
from ttapca.serving.metrics import Metrics
from ttapca.serving.service import Service, ServiceFacts
from ttapca.serving.tokens import Token, Tokens

Serving = Callable[..., Client]


def smooth_images(
    count: int, seed: int, shape: tuple[int, ...] = (3, 8, 8), noise: float = 0.0
) -> Tensor:
    """Smooth random images between 0 and 1, with noise."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(count, *shape, generator=generator)
    smooth = nn.functional.avg_pool2d(rough, 3, stride=1, padding=1)
    return smooth + noise * torch.randn(count, *shape, generator=generator)


@pytest.fixture(scope="session")
def digits_network() -> nn.Module:
    return networks.load("digits-small-cnn")


@pytest.fixture(scope="session")
def digits_filter(digits_network: nn.Module) -> ttapca.FittedFilter:
    return ttapca.fit(digits_network, "conv1", TensorBatches(read_digits("train"), 250))


@pytest.fixture(scope="session")
def filter_folder(
    digits_filter: ttapca.FittedFilter, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("filters") / "digits"
    digits_filter.save(folder)
    return folder


@pytest.fixture(scope="session")
def images() -> NDArray[np.uint8]:
    """Test digits, uint8, (596, 8, 8, 1)."""
    return read_digits("test").images


@pytest.fixture
def serving(
    digits_network: nn.Module, digits_filter: ttapca.FittedFilter, tmp_path: Path
) -> Iterator[Serving]:
    """Make services, each with a pool and a network of its own."""
    with ExitStack() as opened:

        def make(
            *tokens: Token,
            pool_limits: dict[str, Any] | None = None,
            stored: bool = False,
            size: Any = None,
            fitted: ttapca.FittedFilter | None = None,
            **limits: Any,
        ) -> Client:
            metrics = Metrics("digits", "1.2.3")
            store = opened.enter_context(StreamStore(tmp_path / "s.sqlite")) if stored else None
            pool = StreamPool(
                copy.deepcopy(digits_network),
                fitted or digits_filter,
                store=store,
                limits=PoolLimits(**(pool_limits or {})),
                observer=metrics,
            )
            opened.enter_context(pool)
            facts = ServiceFacts("digits", "conv1", tuple("0123456789"), ((1, 1), (2, 3)))
            service = Service(
                pool,
                facts,
                tokens=Tokens(tokens),
                limits=RequestLimits(**limits),
                metrics=metrics,
                size=size,
            )
            client = Client(service)
            opened.callback(client.close)
            return client

        yield make
