"""The live page on the real service: streams that degrade, and switches that change answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import ttapca
from browsing import PATIENCE, needs_chromium
from serving.clients import SECRETS, token
from serving.servers import Running
from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import read_digits, to_tensor
from ttapca.serving import StreamPool
from ttapca.serving.feeding import Feeder, ServerClient, StreamPlan, parse_schedule
from ttapca.serving.http_server import DrainingServer, listen
from ttapca.serving.service import Service, ServiceFacts
from ttapca.serving.tokens import Token, Tokens

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = needs_chromium

Start = Callable[..., str]


@pytest.fixture
def start(digits_network: nn.Module, digits_filter: ttapca.FittedFilter) -> Iterator[Start]:
    """Start a service on a free port, and return its address."""
    with ExitStack() as opened:

        def begin(*tokens: Token) -> str:
            pool = opened.enter_context(StreamPool(copy.deepcopy(digits_network), digits_filter))
            facts = ServiceFacts("digits", "conv1, 61 components", tuple("0123456789"))
            service = Service(pool, facts, tokens=Tokens(tokens))
            opened.callback(service.close)
            running = Running(DrainingServer(service), listen("127.0.0.1", 0))
            opened.callback(running.end)
            return f"http://127.0.0.1:{running.address[1]}/"

        yield begin


@contextmanager
def opened(browser: Any, url: str, *, unprovoked: bool = True) -> Iterator[Any]:
    """Open the page; nothing but its own service is asked, and the console says nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, said = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(url)
    yield page
    context.close()
    expected = (url, "data:") if unprovoked else (url, "data:", "Failed to load resource")
    assert [each for each in said if not each.startswith(expected)] == []


def feed(url: str, *schedules: str) -> None:
    """Play schedules to the end, as fast as it goes."""
    plans = [
        StreamPlan(f"camera-{n + 1}", parse_schedule(text), seed=1000 * n)
        for n, text in enumerate(schedules)
    ]
    client = ServerClient(url, patience=300)
    with Feeder(read_digits(), plans, client, rate=1e5, batch=16) as feeder:
        while feeder.running(0.1):
            pass


def asked(url: str, images: NDArray[np.uint8], stream: str = "camera-1") -> tuple[list[int], Any]:
    """Classes and probabilities that the API answers."""
    answers = ServerClient(url, patience=300).predict(stream, images)["predictions"]
    return [each["class"] for each in answers], [each["probability"] for each in answers]


def test_a_stream_that_degrades(browser: Any, start: Start) -> None:
    url = start()
    feed(url, "clean 320 images", "clean 320 images")
    with opened(browser, url) as page:
        state = page.locator("#state")
        expect(page.locator("h1")).to_have_text("digits")
        expect(page.locator("#list [role=option]")).to_have_count(2)
        expect(page.locator("#no-alarm")).to_have_text("None is on; 2 streams watched.")
        expect(page.locator("#name")).to_have_text("camera-1")
        expect(state).to_contain_text("As usual since")
        expect(page.locator("#before")).to_be_visible()
        feed(url, "frost:5 320 images")
        expect(page.locator("#alarms a")).to_have_text("camera-1")
        expect(page.locator("#announcement")).to_have_text("Alarm: camera-1 shifted.")
        expect(state).to_contain_text("Shifted since")
        expect(page.locator("#list .shifted .row-name")).to_have_text("camera-1")
        # Frost is most of all noise to these digits: the last band is high, and held back.
        expect(page.locator("#ratios .bars rect").nth(5)).to_have_class("sure")
        assert float(page.locator("#gains .values text").nth(5).text_content()) < 0.5
        sources = [page.locator(f"#{which}").get_attribute("src") for which in ("before", "after")]
        assert sources[0] != sources[1]
        feed(url, "clean 960 images")
        expect(page.locator("#alarms li")).to_have_class("over")
        expect(state).to_contain_text("As usual since")


@torch.no_grad()
def test_switching_changes_the_answers(
    browser: Any, start: Start, digits_network: nn.Module
) -> None:
    url = start()
    images = read_digits().images[:64]
    frosty = corrupt_any_size(images, "frost", 5)
    plain = digits_network(to_tensor(frosty)).softmax(1).max(1)
    feed(url, "frost:5 320 images")
    adapted, _ = asked(url, frosty)
    assert adapted != plain.indices.tolist()
    with opened(browser, url) as page:
        for mode in ("off", "shadow", "on"):
            page.get_by_role("radio", name=mode).check()
            expect(page.locator("#list .row-mode")).to_have_text(mode)
            classes, probabilities = asked(url, frosty)
            assert (classes == plain.indices.tolist()) == (mode != "on")
            if mode != "on":  # the untouched network
                assert probabilities == pytest.approx(plain.values.tolist(), abs=1e-6)
            if mode == "shadow":
                expect(page.locator("#facts")).to_contain_text("of the images in shadow")
        page.get_by_role("button", name="Reset").click()
        page.get_by_role("dialog").get_by_role("button", name="Reset").click()
        expect(page.locator("#state")).to_have_text("No image yet")


def test_a_token_that_may_only_read(browser: Any, start: Start) -> None:
    url = start(token("reader", "read", "all"), token("shop", "predict"))
    client = ServerClient(url, SECRETS["shop"], patience=300)
    client.predict("camera-1", read_digits().images[:3])
    with opened(browser, url, unprovoked=False) as page:
        page.get_by_label("This server asks for a token").fill(SECRETS["reader"])
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#name")).to_have_text("shop.camera-1")
        expect(page.locator("#before")).to_be_visible()
        page.get_by_role("radio", name="off").click()
        expect(page.locator("#message")).to_contain_text("Could not switch to off shop.camera-1")
        expect(page.get_by_role("radio", name="on")).to_be_checked()
