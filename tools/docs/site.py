"""MkDocs' hook: the navigation, pages for files outside docs/, and llms.txt.

Pages link to READMEs and sources as they lie in the repository. The site has a page for each of
these, so that no link leaves it. A page of docs/ that no pattern names lands under its section's
last pattern, so that a new page needs no change here.
"""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # a hook is loaded as a file, not as a module of its package

from tools.docs.links import links, mapped, target_of  # noqa: E402
from tools.docs.navigation import SECTIONS, section_of, title_of  # noqa: E402

DOCS = ROOT / "docs"


def _uri(path: Path) -> str:
    """Where a file of the repository is on the site, by its path."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def _outside() -> list[Path]:
    """Files outside docs/ that pages link to, directly or by way of each other."""
    found = [ROOT / "README.md"]
    queue = [*sorted(DOCS.rglob("*.md")), *found]
    while queue:
        page = queue.pop()
        for link in links(page.read_text()):
            target = _file(target_of(page, link))
            if target is None or target.is_relative_to(DOCS) or target in found:
                continue
            found.append(target)
            if target.suffix == ".md":
                queue.append(target)
    return found


def _file(target: Path) -> Path | None:
    """The file that stands for a target; a folder's README stands for it."""
    if target.is_dir():
        target /= "README.md"
    return target if target.exists() else None


def _content(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    language = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}.get(path.suffix)
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n~~~~{language or 'text'}\n{path.read_text()}\n~~~~\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, from the files that are there."""
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    nav: list[Any] = [{"Home": "index.md"}]
    for section, patterns in SECTIONS.items():
        mine = [page for page in pages if section_of(page) == section]
        mine.sort(key=lambda page: next(i for i, p in enumerate(patterns) if fnmatchcase(page, p)))
        nav.append({section: [{title_of((DOCS / page).read_text()): page} for page in mine]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in _outside():
        files.append(File.generated(config, _uri(path), content=_content(path)))
    for file in files:
        if file.src_uri.startswith("repository/"):
            file.inclusion = type(file.inclusion).NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them."""
    path = _path(page.file.src_uri)
    here = os.path.dirname(page.file.src_uri)

    def change(link: str) -> str:
        name, mark, anchor = link.partition("#")
        if not name or ":" in name:
            return link
        target = _file(Path(os.path.normpath(path.parent / name)))
        if target is None:
            return link  # MkDocs reports it
        return os.path.relpath(_uri(target), here or ".") + mark + anchor

    return mapped(markdown, change)


def _path(uri: str) -> Path:
    if uri == "index.md":
        return ROOT / "README.md"
    if not uri.startswith("repository/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix("repository/")
    return path if path.exists() else path.with_suffix("")


def on_post_build(config: MkDocsConfig) -> None:
    from tools.docs.llms import full_text, index

    site = Path(config.site_dir)
    (site / "llms.txt").write_text(index())
    (site / "llms-full.txt").write_text(full_text())
