"""Which callers may see the page's data.

With --admin-key its holders, as everywhere (`middleware.py`). Without one, a browser on this
machine: the connection comes from it, no proxy passes others on, and the browser says that it shows
our own page. So neither another site's page nor a name that was pointed at this machine (DNS
rebinding) gets an answer.
"""

from __future__ import annotations

import ipaddress

from starlette.exceptions import HTTPException
from starlette.requests import Request

FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_REMEDY = "start the server with --admin-key KEY and send that"


def check_local(request: Request) -> None:
    """Raises a 403 for everything but a look from this machine at our own page."""
    client = request.client
    if client is None or not _is_loopback(client.host):
        raise HTTPException(403, f"Without an admin key the page is for this machine; {_REMEDY}.")
    for name in FORWARDED:
        if name in request.headers:
            raise HTTPException(
                403, f"The request came through a proxy ({name}), for which {_REMEDY}."
            )
    host = request.headers.get("host", "")
    if not _is_local_name(_name_of(host)):
        raise HTTPException(
            403, f"The Host header is {host[:100]!r}; open the page as http://127.0.0.1:PORT/."
        )
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{host}":
        raise HTTPException(403, f"The page of {origin[:100]!r} may not see this; {_REMEDY}.")
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HTTPException(403, f"Another site's page may not see this; {_REMEDY}.")


def _name_of(host: str) -> str:
    """Without its port, or an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_local_name(name: str) -> bool:
    return name.lower() == "localhost" or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool(found.is_loopback or (mapped is not None and mapped.is_loopback))
