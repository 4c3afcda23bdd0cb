"""From a step's arrays on the device to its tokens there: the code path of every step.

Takes the views of a packet (`views.py`) and the adapters of its tokens; has every family's memory
prepare what its layers read of the `Step`, runs the decoder, chooses tokens and keeps them as their
rows' newest. Asks the device nothing, so that it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from manyroots.kernels.latent.step import PromptLens
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.sampling.rows import Sampled, SamplingRows, SamplingTables
from manyroots.layers.memories import StepRows
from manyroots.layers.step import LogitsIndices, Step
from manyroots.models.decoder import Decoder
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.views import StepViews

PacketViews = Mapping[str, Tensor]
"""A packet's arrays on the device."""


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
        pages, states = decoder.families[: decoder.num_paged], decoder.families[decoder.num_paged :]
        self._memories = [
            (family.memory, place) for sort in (pages, states) for place, family in enumerate(sort)
        ]

    def step(
        self,
        views: StepViews,
        num_decodes: int,
        lora: LoraRows | None,
        *,
        max_chunk: int,
        max_len: int | None = None,
        before_layer: Callable[[int], None] | None = None,
        is_padded: bool = False,
        logits_indices: LogitsIndices | None = None,
        prompt_lens: PromptLens | None = None,
    ) -> tuple[Tensor, Step]:
        """The two inputs of `Decoder.hidden`. The first `num_decodes` sequences have one token
        each; a step with no others needs no `rows`, `starts` and `blocks`. `max_chunk`: the most
        tokens of one sequence; `max_len`: the longest context, where it is known. `before_layer`
        and `logits_indices`: as in `Step`. `is_padded`: whether tokens and sequences may be
        padding. `prompt_lens`: what the host knows of sequences that do not decode."""
        decoder, kernels = self.decoder, self.decoder.kernels
        tokens, tables = kernels.decode_rows.begin(
            views.tokens, views.token_rows, self.rows.newest,
            self.rows.tables_for(max_len, self._page_size),
            views.token_rows if views.rows is None else views.rows,
        )  # fmt: skip
        rows = StepRows(
            page_tables=tables,
            pages=views.pages,
            offsets=views.offsets,
            units=views.units,
            context_lens=views.lens,
            num_decodes=num_decodes,
            query_starts=views.starts,
            blocks=views.blocks,
            order=views.order,
            shared=views.shared,
            runs=views.runs,
            max_chunk=max_chunk,
            page_size=self._page_size,
            is_padded=is_padded,
            prompt_lens=prompt_lens,
        )
        step = Step(
            ropes=tuple(
                kernels.qk_rope_kv_write.look_up(table, views.positions, decoder.dtype)
                for table in decoder.ropes
            ),
            memories=tuple(
                memory.prepare(rows, place, kernels, decoder.dtype)
                if memory.is_paged or views.units is not None
                else None
                for memory, place in self._memories
            ),
            lora=lora,
            before_layer=before_layer,
            logits_indices=logits_indices,
        )
        return tokens, step

    def choose(self, logits: Tensor, views: PacketViews) -> Sampled:
        """A token for each row of logits; the views have the fields of `SamplingRows`.

        The first rank's choice, which the others follow; they look for no faults.
        """
        decoder, shard = self.decoder, self.decoder.shard
        rows = SamplingRows.of(views, self._tables)
        if shard.is_first:
            sampled = decoder.kernels.sampling.sample(logits, rows)
        else:
            sampled = Sampled.empty(len(logits), logits.device)
            sampled.packed.zero_()
        shard.agree(sampled.tokens)
        decoder.kernels.decode_rows.end(sampled.tokens, rows.table_rows, self.rows.newest)
        return sampled

    def mixed(self, named: PacketViews, num_decodes: int) -> Tensor:
        """Logits after the sampled tokens of a padded step of prompts beside decodes."""
        views = StepViews.of(named)
        assert views.sampled_at is not None, "such a step says which"
        logits_indices = LogitsIndices(views.sampled_at, views.head_lora)
        tokens, step = self.step(
            views, num_decodes, views.lora, max_chunk=len(views.tokens), is_padded=True,
            logits_indices=logits_indices,
        )  # fmt: skip
        return self.decoder.logits(self.decoder.hidden(tokens, step), logits_indices.lora)

    def single_tokens(self, named: PacketViews) -> Tensor:
        """Logits of a step in which every sequence has one token, so that `choose` gives every row
        a token."""
        views = StepViews.of(named)
        tokens, step = self.step(views, len(views.tokens), views.lora, max_chunk=1)
        return self.decoder.logits(self.decoder.hidden(tokens, step), views.lora)
