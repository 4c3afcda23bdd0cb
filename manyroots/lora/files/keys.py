"""Names of tensors in adapter files: which module of the model, which half of its pair.

Takes a name in any of the spellings in use; gives a `Key`, or an `AdapterError` that says what the
tensor is and why it is not served. Knows nothing of shapes.

    [base_model.model.]MODULE.lora_A[.ADAPTER].weight
    [base_model.model.]MODULE.lora_embedding_A[.ADAPTER][.weight]

In a model with images, MODULE names the text model, too: `model.language_model.layers.0...`; in one
without a head it begins with `layers.0...`; of one that torch compiled for training, `_orig_mod.`
stands in it somewhere. Nemotron-H's own code calls the model `backbone`. Tinker has names of its
own for attention and head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from manyroots.errors import AdapterError
from manyroots.lora.files.folder import CONVERT_MLX

_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+?)\.lora_(?:"
    r"([AB])(?:\.([^.]+))?\.weight"
    r"|embedding_([AB])(?:\.weight|\.([^.]+)(?:\.weight)?)?)"
)
_OLDER_NAMES = {".block_sparse_moe.router.layer": ".block_sparse_moe.router"}
"""What modules were called when adapters were made for them, and what checkpoints call them now."""
_OLDER_MIXTRAL = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.(gate|experts\.\d+\.w[123])")
"""Mixtral's router and experts in transformers 4. Granite has other names below the block."""
_COMPILED = "_orig_mod."
_WHOLE = re.compile(r"(?:base_model\.model\.)?(.+)\.weight")
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
_KNOWN_PARTS = {
    ".lora_a": f"is a factor as MLX writes it; {CONVERT_MLX.removesuffix('.')}",
    "lora_magnitude_vector": "belongs to DoRA, which is not served; train with use_dora=False",
    "modules_to_save": "replaces a whole module, which is not served; train without it",
    "original_module": "replaces a whole module, which is not served; train without it",
    "trainable_tokens": "changes single tokens of the embedding, which is not served",
    ".bias": "is a bias, which is not served; train with bias='none' and lora_bias=False",
}


class Key(NamedTuple):
    """One half of a pair."""

    module: str
    side: str
    """`A` or `B`."""
    adapter: str | None
    """The name that the adapter had in training, where the file has it."""
    spelled: str
    """What the file calls the module, by which PEFT's patterns go."""


class Spelling(NamedTuple):
    """How a file calls the modules of the text model."""

    beginnings: tuple[tuple[str, str], ...]
    """Of names that are others here: in the file, and here."""
    has_images: bool = False
    """Whether the model has more parts than its text model."""
    is_head_linear: bool = False
    """Whether `all-linear` is meant with the head; PEFT means it without."""

    def names(self, module: str) -> list[str]:
        """What a module may be called there, by its name now and by older ones."""
        return [self._name(one) for one in _with_older(module)]

    def _name(self, module: str) -> str:
        for there, here in self.beginnings:
            if module.startswith(here):
                return there + module.removeprefix(here)
        return module


_OWN = Spelling(())
_OTHERS = (
    Spelling((("model.language_model.", "model."),), has_images=True),
    Spelling(
        (("language_model.model.", "model."), ("language_model.lm_head", "lm_head")),
        has_images=True,
    ),
    Spelling((("layers.", "model.layers."), ("embed_tokens", "model.embed_tokens"))),
    Spelling((("backbone.layers.", "model.layers."),)),
    Spelling((("model.unembed_tokens", "lm_head"),), is_head_linear=True),
)
_TINKERS_ATTENTION = re.compile(r"(model\.layers\.\d+)\.attn\.(.+)")


def parse_key(name: str) -> Key | None:
    """What `name` means; None if it is not a half of a pair."""
    match = _KEY.fullmatch(name.replace(_COMPILED, ""))
    if match is None:
        return None
    module, side, adapter, embedding_side, embedding_adapter = match.groups()
    return Key(_of_text(module), side or embedding_side, adapter or embedding_adapter, module)


def base_copy_of(name: str) -> str | None:
    """The module whose base weight this tensor repeats, as PEFT saves it beside embeddings."""
    match = _BASE_COPY.fullmatch(name.replace(_COMPILED, ""))
    return None if match is None else _of_text(match.group(1))


def _of_text(module: str) -> str:
    """A module of the text model, by the name that it has now and where there are no images."""
    for older, now in _OLDER_NAMES.items():
        if module.endswith(older):
            module = module.removesuffix(older) + now
    mixtral = _OLDER_MIXTRAL.fullmatch(module)
    if mixtral is not None:
        return f"{mixtral[1]}.mlp.{mixtral[2]}"
    attention = _TINKERS_ATTENTION.fullmatch(module)
    if attention is not None:
        return f"{attention[1]}.self_attn.{attention[2]}"
    for spelling in _OTHERS:
        for there, here in spelling.beginnings:
            if module.startswith(there):
                return here + module.removeprefix(there)
    return module


def spelling_of(spelled: Iterable[str]) -> Spelling:
    """Of a file, by what it calls some of the modules."""
    names = list(spelled)
    for spelling in _OTHERS:
        beginnings = tuple(there for there, _ in spelling.beginnings)
        if any(name.startswith(beginnings) for name in names):
            return spelling
    return _OWN


def spellings(module: str) -> list[str]:
    """What a module may be called where an adapter was made, its name here first: files are
    renamed for text models, and their configs stay as they were."""
    known = (_OWN, *(one for one in _OTHERS if one.has_images))
    return list(dict.fromkeys(name for one in known for name in one.names(module)))


def _with_older(module: str) -> list[str]:
    found = [module]
    for older, now in _OLDER_NAMES.items():
        if module.endswith(now):
            found.append(module.removesuffix(now) + older)
    return found


def refuse_key(name: str) -> AdapterError:
    """For a tensor that is neither."""
    for part, reason in _KNOWN_PARTS.items():
        if part in name:
            return AdapterError(f"the tensor {name[:200]!r} {reason}.")
    whole = _WHOLE.fullmatch(name)
    if whole is not None and "lora_" not in name:
        return AdapterError(
            f"the tensor {name[:200]!r} is the whole weight of {whole.group(1)[:200]}, not a LoRA "
            "pair. If it was trained (modules_to_save, or tokens were added), it is not served; if "
            "not, save the adapter without: save_pretrained(..., save_embedding_layers=False)."
        )
    return AdapterError(
        f"the tensor {name[:200]!r} is not the weight of a LoRA pair; remove it, or use the file "
        "that PEFT's save_pretrained writes."
    )
