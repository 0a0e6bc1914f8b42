"""Interrupt an adapter by SIGINT at random moments, and check the model after each interrupt.

    python tests/interrupts.py METHOD COUNT SEED

The signals come from a second process, as Ctrl-C does, half of them while the adapter is called and
half while it is put on a model and taken off. Prints `COUNT interrupts survived`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable

import torch

import ttapca
from adapters import X, adapted, options_of
from oracles import assert_same_picture, picture_of, small_convnet

# For each line that it reads, waits that many seconds and sends one signal.
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(int(sys.argv[1]), signal.SIGINT)
"""


def main(method: str, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    # A process that was started in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = small_convnet()
    before = picture_of(model)
    adapter = adapted(method, model=model, forgetting="episodic")
    attached, expected = picture_of(model), adapter(X)
    draw = random.Random(seed)
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(os.getpid())],
        stdin=subprocess.PIPE,
        text=True,
        preexec_fn=os.setsid,  # the sender is not interrupted with its target
    )

    def interrupted(call: Callable[[], object]) -> None:
        try:
            sender.stdin.write(f"{draw.uniform(0, 0.01)}\n")
            sender.stdin.flush()
            while True:
                call()
        except KeyboardInterrupt:
            pass

    try:
        for _ in range(count // 2):
            interrupted(lambda: adapter(X))
            assert_same_picture(attached, picture_of(model))
            assert torch.equal(adapter(X), expected)
        adapter.detach()
        assert_same_picture(before, picture_of(model))
        name, options = options_of(method)
        for _ in range(count - count // 2):
            interrupted(lambda: ttapca.adapt(model, name, **options).detach())
            assert_same_picture(before, picture_of(ttapca.detach(model)))
    finally:
        sender.kill()
        sender.wait()
    sys.stdout.write(f"{count} interrupts survived\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
