"""Encrypts and authenticates the connection between a gateway and an engine on another machine.

Both ends derive their CURVE keys from one shared key. An end without it can neither connect nor
read: a connection needs the gateway's public key, which is also derived and never sent.
"""

from __future__ import annotations

import hashlib
from typing import Any

import zmq
from zmq.utils import z85

WIRE_KEY = "MANYROOTS_WIRE_KEY"
"""The environment variable with the key of an engine's process."""


def secure(socket: zmq.Socket[Any], key: str, *, is_gateway: bool) -> None:
    """Call before the socket is bound or connected."""
    gateway, engine = _secret(key, "gateway"), _secret(key, "engine")
    own = gateway if is_gateway else engine
    socket.curve_secretkey = own
    socket.curve_publickey = zmq.curve_public(own)
    if is_gateway:
        socket.curve_server = True
    else:
        socket.curve_serverkey = zmq.curve_public(gateway)


def _secret(key: str, end: str) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=32, person=f"mr {end}".encode()).digest()
    return z85.encode(digest)
