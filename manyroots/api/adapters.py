"""Which adapters callers may name, and which one a request means.

Takes the engine's table of names and the request's key; gives the adapter of each prompt, or a 404
or 400 that names the field. With --lora-source, names that are not known are the engine's to find.
"""

from __future__ import annotations

from manyroots.adapter_names import (
    MAX_COMBINED,
    MAX_WEIGHT,
    WeightedName,
    is_combination,
    name_combination,
    name_fault,
    split_revision,
)
from manyroots.api.requests import GenerationFields
from manyroots.api.tenants import current_tenant
from manyroots.engine.adapter_table import AdapterTable, KnownAdapter
from manyroots.errors import NotFoundError, RequestError
from manyroots.ids import AdapterName

NEW_ADAPTER = AdapterName("(new)")
"""The label of requests whose adapter is being looked for; no adapter can be called so."""

COMBINED = AdapterName("(combined)")
"""The label of requests with several adapters."""

LoraPath = str | list[str | None] | None


class Adapters:
    """The engine's adapters as a request's key may use them."""

    def __init__(
        self, model_name: str, table: AdapterTable, *, is_enabled: bool, has_sources: bool
    ) -> None:
        """`is_enabled`: the engine serves adapters at all. `has_sources`: it may find names that
        the table does not have."""
        self._model_name = model_name
        self._table = table
        self._is_enabled = is_enabled
        self._has_sources = has_sources

    def all(self) -> list[KnownAdapter]:
        """Those that the request's key may use."""
        tenant = current_tenant()
        return [item for item in self._table if tenant is None or tenant.may_use(item.name)]

    def get(self, name: str) -> KnownAdapter | None:
        """None for one that the request's key may not use, as for one that is not there."""
        return self._table.get(name) if _is_allowed(name) else None

    @property
    def has_base(self) -> bool:
        """Whether the request's key may use the base model alone."""
        tenant = current_tenant()
        return tenant is None or tenant.spec.base_model

    def label(self, adapter: AdapterName | None) -> AdapterName | None:
        """What metrics call it: a caller's own words only once the engine has found them."""
        if adapter is None:
            return None
        if is_combination(adapter):
            return COMBINED
        name = AdapterName(split_revision(adapter)[0])
        return NEW_ADAPTER if self._table.get(name) is None else name

    def resolve(self, model: str) -> AdapterName | None:
        """The adapter that `model` names, alone or as `base:adapter`, perhaps with `@` and a
        revision. None is the base model."""
        if model == self._model_name:
            if not self.has_base:
                raise self._unknown(model, "model")
            return None
        if model.startswith(f"{self._model_name}:") and self._table.get(model) is None:
            return self._named(model[len(self._model_name) + 1 :], model, "model")
        return self._named(model, model, "model")

    def choose_for(self, request: GenerationFields, num_prompts: int) -> list[AdapterName | None]:
        """The adapter of each prompt of a request, or the combination that all of them have."""
        if request.adapters is None:
            return self.choose(request.model, request.lora_path, num_prompts)
        given, count = request.adapters, len(request.adapters)
        if not 1 <= count <= MAX_COMBINED:
            raise RequestError(
                f"adapters has {count} entries; give from 1 to {MAX_COMBINED}.", field="adapters"
            )
        if request.lora_path is not None or request.model != self._model_name:
            raise RequestError(
                f"adapters is given beside another adapter; with it, model is "
                f"{self._model_name!r} and there is no lora_path.",
                field="adapters",
            )
        names = [item.name for item in given]
        for item in given:
            if names.count(item.name) > 1:
                raise RequestError(
                    f"adapters names {item.name[:200]!r} twice; add its weights up.",
                    field="adapters",
                )
            if not abs(item.weight) <= MAX_WEIGHT:
                raise RequestError(
                    f"adapters has the weight {item.weight}; it must be from -{MAX_WEIGHT:g} to "
                    f"{MAX_WEIGHT:g}.",
                    field="adapters",
                )
        parts = [
            WeightedName(self._named(item.name, item.name, "adapters"), item.weight)
            for item in given
        ]
        return [AdapterName(name_combination(parts))] * num_prompts

    def choose(self, model: str, lora_path: LoraPath, num_prompts: int) -> list[AdapterName | None]:
        """The adapter of each prompt, None where the base model answers alone."""
        # Beside lora_path the base model is named for its adapter's sake.
        is_base = lora_path is not None and model == self._model_name
        named = None if is_base else self.resolve(model)
        if lora_path is None:
            return [named] * num_prompts
        if isinstance(lora_path, str):
            paths: list[str | None] = [lora_path] * num_prompts
        elif len(lora_path) == num_prompts:
            paths = lora_path
        else:
            raise RequestError(
                f"lora_path has {len(lora_path)} entries for {num_prompts} prompts; give one name "
                "for all, or one per prompt with null for the base model.",
                field="lora_path",
            )
        chosen = [self._by_lora_path(path) for path in paths]
        for path, adapter in zip(paths, chosen, strict=True):
            if named is not None and adapter != named:
                raise RequestError(
                    f"model is {model[:200]!r} and lora_path is {path!r:.200}: they name different "
                    "adapters. Give one of them, or the base model and lora_path.",
                    field="lora_path",
                )
        return chosen

    def _by_lora_path(self, name: str | None) -> AdapterName | None:
        if name is None:
            if not self.has_base:
                raise self._unknown(self._model_name, "lora_path")
            return None
        return self._named(name, name, "lora_path")

    def _named(self, wanted: str, written: str, field: str) -> AdapterName:
        """A name that is known or may be found; `written` is what its caller wrote."""
        name, _ = split_revision(wanted)
        may_be_found = self._has_sources and name_fault(name) is None and _is_allowed(name)
        if self.get(name) is None and not may_be_found:
            raise self._unknown(written, field)
        return AdapterName(wanted)

    def _unknown(self, name: str, field: str) -> NotFoundError:
        count = len(self.all())
        ours = repr(self._model_name) if self.has_base else "no base model for this key"
        if count:
            ours += f" and {count} adapters, which GET /v1/models lists"
        elif not self._is_enabled:
            ours += " and no adapters, because it runs without --enable-lora"
        return NotFoundError(
            f"The model {name[:200]!r} does not exist; this server has {ours}.",
            field=field,
        )


def _is_allowed(name: str) -> bool:
    tenant = current_tenant()
    return tenant is None or tenant.may_use(name)
