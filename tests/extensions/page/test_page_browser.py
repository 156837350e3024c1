"""The page in a real browser: on a wide and a narrow screen, in light and dark, by keyboard and by mouse."""

import pytest

from posttrain.extensions.page.build import render
from posttrain.extensions.page.run import read_runs
from tests.extensions.page.browser import CHROMIUM, browser
from tests.extensions.page.page_runs import dpo_record, grpo_record

pytest.importorskip("websockets")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser, and a page of two GRPO runs and one of DPO."""
    folder = tmp_path_factory.mktemp("browser")
    runs = read_runs(
        [grpo_record(folder / "sick"), grpo_record(folder / "sound", sick=False), dpo_record(folder / "dpo")]
    )
    file = folder / "page.html"
    file.write_text(render(runs), encoding="utf-8")
    with browser(folder) as opened:
        opened.url = file.as_uri()
        yield opened


def fresh(page, **how):
    page.console.clear()
    page.open(page.url, **how)
    page.run("localStorage.clear()")
    page.open(page.url, **how)
    page.wait("document.querySelectorAll('.canvas > svg').length > 0")
    page.run("window.scrollTo({top: 0, behavior: 'instant'})")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen_and_text_can_be_read(page, width, dark):
    fresh(page, width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = page.run(
        f"[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg, .canvas, pre, .tokens') && "
        f"e.getBoundingClientRect().right > {width} + 1 && e.offsetParent !== null).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    # WCAG contrast of every piece of text against what stands behind it: at least 4.5, or 3 where it is large.
    weak = page.run(CONTRAST)
    assert weak == [], weak[:10]
    assert page.console == []


CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = (front, back) => { const a = front[3] ?? 1; return [0, 1, 2].map(i => front[i] * a + back[i] * (1 - a)); };
  const light = (c) => { const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { const chain = []; for (let n = e; n; n = n.parentElement) chain.unshift(parse(getComputedStyle(n).backgroundColor));
    return chain.reduce((back, front) => (front.length === 4 && front[3] === 0 ? back : over(front, back)), [255, 255, 255]); };
  const weak = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg, script, style, noscript, .skip') || !e.checkVisibility()) continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), back = behind(e), front = over(parse(style.color), back);
    const [x, y] = [light(front), light(back)].sort((a, b) => b - a), ratio = (x + 0.05) / (y + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && +style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) weak.push(`${ratio.toFixed(2)} ${e.tagName} ${e.className}: ${e.textContent.trim().slice(0, 40)}`);
  }
  return [...new Set(weak)];
})()"""


def focused(page):
    return page.run(
        "(() => { const e = document.activeElement; return [e.tagName, e.id || e.getAttribute('href') || e.textContent.trim().slice(0, 30)]; })()"
    )


def test_tab_reaches_every_control_in_order_and_each_shows_that_it_has_the_focus(page):
    fresh(page)
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    wanted = page.run(
        "[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility()).length"
    )
    seen = []
    for _ in range(wanted + 5):
        page.key("Tab")
        place = focused(page)
        if place[0] == "BODY":
            break
        seen.append(place)
        ring = page.run(
            "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth"
        )
        assert not ring.startswith("none") and not ring.endswith("0px"), place
        inside = page.run(
            "(() => { const e = document.activeElement, b = e.getBoundingClientRect(); "
            "if (e.closest('nav')) return true; const at = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2); "
            "return !at || !at.closest('nav'); })()"
        )
        assert inside, f"{place} has the focus below the navigation"
    assert seen[0] == ["A", "#curves"]
    assert ["BUTTON", "theme"] in seen and ["INPUT", "smooth"] in seen and ["SELECT", "axis"] in seen
    assert len(seen) >= wanted - 1
    page.key("Tab", shift=True)
    assert focused(page)[0] != "BODY"


def test_the_skip_link_and_the_navigation_work_by_enter(page):
    fresh(page)
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.key("Tab")
    page.key("Enter")
    page.wait("location.hash === '#curves'")
    page.wait("Math.abs(document.querySelector('#curves').getBoundingClientRect().top) < 120")


