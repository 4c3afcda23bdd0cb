"""What Schemathesis can't know: which model is here, and what a message looks like.

Half of the bodies get good ones, or few requests would come further than the checks. Types stay
what they were, so that what was wrong stays wrong.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

GOOD: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "input": "hello",
    "prompt": "hello",
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict) or len(json.dumps(body, default=str)) % 2:
        return body
    return body | {
        name: good for name, good in GOOD.items() if name in body and type(body[name]) is type(good)
    }
