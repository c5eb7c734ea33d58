"""The page in a real browser: what it shows is what the simulator says, and it does what hands expect."""

import re

import pytest

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.placement import line
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view.figures import figure
from gapless.view.legend import describe
from gapless.view.summary import COLUMNS
from tests.view.conftest import EVIL, NAMES, Opener, Shown, timeline_of

pytestmark = pytest.mark.browser


def middle(timeline: Timeline, text: str) -> tuple[int, float]:
    """The device and the middle of an action, by its name."""
    for device in range(timeline.schedule.num_devices):
        for action, start, end in timeline.spans(device):
            if str(action) == text:
                return device, float(start + end) / 2
    raise AssertionError(text)


def details(shown: Shown) -> str:
    return re.sub(r"\s+", " ", shown.text("#details"))


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_every_action_of_eight_schedules_is_where_the_simulator_put_it(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    asked = [
        [number, device, float(start + end) / 2]
        for number, timeline in enumerate(eight)
        for device in range(4)
        for _, start, end in timeline.spans(device)
    ]
    answers = iter(shown.ask("all => all.map(one => gapless.actionAt(...one))", asked))
    for timeline in eight:
        schedule = timeline.schedule
        giver = {gift: action for row in schedule.rows for action in row for gift in completes(action)}
        for device in range(4):
            for action, start, end in timeline.spans(device):
                found = next(answers)
                assert f"{found['action']}: {found['words']}" == describe(action)
                assert (found["device"], found["start"], found["end"]) == (f"device {device}", float(start), float(end))
                needs = [str(giver[need]) for need in dependencies(action, schedule)]
                assert found["needs"] == needs
    assert shown.ask("gapless.actionAt(0, 3, 0.5)") is None


def test_what_needs_an_action_is_the_same_links_the_other_way_round(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight[:2])
    found = shown.ask("gapless.actionAt(1, 1, 1.5)")
    assert (found["action"], found["needs"], found["neededBy"]) == ("1F0", ["0F0"], ["1B0", "2F0"])


def test_the_table_shows_the_numbers_of_the_simulator(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    rows = shown.ask(
        """[...document.querySelectorAll("#summary tbody tr")].map(row =>
            [...row.cells].map(cell => cell.querySelector("a, span").textContent))"""
    )
    for timeline, row in zip(eight, rows, strict=True):
        values = [column.shown(column.value(timeline)) for column in COLUMNS]
        assert row == [timeline.name, *values]
    best = min(range(8), key=lambda number: eight[number].makespan)
    assert "best" in str(shown.page.locator("#summary tbody tr").nth(best).locator("td").first.get_attribute("class"))


def test_hovering_tells_about_the_action_in_words_and_draws_its_links(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(1)
    device, time = middle(eight[1], "1B0")
    assert shown.pixels(1, 1, "--needs") == shown.pixels(1, 1, "--needed") == 0
    shown.hover(1, device, time)
    (_, start, end), before = next(
        (span, eight[1].spans(1)[place - 1]) for place, span in enumerate(eight[1].spans(1)) if str(span[0]) == "1B0"
    )
    giver_end = next(end for action, _, end in eight[1].spans(2) if str(action) == "2B0")
    assert details(shown).strip() == (
        "1B0: stage 1, backward, microbatch 0 × "
        f"device 1 {figure(start)} to {figure(end)}, takes {figure(end - start)} "
        f"waited {figure(start - before[2])}, from {figure(before[2])} to {figure(start)}, "
        f"for 2B0, which ended at {figure(giver_end)} on device 2 "
        "holds 3 while it runs, 2 after needs 1F0 2B0 needed by 0B0"
    ).replace(" × ", " ")
    assert shown.pixels(1, 1, "--needs") > 50
    assert shown.pixels(1, 1, "--needed") > 50
    shown.page.mouse.move(5, 5)
    shown.settle()
    assert not shown.page.is_visible("#details")


def test_hovering_over_idle_time_tells_what_the_device_waits_for(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(0)
    _, first_backward = middle(eight[0], "0B0")
    shown.hover(0, 0, first_backward - 3)
    assert details(shown).startswith("idle device 0 8 to ")
    assert details(shown).endswith("until it can run 0B0, which needs 1B0 from device 1")
    shown.hover(0, 3, float(eight[0].makespan) - 0.1)
    assert details(shown).endswith("nothing left to do: the others have not ended yet")


def test_a_click_pins_and_follows_the_microbatch_until_escape(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(1)
    device, time = middle(eight[1], "1B2")
    shown.page.mouse.click(*shown.place(1, device, time))
    assert shown.ask("gapless.pinned()") == "1B2"
    shown.hover(1, 0, 0.5)
    assert details(shown).startswith("1B2: stage 1, backward, microbatch 2")
    shown.page.click("#d-needs button:text-is('1F2')")
    assert shown.ask("gapless.pinned()") == "1F2"
    shown.press("Escape")
    assert shown.ask("gapless.pinned()") is None
    assert not shown.page.is_visible("#details")


def test_shift_and_arrows_walk_from_action_to_action(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.page.focus("#timeline-1 .plot")
    walked = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"):
        shown.press(f"Shift+{key}")
        walked.append(shown.ask("gapless.pinned()"))
    assert walked == ["0F0", "0F1", "1F0", "1F1", "0F2", "0F1"]


def test_memory_curves_show_a_limit_where_one_is_given(show: Opener, eight: list[Timeline]) -> None:
    without, with_limit = show(eight[:1]), show(eight[:1], memory_limit=9)
    for shown in (without, with_limit):
        shown.scroll_to(0)
    assert without.pixels(0, 0, "--limit") == 0
    assert with_limit.pixels(0, 0, "--limit") > 500


def test_actions_that_take_no_time_can_be_found(show: Opener) -> None:
    timeline = timeline_of("2bw", costs=Costs())  # updates are free
    shown = show([timeline])
    update = next(span for span in timeline.spans(1) if span[0].kind is Kind.UPDATE)
    found = shown.ask("time => gapless.actionAt(0, 1, time)", float(update[1]))
    assert (found["action"], found["words"]) == ("1U0", "stage 1, update, minibatch 0, makes version 1 of the weights")
    assert found["needs"] == [f"1B{m}" for m in range(8)]
    forward = timeline.schedule.rows[1].index(Action(1, Kind.FORWARD, 17))  # of minibatch 2, and always one behind
    found = shown.ask("time => gapless.actionAt(0, 1, time)", float(timeline.starts[1][forward]) + 0.5)
    assert (found["action"], found["words"]) == ("1F17", "stage 1, forward, microbatch 17, weights of version 1")


# -- moving about -----------------------------------------------------------------------------------------------------


def test_the_wheel_zooms_with_ctrl_around_the_pointer_and_scrolls_without(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(2)
    shown.hover(2, 1, 7.0)
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -300)
    shown.page.keyboard.up("Control")
    shown.settle()
    start, end = shown.view()
    total = max(float(timeline.makespan) for timeline in eight)
    assert end - start == pytest.approx(total * 2.718281828 ** (-0.6))
    assert (7.0 - start) / (end - start) == pytest.approx(7.0 / total, abs=0.002)
    before = shown.ask("scrollY")
    shown.page.mouse.wheel(0, 200)
    shown.page.wait_for_function("before => scrollY > before", arg=before)
    assert shown.view() == (start, end)


def test_the_wheel_on_the_axis_zooms_and_sideways_pans(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(0)
    box = shown.page.locator("#axis").bounding_box()
    assert box is not None
    shown.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    shown.page.mouse.wheel(0, -400)
    shown.settle()
    start, end = shown.view()
    assert end - start < 0.6 * float(eight[0].makespan)
    shown.hover(0, 0, (start + end) / 2)
    shown.page.mouse.wheel(120, 0)
    shown.settle()
    assert shown.view()[0] > start


def test_keys_and_buttons_zoom_pan_and_reset(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    whole = shown.view()
    assert whole == (0, max(float(timeline.makespan) for timeline in eight))
    shown.press("+", "+")
    start, end = shown.view()
    assert end - start == pytest.approx((whole[1] - whole[0]) / 2.25)
    shown.press("ArrowRight")
    assert shown.view()[0] == pytest.approx(start + 0.15 * (end - start))
    shown.press("ArrowLeft", "-", "-", "-")
    assert shown.view() == pytest.approx(whole)
    shown.page.click("#zoom-in")
    shown.page.click("#zoom-in")
    shown.page.click("#zoom-out")
    assert shown.view()[1] - shown.view()[0] == pytest.approx(whole[1] / 1.5)
    shown.page.click("#reset")
    assert shown.view() == pytest.approx(whole)


def test_dragging_pans_and_what_is_shown_stays_right(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(4)
    shown.press("+", "+", "+", "+")
    start, end = shown.view()
    held = (start + end) / 2
    x, y = shown.place(4, 2, held)
    shown.page.mouse.move(x, y)
    shown.page.mouse.down()
    shown.page.mouse.move(x - 150, y, steps=5)
    shown.page.mouse.up()
    shown.settle()
    assert shown.view()[0] > start
    assert shown.place(4, 2, held)[0] == pytest.approx(x - 150, abs=1.5)
    assert shown.ask("gapless.pinned()") is None
    action, first, last = next(span for span in eight[4].spans(2) if span[1] >= shown.view()[0])
    shown.hover(4, 2, float(first + last) / 2)
    assert details(shown).startswith(describe(action))


def test_two_fingers_zoom(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(0)
    shown.ask(
        """() => {
            const plot = document.querySelector("#timeline-0 .plot");
            plot.setPointerCapture = () => {}; // these fingers are not real
            const send = (type, pointerId, clientX) => plot.dispatchEvent(new PointerEvent(
                type, {pointerId, clientX, clientY: 200, pointerType: "touch", bubbles: true}));
            send("pointerdown", 1, 500);
            send("pointerdown", 2, 600);
            for (let step = 1; step <= 10; step++) {
                send("pointermove", 1, 500 - 5 * step);
                send("pointermove", 2, 600 + 5 * step);
            }
            send("pointerup", 1, 450); send("pointerup", 2, 650);
        }"""
    )
    start, end = shown.view()
    assert end - start == pytest.approx(float(eight[0].makespan) / 2, rel=0.05)


def test_any_header_sorts_the_table_up_and_down(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)

    def order() -> list[int]:
        found = shown.ask(
            "[...document.querySelectorAll('#summary tbody tr')].map(row => Number(row.dataset.timeline))"
        )
        assert isinstance(found, list)
        return found

    for place, column in enumerate(COLUMNS, 1):
        head = shown.page.locator("#summary thead th").nth(place)
        for sort, sign in (("ascending", 1), ("descending", -1)):
            head.locator("button").click()
            assert head.get_attribute("aria-sort") == sort
            values = [sign * float(column.value(eight[number])) for number in order()]
            assert values == sorted(values)
    shown.page.click("#summary thead th:first-child button")
    assert [NAMES[number] for number in order()] == sorted(NAMES, key=lambda name: (not name[0].isdigit(), name))
    assert shown.page.locator('#summary th[aria-sort="none"]').count() == len(COLUMNS)
    shown.page.locator("#summary thead th").nth(1).locator("button").press("Enter")
    assert shown.page.locator("#summary thead th").nth(1).get_attribute("aria-sort") == "ascending"


def test_what_is_compared_has_its_table_first(show: Opener, eight: list[Timeline]) -> None:
    for timelines, first in ((eight, True), (eight[:1], False)):
        shown = show(timelines)
        order = "document.getElementById('table').compareDocumentPosition(document.getElementById('sections')) & 4"
        assert bool(shown.ask(order)) == first


def test_clicking_a_row_of_the_table_goes_to_its_timeline(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.page.click("#summary tbody tr:nth-child(6) td:nth-child(4)")
    shown.settle()
    top = shown.ask("document.getElementById('timeline-5').getBoundingClientRect().top")
    assert 0 <= top < 120
    assert shown.ask("document.activeElement.closest('section').id") == "timeline-5"


def test_the_theme_follows_the_system_and_the_button(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight[:2])

    def background() -> int:
        found = shown.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        return sum(map(int, found))

    assert background() > 700
    assert shown.text("#theme") == "Dark"
    shown.page.click("#theme")
    assert background() < 60
    assert shown.text("#theme") == "Light"
    shown.page.click("#theme")
    assert background() > 700
    fresh = show(eight[:2])
    fresh.page.emulate_media(color_scheme="dark")
    fresh.settle()
    assert fresh.text("#theme") == "Light"


@pytest.mark.parametrize("width", [400, 900, 2500])
def test_the_page_fits_any_width_and_nothing_jumps(show: Opener, eight: list[Timeline], width: int) -> None:
    shown = show([*eight, timeline_of("gpipe", label="a name much longer than any screen is wide " * 9)], width=width)
    assert shown.ask("document.documentElement.scrollWidth <= innerWidth")
    assert shown.ask(
        "[...document.querySelectorAll('canvas')].every(c => c.getBoundingClientRect().right <= innerWidth)"
    )
    # From when all of it has arrived: rows that come later than others widen their column, on a slow machine.
    shift = """new Promise(done => {
        const whole = performance.getEntriesByType("navigation")[0].domInteractive;
        new PerformanceObserver(list => done(list.getEntries().filter(entry => entry.startTime >= whole)
            .reduce((sum, entry) => sum + entry.value, 0))).observe({type: "layout-shift", buffered: true});
        setTimeout(() => done(0), 200);
    })"""
    assert shown.ask(shift) < 0.01


# -- trust ------------------------------------------------------------------------------------------------------------


def test_an_evil_name_does_nothing(show: Opener) -> None:
    evil = [timeline_of("gpipe", label=EVIL), timeline_of("zb-v", label=EVIL[::-1])]
    shown = show(evil, title=EVIL)
    shown.scroll_to(0)
    shown.hover(0, 0, 0.5)
    shown.page.mouse.click(*shown.place(0, 0, 0.5))
    shown.page.click("#summary thead th:first-child button")
    shown.settle()
    assert shown.ask("document.images.length + document.querySelectorAll('[onerror], [onload]').length") == 0
    assert shown.ask("document.querySelectorAll('svg').length") == 1  # the theme button's own
    assert shown.ask("document.getElementById('name-0').textContent") == EVIL
    assert shown.ask("document.title.replace(/\\s+/g, ' ')") == re.sub(r"\s+", " ", EVIL)


def test_the_policy_stops_what_gets_in_all_the_same(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight[:1])
    failures: list[str] = []
    shown.page.on("requestfailed", lambda request: failures.append(str(request.failure)))
    shown.ask("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
    assert shown.ask("{ try { document.body.innerHTML = '<b>'; 'set' } catch (error) { error.name } }") == "TypeError"
    shown.page.wait_for_function("violations.length >= 2")
    assert {str(found).split("-")[0] for found in shown.ask("violations.splice(0)")} == {"img", "require"}
    assert shown.requests.pop() == "https://example.invalid/x.png"  # as the browser tells it, which stopped it
    assert failures == ["csp"]
    shown.complaints.clear()


# -- a million actions ------------------------------------------------------------------------------------------------


def gpipe_timeline(devices: int, microbatches: int) -> Timeline:
    """gpipe in closed form, much quicker than by simulation."""
    K, M = devices, microbatches
    rows = [[Action(s, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(M)] for s in range(K)]
    starts = [[s + m for m in range(M)] + [M + K - 1 + 2 * (K - 1 - s) + 2 * m for m in range(M)] for s in range(K)]
    ends = [[start + (1 if place < M else 2) for place, start in enumerate(row)] for row in starts]
    schedule = Schedule.of(rows, line(K), "gpipe")
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


@pytest.mark.parametrize("microbatches", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_page_with_up_to_a_million_actions_opens_and_answers(show: Opener, microbatches: int) -> None:
    small = gpipe_timeline(5, 9)
    assert (small.starts, small.ends) == (simulate(small.schedule).starts, simulate(small.schedule).ends)
    timeline = gpipe_timeline(250, microbatches)
    assert timeline.schedule.num_actions == 500 * microbatches
    shown = show([timeline], width=1400, height=900)
    shown.scroll_to(0)
    frames: list[float] = []

    def check() -> None:
        stats = shown.ask("gapless.stats()")
        assert stats["blocks"] <= 4000
        assert stats["pixels"] <= 250 * 1400
        assert 0 < stats["rows"] <= 250
        frames.append(stats["ms"])

    for key in [*["+", "ArrowRight"] * 10, *["-", "ArrowLeft"] * 5, "0"]:
        shown.press(key)
        check()
    shown.hover(0, 40, 140.5)
    assert details(shown).startswith("40F100: stage 40, forward, microbatch 100 device 40 140 to 141, takes 1")
    start = microbatches + 249 + 2 * 99
    found = shown.ask("time => gapless.actionAt(0, 249, time)", start + 0.5)
    assert (found["action"], found["start"], found["needs"]) == ("249B99", start, ["249F99"])
    shown.page.select_option("#density", "comfortable")
    shown.settle()
    check()
    median = sorted(frames)[len(frames) // 2]
    print(f"\nframes of {500 * microbatches:,} actions: median {median:.1f} ms, worst {max(frames):.1f} ms")