def test_sliders_boxes_and_menus_are_used_by_arrows_space_and_enter(page):
    fresh(page)
    lines_now = "document.querySelector('#curves .canvas > svg').querySelectorAll('.line').length"
    page.run("document.querySelector('#smooth').focus()")
    lines = page.run(lines_now)
    for _ in range(3):
        page.key("ArrowRight")
    assert page.run("document.querySelector('#smooth').value") == "0.15"
    page.wait(f"{lines_now} > {lines}")  # The raw curve stays, pale, beside the smooth one.
    page.key("Home")
    page.wait(f"{lines_now} === {lines}")
    page.run("document.querySelector('#log').focus()")
    page.key(" ")
    page.wait("document.querySelector('.canvas > svg[data-log=true]') !== null")
    page.run("document.querySelector('#axis').focus()")
    page.key("ArrowDown")
    page.wait("document.querySelector('#axis').value === 'minutes'")
    page.wait("document.querySelector('.canvas > svg').textContent.includes(' min')")
    page.run("document.querySelector('#marks').focus()")
    page.key(" ")
    page.wait("document.querySelectorAll('.canvas .shade, .canvas .mark').length === 0")
    page.run("document.querySelector('.timeline input').focus()")
    before = page.run("document.querySelector('.timeline output').textContent")
    page.key("ArrowLeft")
    page.wait(f"document.querySelector('.timeline output').textContent !== {before!r}")
    assert page.run("document.querySelectorAll('.timeline')[0].querySelectorAll('.moment:not([hidden])').length") == 1
    page.run("document.querySelector('details summary').focus()")
    opened = page.run("document.querySelector('details').open")
    page.key("Enter")
    page.wait(f"document.querySelector('details').open === {str(not opened).lower()}")
    assert page.console == []


def test_a_run_that_is_unticked_leaves_every_panel_and_zooming_is_shared(page):
    fresh(page)
    traces = "document.querySelector('#curves .canvas > svg').querySelectorAll('.line').length"
    lines = page.run(traces)
    page.click("#runs input")
    page.wait(f"{traces} < {lines}")
    page.click("#runs input")
    page.wait(f"{traces} === {lines}")
    shown = "[...document.querySelectorAll('.canvas > svg')].map(e => e.dataset.range.split(',').map(x => Math.round(x)).join())"
    whole = page.run(f"{shown}[0]")
    page.drag("#curves .canvas > svg", 0.3, 0.6)
    page.wait(f"new Set({shown}).size === 1 && {shown}[0] !== '{whole}'")
    first, last = map(int, page.run(f"{shown}[0]").split(","))
    assert 5 < first < last < 30
    page.click("#reset")
    page.wait(f"{shown}[0] === '{whole}'")
    assert page.console == []


def test_the_button_turns_light_and_dark_and_the_curves_follow(page):
    fresh(page)
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('#curves .line')).stroke]"
    light = page.run(colours)
    page.click("#theme")
    page.wait("document.documentElement.dataset.theme === 'dark'")
    dark = page.run(colours)
    assert light[0] != dark[0] and light[1] != dark[1]
    page.open(page.url)
    assert page.run("document.documentElement.dataset.theme") == "dark"  # It is remembered.


@pytest.mark.parametrize("width", [1280, 390])
def test_what_a_finger_or_a_mouse_must_hit_is_large_enough(page, width):
    """WCAG 2.2, 2.5.8: 24 by 24 pixels, links within text aside."""
    fresh(page, width=width)
    small = page.run(
        "[...document.querySelectorAll('button, select, summary, nav a, input[type=checkbox]')].filter(e => e.checkVisibility()).map(e => "
        "[(e.closest('label') || e), e]).map(([b, e]) => [b.getBoundingClientRect(), e]).filter(([b]) => b.width < 24 || b.height < 23.5)"
        ".map(([b, e]) => `${e.tagName} ${e.id} ${b.width}x${b.height}`)"
    )
    assert small == []


def test_the_pointer_shows_the_values_of_its_step_and_the_finding_that_stands_there(page):
    fresh(page)
    kl = "[...document.querySelectorAll('.plot')].find(e => e.textContent.includes('KL to the reference'))"
    page.run(f"{kl}.querySelector('.canvas').id = 'kl'")
    page.hover("#kl > svg", "#kl .mark")
    page.wait("!document.querySelector('#kl .tip').hidden")
    text = page.run("document.querySelector('#kl .tip').textContent")
    assert "step 25" in text and "PT-R004" in text and "sick" in text
    assert page.console == []
