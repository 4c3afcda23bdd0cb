"""What it costs that one adapter rests for another: steps while weights come, and idle rows.

Takes what the last loads took, gives how long an adapter waits for a place before another must rest
for it, and how long it stays. Counts the rows that stand idle meanwhile against a budget. Knows no
place and nobody's turn.
"""

from __future__ import annotations

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.residency import Residency

STAY_STEPS = 16
"""An adapter that has got a place keeps it for so many steps at least. Short beside what a reader
of a stream would notice."""
STAY_SWAPS = 4
"""And for at least so many times what another's coming takes, so that places are mostly in use."""
PACK_PATIENCE = 4
"""With the pack policy patience is so many times as long: what is on the device is used first."""
PACK_STEPS = 512
"""And by default so long at least: an answer's length. Whoever has its turn sooner runs beside the
others for that long, and nothing is grouped."""

COST = 40
"""While anyone rests, one row in so many may stand idle for it, on average. It is what resting
costs the others: 2.4%."""
SAVED_STEPS = 8
"""What was not used of that is saved up, as far as to let all rows stand idle for so many steps."""


class SwapCosts:
    """What an adapter's coming costs, as things are."""

    def __init__(self, adapters: Residency, num_places: int, patience_steps: int | None) -> None:
        """`patience_steps`: None for what a load takes."""
        self._adapters = adapters
        self._num_places = num_places
        self._patience_steps = patience_steps

    def is_there(self, adapter: AdapterDigest) -> bool:
        """Whether its weights are on the device."""
        slot = self._adapters.slots.find(adapter)
        return slot is not None and not slot.is_loading

    @property
    def has_spare(self) -> bool:
        """Whether there are slots beyond the places: weights can come before anyone must rest."""
        num_obtainable = self._adapters.num_obtainable
        num_seated = self._adapters.slots.num_seated
        return num_obtainable is None or num_obtainable + num_seated > self._num_places

    def idle_steps(self, adapter: AdapterDigest) -> int:
        """Steps for which a place would stand idle if an adapter got it now: till the last step
        that uses its slot is over, and then for the load."""
        return 0 if self.is_there(adapter) else 1 + self._adapters.load_steps(adapter)

    @property
    def stay_steps(self) -> int:
        """For how long a place is not taken from whoever has got it."""
        idle_steps = 0 if self.has_spare else 1 + self._adapters.host_load_steps
        return max(STAY_STEPS, STAY_SWAPS * idle_steps)

    @property
    def turn_steps(self) -> int:
        """The most that one turn takes: two loads, of who comes and of who was to come and could
        not begin, and each one's stay."""
        return 2 * (self.stay_steps + 1 + self._adapters.longest_load_steps)

    def patience(self, adapter: AdapterDigest, *, packs: bool) -> int:
        """Steps for which an adapter waits for a place that is free."""
        steps = self._patience_steps
        if steps is None:
            if self.has_spare and not packs:
                return 0
            steps = self.idle_steps(adapter)
            if packs:
                return 1 + max(PACK_STEPS, PACK_PATIENCE * steps)
        return 1 + steps * (PACK_PATIENCE if packs else 1)


class IdleBudget:
    """Rows that stood idle because others rest, against those that ran."""

    def __init__(self) -> None:
        self._debt = 0
        """Idle rows, times COST, less all that ran."""
        self._last_step = StepId(0)

    @property
    def is_spent(self) -> bool:
        """Whether more stood idle than may: nobody new is put to rest for one who waits."""
        return self._debt > 0

    def count(self, step_id: StepId, num_running: int, num_idle: int) -> None:
        """The rows of a step."""
        num_steps, self._last_step = step_id - self._last_step, step_id
        saved = -SAVED_STEPS * COST * max(num_running, 1)
        self._debt = max(self._debt - num_steps * num_running, saved) + COST * num_idle

    def spend(self, num_idle: int) -> None:
        """So many rows will stand idle."""
        self._debt += COST * num_idle
