"""The docs site builds strictly, with every page, a search index and llms.txt."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import PATIENCE_S
from tools.docs.llms import index, summary
from tools.docs.navigation import SECTIONS, section_of, title_of

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site is built where the extra `docs` is installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_d02_the_site_has_every_page(site: Path) -> None:
    """D02: the build is strict, so that a dead link or a page outside the navigation fails it."""
    for path in DOCS.rglob("*.md"):
        page = path.relative_to(DOCS).with_suffix("")
        assert (site / page / "index.html").exists(), page
    assert "manyroots is an LLM serving engine" in (site / "index.html").read_text()
    assert (site / "repository/manyroots/cache/index.html").exists()


def test_the_site_needs_no_other_host_for_its_text(site: Path) -> None:
    page = (site / "concepts" / "index.html").read_text()
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?://[^"]*)"', page)
    assert [url for url in loaded if "canonical" not in url] == []


def test_the_search_finds_words_of_the_pages(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    texts = [entry["text"] for entry in found if entry["location"].startswith("concepts/")]
    assert any("junction" in text for text in texts)


def test_llms_txt_lists_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text == index()
    for path in DOCS.rglob("*.md"):
        assert f"]({path.relative_to(DOCS).as_posix()}): " in text
    full = (site / "llms-full.txt").read_text()
    assert all(path.read_text().strip() in full for path in DOCS.rglob("*.md"))


def test_a_new_page_has_a_section() -> None:
    assert section_of("replicas.md") == "How-to guides"
    assert section_of("how-to/redis.md") == "How-to guides"
    assert section_of("tutorials/another.md") == "Tutorials"
    assert section_of("notes/speculation.md") == "Engineering notes"
    assert section_of("concepts.md") == "Concepts"
    assert {section_of(p.relative_to(DOCS).as_posix()) for p in DOCS.rglob("*.md")} <= set(SECTIONS)


def test_a_page_has_a_title_and_a_first_sentence() -> None:
    for path in DOCS.rglob("*.md"):
        text = path.read_text()
        assert 0 < len(title_of(text)) <= 40, path
        assert summary(text), path
