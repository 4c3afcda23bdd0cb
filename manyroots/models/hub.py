"""Model folders from the Hugging Face hub, through its own client and cache.

Takes a hub id; gives the folder of its files on this machine. Never fetches a pickle.
"""

from __future__ import annotations

from pathlib import Path

from manyroots.errors import ModelError

_CONFIG_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_WEIGHT_FILES = ["*.safetensors"]
_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
"""The same weights in their makers' formats, which are never read; gpt-oss and Mistral have them.
In a pattern, * stands for slashes, too."""


def download_folder(hub_id: str, revision: str | None, *, with_weights: bool) -> Path:
    """Fetch missing files of a model; local ones are not requested again."""
    # Imported here: local models do not need it, and it takes a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = _CONFIG_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        found = snapshot_download(
            hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=_COPIES
        )
        folder = Path(found)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"the model {hub_id!r}{at} is neither a local path nor could it be fetched from the "
            f"hub ({reason}). Check the name, the network and, for gated models, your hub login; "
            "or download it elsewhere and pass the folder."
        ) from error
    if with_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"the model {hub_id!r} has no safetensors in transformers' form on the hub, and no "
            "other weights are fetched from there. Download a GGUF file yourself and pass its "
            "path; convert pickles with save_pretrained and pass the folder."
        )
    return folder
