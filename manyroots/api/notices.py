"""What requests ask for and do not get, logged once each.

Takes a topic and a remark; gives a line in the log the first time. Names come from callers, so
that their number and their length are bounded.
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)
MAX_TOPICS = 200
"""Beyond these nothing is logged: a caller can make up names without end."""
_SHOWN_CHARACTERS = 60


class Notices:
    """One server's; `refuses_unknown` is --strict-requests."""

    def __init__(self, *, refuses_unknown: bool = False) -> None:
        self.refuses_unknown = refuses_unknown
        self._told: set[str] = set()

    def tell(self, topic: str, remark: str) -> None:
        """Log `topic: remark`, unless this topic has had its line."""
        topic = repr(topic[:_SHOWN_CHARACTERS])
        if topic in self._told or len(self._told) >= MAX_TOPICS:
            return
        self._told.add(topic)
        _LOG.info("%s %s; this is logged once", topic, remark)
        if len(self._told) == MAX_TOPICS:
            _LOG.warning("%d such names were logged; further ones are not", MAX_TOPICS)
