"""Pictures of every view for the docs: `python -m tests.measures.page_screenshots docs/images`.

Starts a server of a tiny model with adapters, lets clients ask it, and photographs its page in a
real Chromium.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.chromium import Tab, chromium
from tests.helpers.page_server import VIEWS, open_page, page_server, show, tiny_model, traffic

WIDTH, HEIGHT = 1200, 760


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="manyroots-page-") as home,
        page_server(tiny_model(Path(home)), with_attack=False) as served,
        traffic(served, 12),
        chromium() as browser,
    ):
        tab = open_page(browser, served, width=WIDTH, height=HEIGHT)
        time.sleep(30)  # the charts fill
        for view in VIEWS:
            show(tab, view)
            _use(tab, view)
            tab.picture(folder / f"page-{view}.png")
        tab.scheme("dark")
        tab.resize(390, 780, is_phone=True)
        show(tab, "overview")
        time.sleep(2)
        tab.picture(folder / "page-phone.png")
        tab.close()


def _use(tab: Tab, view: str) -> None:
    """Do what a visitor of the page would do."""
    time.sleep(3)
    if view == "steps":
        tab.run("document.querySelector('.steps-canvas').focus()")
        for _ in range(12):
            tab.press("ArrowLeft")
        tab.until("document.querySelectorAll('#view tbody tr').length > 0")
    elif view == "cache":
        tab.until("document.querySelector('#view [role=status]').textContent.includes('runs')")
        tab.move(WIDTH * 0.42, HEIGHT * 0.4)
        time.sleep(1)
    elif view == "compare":
        for place in (1, 2):
            tab.run(f"document.querySelectorAll('#view input[type=checkbox]')[{place}].click()")
            time.sleep(0.3)
        tab.run(
            "(() => { document.querySelector('textarea').value = 'Name three colours.';"
            " document.querySelector('#view input[type=number]').value = 24;"
            " document.querySelector('#view button.primary').click(); })()"
        )
        tab.until(
            "document.querySelectorAll('.measured').length === 3 &&"
            " [...document.querySelectorAll('.measured')]"
            ".every((one) => one.textContent.includes('cached'))"
        )
    elif view == "whatif":
        tab.run("document.querySelector('#view button.primary').click()")
        tab.until("document.querySelector('#view table') !== null")
    time.sleep(0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
