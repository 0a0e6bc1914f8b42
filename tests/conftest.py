"""Start all tests from the same state, whatever process started them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from browsing import CHROMIUM, PATIENCE

# The matrices of these tests are small: a second thread costs more than it brings.
torch.set_num_threads(1)

# The same examples on every machine, however slow: one that takes 0.2 s would be a failure, and so
# would a new one be that fails. `pytest --hypothesis-profile=default` looks for those.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# A process started in the background or by nohup ignores SIGINT or SIGHUP, and so do its children;
# tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Each test decides on the width and colours of output, and on the place of data.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTAPCA_HOME"):
    os.environ.pop(name, None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as driver:
        # Containers and CI run as root, where the sandbox cannot start; the pages are our own.
        opened = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        yield opened
        opened.close()
