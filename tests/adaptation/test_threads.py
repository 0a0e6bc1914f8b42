"""Several threads call one adapter: they take turns, and copies have a turn of their own."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from adapters import X, adapted
from oracles import images, small_convnet


@pytest.mark.parametrize("method", ["bn", "tent", "slr+it", "cotta", "wiener", "ttapca-relu"])
def test_threads_take_turns(method: str) -> None:
    adapter = adapted(method, forgetting="episodic")
    batches = [images(12, seed=seed) for seed in range(16)]
    expected = [adapter(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(pool.map(adapter, batches), expected, strict=True):
            assert torch.equal(one, other)


def test_a_thread_waits_while_another_has_switched_off() -> None:
    adapter = adapted("bn")
    expected, plain = adapter(X), small_convnet()(X)
    with ThreadPoolExecutor(1) as pool:
        with adapter.disabled():
            waiting = pool.submit(adapter, X)
            assert torch.equal(adapter.model(X), plain)
            assert torch.equal(adapter(X), plain)
            assert not waiting.done()
        assert torch.equal(waiting.result(timeout=60), expected)


def test_copies_have_a_turn_of_their_own() -> None:
    adapter = adapted("tent")
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    expected = adapter(X)
    with adapter.disabled(), ThreadPoolExecutor(1) as pool:
        for twin in twins:
            assert torch.equal(pool.submit(twin, X).result(timeout=60), expected)
