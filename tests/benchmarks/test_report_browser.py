"""The report as a reader meets it: opened from the disk in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from tests.benchmarks.browser import browser_page, find_browser
from tests.benchmarks.test_report import NAMES, make_folder

pytestmark = pytest.mark.browser

EVIL = "</script><script>throw 1</script><!--<script><b>"


async def test_every_plot_is_drawn_without_an_error_and_without_a_network(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report.write(file, report.read_sources([make_folder(tmp_path / "sweep", ("a", EVIL))]), title=EVIL)
    async with browser_page() as page:
        await page.open(file.as_uri())
        drawn = await page.value(
            "[...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('svg.main-svg').length > 0])"
        )
        assert drawn == [[name, True] for name in NAMES]
        # Lines, stars, bars: what the figures hold is in the drawing.
        assert await page.value("document.querySelectorAll('#frontier-ttft .trace path.js-line').length") == 2
        assert await page.value("document.querySelectorAll('#cdf-itl .trace path.js-line').length") == 2
        assert await page.value("document.querySelectorAll('#timeline .point path').length") > 8
        assert "goodput@90 = 2/s" in await page.value("document.querySelector('#attainment').textContent")
        assert await page.value("document.querySelectorAll('#winners td.win').length") > 0
        assert await page.value("document.querySelectorAll('#checks td.ok').length") == 1
        assert await page.value("document.querySelector('h1').textContent") == EVIL
        # The first screen holds the verdict.
        assert await page.value("document.querySelector('ul.verdict').getBoundingClientRect().bottom < 700")
        assert page.faults == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


async def test_the_menu_shows_another_load(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report.write(file, report.read_sources([make_folder(tmp_path / "sweep")]))
    async with browser_page() as page:
        await page.open(file.as_uri())
        shown = "document.getElementById('cdf-ttft').data.map(trace => trace.visible)"
        assert await page.value(shown) == [False, False, True, True]
        args = "document.getElementById('cdf-ttft').layout.updatemenus[0].buttons[0].args[0]"
        await page.value(f"Plotly.restyle('cdf-ttft', {args}).then(() => 1)")
        assert await page.value(shown) == [True, True, False, False]
        assert page.faults == []


def test_a_missing_browser_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    with pytest.raises(AssertionError, match="apt-get install chromium"):
        find_browser()
