from __future__ import annotations

import torch

import ttapca
from methods.plain_loops import BATCHES, both_ways
from oracles import small_convnet

WIDE = {"entropy_margin": 0.9, "redundancy_margin": 0.9, "lr": 0.05}


@both_ways
def test_a_period_is_a_stream_of_eata_that_starts_anew(forgetting: str) -> None:
    options = {**WIDE, "forgetting": forgetting}
    rdumb = ttapca.adapt(small_convnet(), "rdumb", reset_every=3, **options)
    eata = ttapca.adapt(small_convnet(), "eata", **options)
    for number, x in enumerate(BATCHES):
        if number % 3 == 0:
            eata.reset()
        assert torch.equal(rdumb(x), eata(x))
    assert rdumb.updates == eata.updates > 0


def test_the_period_belongs_to_the_stream() -> None:
    adapter = ttapca.adapt(small_convnet(), "rdumb", reset_every=3, forgetting="online", **WIDE)
    adapter(BATCHES[0])
    saved = adapter.state_dict()
    first = [adapter(x) for x in BATCHES[1:5]]
    adapter.load_state_dict(saved)
    assert all(torch.equal(adapter(x), y) for x, y in zip(BATCHES[1:5], first, strict=True))
