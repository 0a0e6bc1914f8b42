"""The live page with every kind of server behind it; `test_live_service.py` has the real one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from browsing import contrast, luminance, needs_chromium
from serving.page_world import (
    CLASSES,
    NOON,
    World,
    opened,
    pass_time,
    picture,
    shifted,
    soon,
    status,
)

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = needs_chromium


def cameras(count: int) -> World:
    return World().add(*(status(f"camera-{n + 1}") for n in range(count)))


def test_everything_about_a_stream(browser: Any) -> None:
    world = cameras(1).add(status("camera-1", disagreement=0.034, mode="shadow", skew=0.9))
    with opened(browser, world) as page:
        assert page.locator("h1").inner_text() == "small-network"
        expect(page.locator("#name")).to_have_text("camera-1")
        expect(page.locator("#state")).to_have_text("As usual since 12:00:00 at least")
        assert page.locator("input[value=shadow]").is_checked()
        bars = page.locator("#ratios .bars rect")
        expect(bars).to_have_count(6)  # which come after the list of streams
        assert page.locator("#ratios .bars rect.sure").count() == 2
        assert page.locator("#ratios .values text").all_text_contents()[-1] == "9.5"
        # Above the source's variance upwards, below it downwards, on a scale of doublings.
        first, last = (bars.nth(at).bounding_box() for at in (2, 5))
        assert last["y"] + last["height"] <= first["y"] + 1
        assert last["height"] / first["height"] == pytest.approx(3.25 / 0.51, rel=0.1)
        gains = [float(each) for each in page.locator("#gains .values text").all_text_contents()]
        assert gains == [1, 1, 1, 0.98, 0.6, 0.12]
        shares = page.locator("#composition li").all_inner_texts()
        assert [each.split() for each in shares[:2]] == [
            ["airplane", "40", "%"],
            [CLASSES[1], "20", "%"],
        ]
        assert shares[-1].split() == ["3", "other", "classes", "9.0", "%"]
        assert "Not the shares of the source" in page.locator("#skew").inner_text()
        facts = page.locator("#facts").inner_text()
        for words in ("1,234", "25 %", "3.4 %", "2 requests", "0.05", "p = 0.400"):
            assert words in facts
        assert "outliers" not in facts  # nobody measures them here
        page.get_by_text("Bands as a table").click()
        rows = page.locator("#bands tr").all_inner_texts()
        assert rows[5].split("\t") == ["conv1, components 32 to 63", "9.5", "0.002", "0.12"]


def test_alarms_are_on_top_the_newest_first(browser: Any) -> None:
    world = cameras(2).add(shifted("yard", NOON - 3600), shifted("door", NOON - 65))
    with opened(browser, world, at="#%zz-names-nothing") as page:
        entries = page.locator("#alarms li")
        assert [each.split("\n") for each in entries.all_inner_texts()] == [
            ["11:58:55", "door", "shifted for 1 min 5 s"],
            ["11:00:00", "yard", "shifted for 1 h"],
        ]
        assert page.title() == "(2) ttapca serve"
        expect(page.locator("#name")).to_have_text("door")  # the newest alarm is looked at first
        expect(page.locator("#state")).to_have_text("Shifted since 11:58:55, for 1 min 5 s")
        announcement = page.locator("#announcement")
        assert announcement.get_attribute("aria-live") == "polite"
        expect(announcement).to_have_text("Alarm: door, yard shifted.")
        # Another one begins, and one ends.
        world.add(shifted("camera-1", NOON + 1), status("yard"))
        soon(page, lambda: entries.count() == 3)
        expect(announcement).to_have_text("Alarm: camera-1 shifted. yard as usual again.")
        names = page.locator("#alarms a").all_inner_texts()
        assert names == ["camera-1", "door", "yard"]
        expect(entries.nth(2)).to_have_class("over")
        assert "over at 12:00:0" in entries.nth(2).inner_text()
        page.locator("#alarms a >> nth=2").click()
        expect(page.locator("#name")).to_have_text("yard")
        expect(page.locator("#name")).to_be_focused()
        expect(page.locator("#state")).to_have_text(re.compile("As usual since 12:00:0"))


def test_many_alarms_are_folded(browser: Any) -> None:
    world = World().add(*(shifted(f"camera-{n}", NOON - 90000 - n) for n in range(30)))
    with opened(browser, world) as page:
        assert page.locator("#alarms li").count() == 4
        assert "15 Nov, 11:00:00" in page.locator("#alarms li >> nth=0").inner_text()
        button = page.locator("#all-alarms")
        assert (button.inner_text(), button.get_attribute("aria-expanded")) == (
            "Show all 30",
            "false",
        )
        button.click()
        assert page.locator("#alarms li").count() == 30
        assert button.get_attribute("aria-expanded") == "true"
        expect(page.locator("#announcement")).to_have_text(
            "Alarm: camera-0, camera-1, camera-2 and 27 others shifted."
        )


def test_no_alarm_is_said_too_and_what_is_about_to_be_one(browser: Any) -> None:
    world = cameras(2).add(status("camera-1", p_value=0.002, shift=0.8, alarm_after=40))
    world.add(status("camera-2", shift=0.97, alarm_after=64))  # of which the list tells less
    with opened(browser, world) as page:
        expect(page.locator("#no-alarm")).to_have_text("None is on; 2 streams watched.")
        expect(page.locator("#state")).to_have_text(
            "Looks shifted; the alarm waits for 40 more images at least"
        )
        expect(page.locator("#list .odd .row-name")).to_have_text("camera-2")
        expect(page.locator("#list .odd .unseen")).to_have_text(", looks shifted, ")
        expect(page.locator("#list .shifted")).to_have_count(0)


def test_the_switch_changes_the_stream_or_goes_back(browser: Any) -> None:
    world = cameras(1)
    with opened(browser, world) as page:
        shown = page.locator("#list .row-mode")
        page.get_by_role("radio", name="off").check()
        expect(shown).to_have_text("off")
        assert world.changes == [("PUT", "/v1/streams/camera-1", {"mode": "off"})]
        pass_time(page, 3)
        expect(shown).to_have_text("off")
        # With the keyboard: one tab stop, arrows choose.
        page.get_by_role("radio", name="off").focus()
        page.keyboard.press("ArrowRight")
        expect(shown).to_have_text("shadow")
        assert world.changes[-1][2] == {"mode": "shadow"}
        world.may_control = False
        page.get_by_role("radio", name="on").click()
        said = "Could not switch to on camera-1: This token may not control streams."
        expect(page.locator("#message")).to_have_text(said)
        assert page.locator("#message").get_attribute("role") == "status"
        expect(page.get_by_role("radio", name="shadow")).to_be_checked()


def test_reset_asks_first(browser: Any) -> None:
    world = cameras(1)
    with opened(browser, world) as page:
        dialog = page.locator("dialog")
        for way in ("Escape", "Cancel", "Reset"):
            page.locator("#reset").click()
            assert "Reset camera-1?" in dialog.inner_text()
            expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
            assert world.changes == []
            if way == "Escape":
                page.keyboard.press("Escape")
            else:
                dialog.get_by_role("button", name=way).click()
            expect(dialog).to_be_hidden()
        soon(page, lambda: world.changes == [("POST", "/v1/streams/camera-1/reset", None)])
        expect(page.locator("#reset")).to_be_focused()  # where the dialog was opened


def test_a_lost_connection_is_seen_and_comes_back(browser: Any) -> None:
    world = cameras(1)
    with opened(browser, world) as page:
        banner, link = page.locator("#lost"), page.locator("#link")
        assert banner.is_hidden()
        world.away = True
        soon(page, banner.is_visible)
        assert banner.get_attribute("role") == "alert"
        expect(banner).to_contain_text("Connection lost since 12:00:0")
        expect(link).to_have_text("lost")
        for wait in (1, 2, 4, 8, 15):
            soon(page, lambda: f"in {wait} s" in banner.inner_text())  # noqa: B023
        before = world.asked.count("/v1/streams")
        pass_time(page, 30)
        assert world.asked.count("/v1/streams") - before <= 3  # one every 15 s
        assert page.locator("#name").inner_text() == "camera-1"  # what was known is still there
        # A server that answers, but is busy, is left alone as long as it says.
        world.away, world.refusing = False, (429, {"Retry-After": "19"}, "Too many requests.")
        soon(page, lambda: "The server refuses Too many requests." in banner.inner_text())
        assert "in 15 s" in banner.inner_text()
        world.refusing = None
        page.get_by_role("button", name="Try now").click()
        expect(banner).to_be_hidden()
        expect(link).to_have_text("live")


def test_a_mistake_in_the_page_is_shown_and_the_page_goes_on(browser: Any) -> None:
    world = cameras(1)
    with opened(browser, world) as page:
        banner, link = page.locator("#lost"), page.locator("#link")
        world.add(status("camera-1", bands="many"))  # which the page does not expect
        soon(page, banner.is_visible)
        expect(banner).to_contain_text("This page has failed (")
        expect(banner).to_contain_text("since 12:00:0")
        expect(link).to_have_text("failed")
        world.add(status("camera-1"))
        soon(page, banner.is_hidden)
        expect(link).to_have_text("live")
        assert "TypeError" in world.said[0]  # for whoever mends the page
        world.said.clear()


def test_a_token_that_may_not_read_can_be_forgotten(browser: Any) -> None:
    world = cameras(1)
    world.token, world.refusing = "of-a-camera", (403, {}, "This needs the right read.")
    with opened(browser, world, ready="#token-form") as page:
        page.keyboard.type("of-a-camera")
        page.keyboard.press("Enter")
        expect(page.locator("#lost")).to_contain_text("This needs the right read.")
        page.get_by_role("button", name="Forget the token").click()
        soon(page, page.locator("#token-form").is_visible)
        world.token, world.refusing = "of-an-operator", None
        page.keyboard.type("of-an-operator")
        page.keyboard.press("Enter")
        expect(page.locator("#name")).to_have_text("camera-1")


def test_a_token_is_asked_for_and_kept_in_this_tab_only(browser: Any) -> None:
    world = cameras(1)
    world.token = "the-right-token"
    with opened(browser, world, ready="#token-form") as page:
        expect(page.get_by_label("This server asks for a token")).to_be_focused()
        assert page.locator("#live").is_hidden()
        for tried in ("a-wrong-one", "the-right-token"):
            page.keyboard.type(tried)
            page.keyboard.press("Enter")
            if tried == "a-wrong-one":
                expect(page.locator("#token-refused")).to_have_text("— the last one was refused")
                expect(page.locator("#token")).to_be_focused()
                assert page.locator("#token").input_value() == ""
        expect(page.locator("#name")).to_have_text("camera-1")
        expect(page.locator("#before")).to_be_visible()
        assert set(world.tokens) == {None, "Bearer a-wrong-one", "Bearer the-right-token"}
        kept = page.evaluate("[Object.values(sessionStorage), {...localStorage}, document.cookie]")
        assert kept == [["the-right-token"], {}, ""]
        assert "the-right-token" not in page.content()
        page.reload()
        expect(page.locator("#name")).to_have_text("camera-1")
        page.get_by_role("button", name="Forget the token").click()
        soon(page, page.locator("#token-form").is_visible)
        assert page.evaluate("sessionStorage.length") == 0


def test_five_hundred_streams(browser: Any) -> None:
    world = World().add(*(status(f"hall-{n // 50}-camera-{n}") for n in range(500)))
    world.add(shifted("hall-3-camera-150", NOON - 5))
    with opened(browser, world) as page:
        rows = page.locator("#list [role=option]")
        expect(rows).to_have_count(500)
        assert page.locator("#count").inner_text() == "500"
        assert rows.all_inner_texts()[10].startswith("hall-0-camera-10")  # by number, not letter
        assert page.locator("#list [tabindex='0']").count() == 1
        # The list scrolls by itself; the page stays where it is.
        assert page.evaluate("document.documentElement.scrollHeight") < 3000
        # The name is found, and the keyboard walks through what was found.
        page.get_by_label("Find streams by name").fill("-7-CAMERA-39")
        expect(rows).to_have_count(10)
        expect(page.locator("#list-note")).to_have_text("10 of 500 streams")
        page.keyboard.press("ArrowDown")
        expect(page.locator("#name")).to_have_text("hall-7-camera-390")
        for key, name in (("ArrowDown", 391), ("End", 399), ("ArrowUp", 398), ("Home", 390)):
            page.keyboard.press(key)
            expect(page.locator("#name")).to_have_text(f"hall-7-camera-{name}")
            expect(page.locator(f"[id='stream-hall-7-camera-{name}']")).to_be_focused()
        assert page.url.endswith("#hall-7-camera-390")
        before = world.asked.count("/v1/streams")
        soon(page, lambda: world.asked.count("/v1/streams") > before + 3)
        # A new look at all streams does not take the focus away.
        expect(page.locator("[id='stream-hall-7-camera-390']")).to_be_focused()
        assert page.locator("#list [aria-selected=true]").count() == 1
        page.get_by_label("Find streams by name").fill("")
        page.get_by_label("shifted only").check()
        expect(rows).to_have_count(1)
        rows.first.click()
        expect(page.locator("#name")).to_have_text("hall-3-camera-150")


def test_an_alarm_is_seen_however_many_streams_there_are(browser: Any) -> None:
    world = World().add(*(status(f"camera-{n:04}") for n in range(1600)))
    world.add(shifted("camera-1555", NOON - 5), shifted("camera-0007", NOON - 60))
    with opened(browser, world) as page:
        rows, alarms = page.locator("#list [role=option]"), page.locator("#alarms li")
        expect(alarms).to_have_count(2)
        expect(alarms.first).to_contain_text("camera-1555")
        expect(rows).to_have_count(1001)
        note = "Of 1,600 streams, the first ones and those with an alarm are watched here: 1,001."
        expect(page.locator("#list-note")).to_have_text(note)
        expect(page.locator("#name")).to_have_text("camera-1555")
        page.locator("[id='stream-camera-0007']").click()
        expect(page.locator("#name")).to_have_text("camera-0007")
        # Its alarm ends, and nobody looks at it: it stays among the alarms that are over.
        world.add(status("camera-1555"))
        soon(page, lambda: rows.count() == 1000)
        expect(alarms).to_have_count(2)
        expect(alarms.first).to_contain_text("over at")
        # The one that is looked at stays, whether it has an alarm or not.
        world.add(shifted("camera-1444", NOON + 30))
        soon(page, lambda: rows.count() == 1001)
        page.locator("[id='stream-camera-1444']").click()
        expect(page.locator("#name")).to_have_text("camera-1444")
        world.add(status("camera-1444"))
        soon(page, lambda: "over at" in alarms.first.inner_text())
        expect(page.locator("#name")).to_have_text("camera-1444")
        expect(rows).to_have_count(1001)


def test_a_damaged_stream_is_named_and_hides_no_other(browser: Any) -> None:
    world = World().add(*(status(f"camera-{n:04}") for n in range(600)))
    world.damaged = {f"camera-{n:04}" for n in range(6)}
    with opened(browser, world) as page:
        expect(page.locator("#list [role=option]")).to_have_count(594)
        expect(page.locator("#list-note")).to_have_text(
            "Damaged on the server's disk, and refused until deleted: 6 streams "
            "(camera-0000, camera-0001, camera-0002, camera-0003, camera-0004, …)."
        )
        assert page.locator("#count").inner_text() == "600"


def test_streams_that_come_and_go(browser: Any) -> None:
    world = World()
    with opened(browser, world) as page:
        assert page.locator("#nothing").is_visible()
        assert "ttapca feed http://page.test --data digits" in page.locator("#nothing").inner_text()
        world.add(status("a"), status("b"))
        soon(page, lambda: page.locator("#name").inner_text() == "a")
        assert page.locator("#nothing").is_hidden()
        del world.streams["a"]
        soon(page, lambda: page.locator("#list [role=option]").count() == 1)
        expect(page.locator("#name")).to_have_text("b")


def test_a_stream_of_which_nothing_is_known(browser: Any) -> None:
    nothing = dict.fromkeys(("shifted", "p_value", "shift", "size", "composition", "skew"))
    world = World().add(
        status("new", images=0, bands=[], gains=[], last_seen=None, **nothing),
        status("odd", gains=[None] * 6),
    )
    for band in world.streams["odd"]["health"]["bands"]:
        band["ratio"] = band["p_value"] = None
    world.pictures = {"before": None, "after": None}
    with opened(browser, world, at="#new") as page:
        expect(page.locator("#state")).to_have_text("No image yet")
        assert page.locator("#ratios").is_hidden()
        assert page.locator("#before").is_hidden()
        expect(page.locator("#pictures-note")).to_contain_text("None are kept")
        assert "NaN" not in page.locator("#live").inner_text().replace("with NaN or infinity", "")
        page.locator("#list").get_by_text("odd").click()
        expect(page.locator("#name")).to_have_text("odd")
        expect(page.locator("#bands tr")).to_have_count(6)  # which come after the name
        assert "NaN" not in page.locator("#live").inner_text().replace("with NaN or infinity", "")


def test_small_images_show_their_pixels(browser: Any) -> None:
    world = cameras(1)
    with opened(browser, world) as page:
        for side, drawn in ((8, "pixelated"), (224, "auto")):
            world.pictures = {"before": picture(side), "after": picture(side)}
            for which in ("before", "after"):
                image = page.get_by_alt_text(f"Last image of camera-1, {which} the filter")
                expect(image).to_be_visible()
                style = "each => getComputedStyle(each).imageRendering"
                soon(page, lambda: image.evaluate(style) == drawn)  # noqa: B023
                assert image.bounding_box()["width"] > 100


OUTSIDE = """width => [...document.querySelectorAll('body *')]
    .filter(each => !each.closest('.scroll, pre, .unseen, svg'))
    .filter(each => each.getBoundingClientRect().right > width + 0.5)
    .map(each => each.outerHTML.slice(0, 80))"""
CUT = """() => [...document.querySelectorAll('.chart text')].filter(text => {
    const box = text.getBoundingClientRect();
    const frame = text.closest('svg').getBoundingClientRect();
    return box.left < frame.left - 2 || box.right > frame.right + 2 || box.height < 9;
}).map(text => text.textContent)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(browser: Any, scheme: Any) -> None:
    long = "a" + "very-long-name-" * 6 + "of-100-le"
    world = cameras(3).add(shifted(long, NOON - 9), shifted("b", NOON - 9e5))
    world.streams[long]["health"]["composition"] = [0.5, 0.5] + [0.0] * 998
    with opened(browser, world, color_scheme=scheme) as page:
        page.get_by_text("Bands as a table").click()
        expect(page.locator("#bands tr")).to_have_count(6)
        page.evaluate("document.getElementById('token-form').hidden = false")
        for width in (390, 800, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            # Once it has drawn itself again.
            soon(
                page,
                lambda: (
                    page.evaluate(CUT) == []
                    and page.evaluate("document.documentElement.scrollWidth") <= width  # noqa: B023
                    and page.evaluate(OUTSIDE, width) == []  # noqa: B023
                ),
            )
            beside = page.locator("#details").bounding_box()["x"] > 200
            assert beside == (width > 832)  # on a phone, details lie under the list


COLOURS = """() => {
    const of = (query, what) => getComputedStyle(document.querySelector(query))[what];
    return {
        paper: of('body', 'backgroundColor'), raised: of('.alarms li', 'backgroundColor'),
        text: ['body', '.note', '.kicker', '.state', '.state.shifted', '#reset', '.check', 'dt',
            'figcaption', '#alarms a', '#alarms time', '#alarms span', '.row-mode', 'summary']
            .map(query => document.querySelector(query) ? of(query, 'color') : of('body', 'color')),
        chosen: [of('fieldset input:checked + span', 'color'),
            of('fieldset input:checked + span', 'backgroundColor')],
        labels: [of('.chart text', 'fill')],
        marks: ['#ratios rect.sure', '#gains rect', '#history .line', '#history .marks rect']
            .map(query => document.querySelector(query)).filter(Boolean)
            .map(each => getComputedStyle(each))
            .map(each => each.fill == 'none' ? each.stroke : each.fill),
    };
}"""


def test_light_and_dark_can_both_be_read(browser: Any) -> None:
    world = cameras(2).add(shifted("door", NOON - 65))
    found = {}
    with opened(browser, world) as page:
        soon(page, lambda: page.locator("#history .line").get_attribute("d") != "")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            # Colours have arrived.
            soon(page, lambda: page.evaluate("document.getAnimations().length") < 2)
            found[scheme] = page.evaluate(COLOURS)
    assert luminance(found["dark"]["paper"]) < 0.05 < 0.8 < luminance(found["light"]["paper"])
    for colours in found.values():
        for ground in (colours["paper"], colours["raised"]):
            for colour in (*colours["text"], *colours["labels"]):
                assert contrast(colour, ground) >= 4.5
        assert contrast(*colours["chosen"]) >= 4.5
        for colour in colours["marks"]:
            assert contrast(colour, colours["paper"]) >= 3  # WCAG, for graphics


def test_nothing_moves_for_those_who_do_not_like_it(browser: Any) -> None:
    with opened(browser, cameras(1)) as page:
        moving = "document.getAnimations().length"
        soon(page, lambda: page.evaluate(moving) > 0)
        page.emulate_media(reduced_motion="reduce")
        soon(page, lambda: page.evaluate(moving) == 0)


def test_everything_that_can_be_used_has_a_name(browser: Any) -> None:
    with opened(browser, cameras(2)) as page:
        expect(page.locator("#bands tr")).to_have_count(6)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, a, [role], img:not([hidden])')]
                .filter(each => each.checkVisibility() && !each.closest('[aria-hidden=true]'))
                .filter(each => !(each.ariaLabel || each.innerText?.trim() || each.alt
                    || each.labels?.length || each.getAttribute('aria-labelledby')))
                .map(each => each.outerHTML.slice(0, 80))"""
        )
        assert nameless == ['<p id="message" class="message" role="status"></p>']
        reached = []
        for _ in range(9):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.id || document.activeElement.value")
            )
        assert reached[:6] == ["find", "only-shifted", "stream-camera-1", "on", "reset", None]


def test_the_shift_is_remembered_and_drawn(browser: Any) -> None:
    world = cameras(1)
    with opened(browser, world) as page:
        facts = page.locator("#facts")
        for shift in (0.2, 0.4, 0.6):
            world.add(status("camera-1", shift=shift))
            soon(page, lambda: f"{shift:.2f}" in facts.inner_text())  # noqa: B023
        world.add(shifted("camera-1", NOON))
        soon(page, lambda: page.locator("#history .marks rect").count() == 1)
        drawn = page.locator("#history .line").get_attribute("d").removeprefix("M").split("L")
        points = [tuple(map(float, each.split(","))) for each in drawn]
        across, down = zip(*points, strict=True)
        assert list(across) == sorted(across)
        assert list(down) == sorted(down, reverse=True)  # the shift has grown
        words = page.locator("#history svg").get_attribute("aria-label")
        assert words.startswith("Shift over the last 1 min: now 0.97")


def test_how_often_both_networks_are_wrong(browser: Any) -> None:
    estimate = {"share": 0.141, "low": 0.1, "high": 0.194}
    other = {"share": 0.31, "low": 0.25, "high": 0.38}
    world = cameras(2).add(status("camera-1", expected_error=estimate))
    with opened(browser, world) as page:
        rows, note = page.locator("#errors li"), page.locator("#errors-note")
        expect(rows).to_have_text(["adapted network14 % (10 % to 19 %)"])
        expect(note).to_contain_text("In the modes shadow and auto, the untouched network")
        changes = {"expected_error": estimate, "expected_error_untouched": other, "mode": "shadow"}
        world.add(status("camera-1", **changes))
        soon(page, lambda: rows.count() == 2)
        expect(rows.nth(1)).to_have_text("untouched network31 % (25 % to 38 %)")
        expect(note).to_contain_text("from 0 to 40 %.")
        interval, estimated = (
            rows.nth(1).locator(f".{each}").bounding_box() for each in ("interval", "estimate")
        )
        whole = rows.nth(1).locator("svg").bounding_box()
        assert interval["x"] - whole["x"] == pytest.approx(whole["width"] * 25 / 40, abs=2)
        assert interval["width"] == pytest.approx(whole["width"] * 13 / 40, abs=2)
        assert estimated["x"] - whole["x"] == pytest.approx(whole["width"] * 31 / 40, abs=2)
        assert page.locator("#answering").inner_text() == ""
        page.locator("#list [role=option]").nth(1).click()  # a filter that knows no labels
        expect(page.locator("#name")).to_have_text("camera-2")
        expect(rows).to_have_count(0)
        assert page.locator("#errors").is_hidden()


def test_which_network_answers_a_stream_in_auto(browser: Any) -> None:
    world = cameras(1).add(status("camera-1", mode="auto", adapting=False))
    with opened(browser, world) as page:
        answering, note = page.locator("#answering"), page.locator("#gains-note")
        assert page.locator("input[value=auto]").is_checked()
        expect(answering).to_have_text(
            "The untouched network answers: no gain is sure yet. 0 switches so far."
        )
        expect(note).to_contain_text("would let through")
        world.add(status("camera-1", mode="auto", adapting=True, switches=1))
        soon(page, lambda: "is expected to be less often wrong" in answering.inner_text())
        assert "1 switch so far" in answering.inner_text()
        expect(note).to_contain_text("filter lets through")
        world.add(status("camera-1", mode="auto", adapting=False, switches=2, harmful=True))
        soon(page, lambda: "may be harm. 2 switches so far." in answering.inner_text())
