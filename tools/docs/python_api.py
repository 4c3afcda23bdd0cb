"""docs/reference/python.md: what `manyroots.__all__` names, from the sources."""

from __future__ import annotations

import ast

from tools.docs.markdown import NOTICE, code, table
from tools.docs.sources import class_of, module

HEAD = f"""\
# Python: the public interface

{NOTICE}
`from manyroots import NAME` imports these. Everything else may change without notice.
[Errors](errors.md) has the exceptions.
"""


def where() -> dict[str, str]:
    """Public name -> the module that defines it."""
    tree = module("manyroots")
    found: dict[str, str] = {}
    public: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: node.module for alias in node.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = ast.literal_eval(node.value)
    return {name: found[name] for name in public if name != "__version__"}


def page() -> str:
    parts = [HEAD]
    for name, file in where().items():
        if file == "manyroots.errors":
            continue
        cls = class_of(file, name)
        parts.append(f"\n## {name}\n\n{cls.text}\n")
        if cls.fields:
            rows = [
                (code(f.name), code(f.type), code(f.default) or "**required**", f.text)
                for f in cls.fields
            ]
            parts.append("\n" + table(("field", "type", "default", "meaning"), rows))
        for method in cls.methods:
            parts.append(f"\n### {name}.{method.name}\n\n<!-- not run: a signature -->\n")
            parts.append(f"```python\n{method.signature}\n```\n")
            if method.text:
                parts.append(f"\n{method.text}\n")
    return "".join(parts)
