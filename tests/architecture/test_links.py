"""Every link from a page of the repository to a file or a heading of it works."""

from __future__ import annotations

from pathlib import Path

from tools.docs.links import ROOT, anchors, dead_links, links, markdown_files


def test_d02_no_page_has_a_dead_link() -> None:
    """D02."""
    pages = markdown_files()
    assert len(pages) > 50
    assert sum(len(list(links(page.read_text()))) for page in pages) > 150
    assert [fault for page in pages for fault in dead_links(page)] == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two` (three)\n\n## Same\n\n## Same\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n[a](other.md) [b](gone.md) ![c](gone.png)\n[d](#page) [e](#gone)\n"
        "[f](other.md#one-two-three) [g](other.md#gone) [h](other.md#same-1)\n"
        "`[not](one.md)` [web](https://example.com/gone)\n```\n[not](one.md)\n```\n"
    )
    found = [fault.removeprefix(f"{page}:") for fault in dead_links(page)]
    assert [fault.split(":")[0] for fault in found] == ["3", "3", "4", "5"]
    assert "gone.png" in found[1]
    assert found[3].endswith("has no heading #gone")


def test_headings_have_the_anchors_that_repository_pages_give_them() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text()
    assert "what-a-seed-promises" in anchors(text)
