"""Signed URLs for objects of S3 and Google Cloud Storage, by obstore.

Takes an address and a file's name; gives a URL that can be read for a limited time. obstore finds
the credentials (environment, profile, the machine's role). It reads no object itself, because its
HTTP client follows every redirect.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from manyroots.errors import AdapterError, UnavailableError
from manyroots.store.sources.address import Address

_VALID = timedelta(minutes=15)


class SignedUrls:
    """One signer for each bucket. Called on any thread."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def url(self, address: Address, file: str) -> str:
        try:
            import obstore
        except ImportError as error:
            raise AdapterError(
                f"{address} needs the obstore package: pip install 'manyroots[stores]'.",
                field="lora_path",
            ) from error
        try:
            store = self._store(address)
            path = "/".join((*address.parts, file))
            return str(obstore.sign(store, "GET", path, _VALID))
        except obstore.exceptions.BaseError as error:
            reason = str(error).split("\n", 1)[0]
            raise UnavailableError(
                f"{address} could not be signed for reading: {reason}. Check the server's "
                "credentials for this store."
            ) from error

    def _store(self, address: Address) -> Any:
        from obstore.store import GCSStore, S3Store

        with self._lock:
            key = address.scheme, address.host
            if key not in self._stores:
                kind = S3Store if address.scheme == "s3" else GCSStore
                # The operator that names an endpoint decides whether it needs TLS.
                self._stores[key] = kind(
                    address.host,
                    client_options={"allow_http": True, "timeout": timedelta(seconds=10)},
                    retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
                )
            return self._stores[key]
