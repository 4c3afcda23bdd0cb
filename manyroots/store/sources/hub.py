"""Adapters from the Hugging Face hub, through its own client and cache.

Takes an address `hf://owner/name`, optionally with `@revision`; gives the folder of its two files.
"""

from __future__ import annotations

from pathlib import Path

from manyroots.errors import AdapterError, NotFoundError, UnavailableError
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE
from manyroots.store.sources.address import Address


def fetch_from_hub(address: Address, *, max_bytes: int, timeout_s: float) -> Path:
    # Imported here, because it takes a third of a second and other adapters do not need it.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if len(address.parts) != 1:
        raise AdapterError(
            f"{address} is no id of the hub; write hf://owner/name, or hf://owner/name@revision.",
            field="lora_path",
        )
    name, _, revision = address.parts[0].partition("@")
    repo = f"{address.host}/{name}"
    try:
        about = get_hf_file_metadata(
            hf_hub_url(repo, WEIGHTS_FILE, revision=revision or None), timeout=timeout_s
        )
        if about.size is None or about.size > max_bytes:
            raise AdapterError(
                f"{address} has {about.size} bytes of weights; at most {max_bytes} are fetched. "
                "Raise --lora-max-fetch-size, or serve a smaller adapter.",
                field="lora_path",
            )
        # Pinned to one commit: a push between the two downloads can't mix them.
        commit = about.commit_hash or revision or None
        files = [
            Path(hf_hub_download(repo, file, revision=commit, etag_timeout=timeout_s))
            for file in (CONFIG_FILE, WEIGHTS_FILE)
        ]
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise _unreachable(address, error) from error
        raise NotFoundError(f"{address} does not exist on the hub.", field="lora_path") from error
    except HFValidationError as error:
        raise AdapterError(f"{address} is no id of the hub: {error}", field="lora_path") from error
    except (HfHubHTTPError, OSError) as error:
        raise _unreachable(address, error) from error
    return files[0].parent


def _unreachable(address: Address, error: Exception) -> UnavailableError:
    reason = (str(error).strip().splitlines() or [repr(error)])[0]
    return UnavailableError(f"{address} could not be fetched from the hub: {reason}.")
