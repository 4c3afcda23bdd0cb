"""Which section of the docs a page belongs to."""

from __future__ import annotations

from fnmatch import fnmatchcase

SECTIONS: dict[str, tuple[str, ...]] = {
    "Tutorials": (
        "tutorials/first-steps.md",
        "tutorials/train-an-adapter.md",
        "tutorials/many-adapters.md",
        "tutorials/rl-loop.md",
        "tutorials/*.md",
    ),
    "How-to guides": (
        "how-to/*.md",
        "adapters.md",
        "operating.md",
        "tools.md",
        "structured-output.md",
        "speculation.md",
        "sampling.md",
        "clients.md",
        "coming-from.md",
        "page.md",
        "simulate.md",
        "conformance.md",
        "*.md",
    ),
    "Concepts": (
        "how-it-works.md",
        "concepts.md",
        "architecture.md",
        "scheduling.md",
        "tiers.md",
        "concepts/*.md",
    ),
    "Reference": (
        "reference/flags.md",
        "reference/*.md",
        "models.md",
        "bad-inputs.md",
        "performance.md",
        "requirements.md",
        "requirement-tests.md",
    ),
    "Engineering notes": ("notes/*.md",),
}
"""Section -> patterns of its pages, in the order of the navigation."""


def section_of(page: str) -> str:
    """The section whose pattern names the page most exactly; a new page is a how-to guide."""
    found = [
        (sum(letter != "*" for letter in pattern), section)
        for section, patterns in SECTIONS.items()
        for pattern in patterns
        if fnmatchcase(page, pattern) and pattern.count("/") == page.count("/")
    ]
    return max(found)[1]


def title_of(text: str) -> str:
    """A page's heading, up to its colon."""
    heading = next(line for line in text.splitlines() if line.startswith("# "))
    return heading.removeprefix("# ").partition(":")[0]
