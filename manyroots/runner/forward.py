"""From a step's arrays on the device to tokens there: the one way every step takes.

Takes the views of a packet (`step_arrays.py`) and the adapters of its tokens; prepares the `Step`
that all layers read, with a page table or states for each family, runs the decoder, chooses tokens
and keeps them as their rows' newest. Asks the device nothing, so that it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from manyroots.kernels.attention.paged import AttentionMetadata, SharedPrefixes
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.kernels.sampling.rows import Sampled, SamplingRows, SamplingTables
from manyroots.layers.step import LogitsIndices, Step
from manyroots.models.decoder import Decoder
from manyroots.runner.device_rows import DeviceRows

Views = Mapping[str, Tensor]


class Forward:
    """A decoder with its memory and the rows it computes for."""

    def __init__(
        self, decoder: Decoder, rows: DeviceRows, tables: SamplingTables, *, page_size: int
    ) -> None:
        self.decoder = decoder
        self.rows = rows
        self._tables = tables
        self._page_size = page_size
        self.windows = [f.window or 0 for f in decoder.families if not f.is_state]
        """Of each family of pages; 0 for none."""
        self._num_state_families = len(decoder.families) - decoder.num_paged

    def hidden(
        self,
        views: Views,
        num_decodes: int,
        lora: LoraRows | None,
        *,
        max_chunk: int,
        max_len: int | None = None,
        before_layer: Callable[[int], None] | None = None,
        is_padded: bool = False,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """Hidden states of all tokens or of those at `logits_indices`. The first `num_decodes`
        sequences have one token each; those of a step that has no others need no `rows`, `starts`
        and `blocks`. `max_chunk`: the most tokens of one sequence; `max_len`: the longest context,
        where it is known. `before_layer`:
        as in `Step`. `is_padded`: whether tokens and sequences may be nobody's."""
        decoder, kernels = self.decoder, self.decoder.kernels
        rows = views.get("rows", views["token_rows"])
        tokens, tables = kernels.decode_rows.begin(
            views["tokens"], views["token_rows"], self.rows.newest,
            self.rows.tables_for(max_len, self._page_size), rows,
        )  # fmt: skip
        step = Step(
            ropes=tuple(
                kernels.qk_rope_kv_write.look_up(table, views["positions"], decoder.dtype)
                for table in decoder.ropes
            ),
            kv=tuple(
                kernels.attention.prepare(
                    AttentionMetadata(
                        page_table=tables[family],
                        context_lens=views["lens"],
                        num_decodes=num_decodes,
                        query_starts=views.get("starts"),
                        blocks=views.get("blocks"),
                        slot_mapping=SlotMapping(views["pages"][family], views["offsets"]),
                        window=window,
                        shared=None if window else shared_prefixes(views, family),
                        order=views.get("order"),
                        is_padded=is_padded,
                    ),
                    self._page_size,
                    decoder.dtype,
                )
                for family, window in enumerate(self.windows)
            ),
            states=tuple(
                kernels.recurrent.prepare(
                    views["units"][family],
                    views["lens"],
                    views.get("starts"),
                    num_decodes,
                    max_chunk,
                )
                for family in range(self._num_state_families)
            ),
            lora=lora,
            before_layer=before_layer,
            logits_indices=logits_indices,
        )
        hidden: Tensor = decoder.hidden(tokens, step)
        return hidden

    def choose(self, logits: Tensor, views: Views) -> Sampled:
        """A token for each row of logits; the views have the fields of `SamplingRows`.

        The first rank's choice, which the others follow; they look for no faults.
        """
        decoder, shard = self.decoder, self.decoder.shard
        if shard.is_first:
            sampled: Sampled = decoder.kernels.sampling.sample(
                logits, SamplingRows.of(views, self._tables)
            )
        else:
            sampled = Sampled.empty(len(logits), logits.device)
            sampled.packed.zero_()
        shard.agree(sampled.tokens)
        decoder.kernels.decode_rows.end(sampled.tokens, views["table_rows"], self.rows.newest)
        return sampled

    def mixed(self, views: Views, num_decodes: int) -> Tensor:
        """Logits behind the sampled tokens of a padded step of prompts beside decodes."""
        logits_indices = LogitsIndices(views["sampled_at"], lora_rows(views, "head_"))
        hidden = self.hidden(
            views, num_decodes, lora_rows(views), max_chunk=len(views["tokens"]), is_padded=True,
            logits_indices=logits_indices,
        )  # fmt: skip
        return self.decoder.logits(hidden, logits_indices.lora)

    def single_tokens(self, views: Views) -> Tensor:
        """Logits of a step in which every sequence has one token, and so have all rows a
        successor, which `choose` gives."""
        lora = lora_rows(views)
        hidden = self.hidden(views, len(views["tokens"]), lora, max_chunk=1)
        return self.decoder.logits(hidden, lora)


def shared_prefixes(views: Views, family: int) -> SharedPrefixes | None:
    """What decoding rows share, if the step's arrays say."""
    if "shared_lens" not in views:
        return None
    return SharedPrefixes(
        views["shared_lens"][family],
        views["shared_members"][family],
        views["shared_blocks"][family],
    )


def lora_rows(views: Views, prefix: str = "") -> LoraRows | None:
    """The adapters of a step's tokens, if its arrays have any; of others by their arrays' names."""
    if "adapter_slots" not in views:
        return None
    slots, blocks = views[f"{prefix}adapter_slots"], views[f"{prefix}adapter_blocks"]
    return LoraRows(slots, blocks, views[f"{prefix}num_adapter_blocks"], max_blocks=blocks.shape[0])
