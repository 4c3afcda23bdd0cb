"""The rows of the batch as columns: each sequence's progress, and when it next needs attention.

A step in which all rows only decode works on columns, never on one sequence after the other.
Comparing columns finds what needs attention: a full page, a table that must grow, a sequence that
has reached its limit.

    tokens      |------- known -------|  under way
    computed    |==== launched steps included ====>          the next position to plan
    committed   |==== steps that are done ===>               known is one ahead, once it decodes

A row *decodes* from the moment its last known token is planned. Until then it is in `prompts`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from manyroots.cache.lease import Lease
from manyroots.ids import Row
from manyroots.scheduler.request import Request
from manyroots.step import Bools, Int32s

Int64s = npt.NDArray[np.int64]

NO_ROWS: Int64s = np.empty(0, np.int64)

SOON_STEPS = 16
"""A starting request leaves a page for each running one that will need one within this many steps.
Looking further ahead costs rows if pages are large: half of the running requests will have ended by
then."""

_ONE = np.array(1, np.int64)
"""An array of the columns' dtype: adding a Python number takes numpy twice as long."""


class Rows:
    """The requests in each row. All columns are indexed by row; those of a free row are zero."""

    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self._page_size = page_size
        self._one_page = np.array(page_size, np.int64)
        self.free = [Row(row) for row in range(count - 1, -1, -1)]
        """The next request takes the last."""
        self._requests: list[Request | None] = [None] * count
        self.running: dict[Request, None] = {}
        """In the order in which they started."""
        self.prompts: dict[Request, None] = {}
        """Running requests with known tokens that are not planned yet."""
        self.stops: Counter[int] = Counter()
        """Tokens that would end a running request, with the number of such requests."""
        self.scored: set[int] = set()
        """Rows whose prompt's log-probabilities have started to arrive, until they are reported."""
        self._next_tenancy = 1
        self.end = 0
        """Rows from here on are free; steps read only the rows before."""
        self.tenancy = np.zeros(count, np.int64)
        """A number for each tenancy of a row by a sequence; 0 once it is finished for its
        caller."""
        self.computed = np.zeros(count, np.int64)
        self.committed = np.zeros(count, np.int64)
        self.due = np.zeros(count, np.int64)
        """A decoding row needs nothing while `computed` is below this."""
        self.last = np.zeros(count, np.int64)
        """The most tokens that a decoding row will ever compute: all but its last."""
        self.publish_at = np.zeros(count, np.int64)
        """The number of committed tokens at which there is something to publish."""
        self.notice_at = np.zeros(count, np.int64)
        """Until this many tokens are committed, a row has nothing to publish and its token is not
        its last: the minimum of `publish_at` and `last`."""
        self.request_ids = np.zeros(count, np.int64)
        self.num_cached = np.zeros(count, np.int32)
        # Sampled tokens wait here, and move to their requests a page at a time. Room for one page
        # and the token after it: no row exceeds this between two publications.
        self._recent = np.zeros((count, page_size + 2), np.int32)
        self._num_recent = np.zeros(count, np.int64)
        self._every_row = np.arange(count)
        self._every_row_int32 = self._every_row.astype(np.int32)
        self.ones = np.ones(count, np.int64)
        self.ones_int32 = np.ones(count, np.int32)
        self.trues = np.ones(count, np.bool_)
        columns = (self._every_row, self._every_row_int32, self.ones, self.ones_int32, self.trues)
        for shared in columns:
            shared.flags.writeable = False  # plans share them

    @property
    def is_busy(self) -> bool:
        """Whether any request has a row, even if only to drain."""
        return len(self.free) < len(self._requests)

    @property
    def num_growing(self) -> int:
        """Decoding rows that will need another page soon, if nothing stops them before."""
        end = self.end
        due = self.due[:end]
        is_soon = due - self.computed[:end] < SOON_STEPS
        return int(np.count_nonzero(is_soon & (due < self.last[:end])))

    def num_pages_of_prompts(self) -> int:
        """Pages that prompts in progress still need, plus one after each."""
        size, pages = self._page_size, 0
        for request in self.prompts:
            assert request.row is not None
            num_tokens, computed = request.num_tokens, self.computed.item(request.row)
            num_pages = -(-num_tokens // size)
            pages += num_pages - -(-computed // size) + (request.max_num_tokens > num_pages * size)
        return pages

    def request_at(self, row: int) -> Request:
        request = self._requests[row]
        assert request is not None
        return request

    def requests_at(self, rows: Int64s) -> list[Request]:
        """Like `request_at`, for each."""
        return list(filter(None, map(self._requests.__getitem__, rows.tolist())))

    def sit(self, request: Request, num_computed: int) -> Row:
        """Give a request a row and its columns, with its computed tokens."""
        row = request.row = self.free.pop()
        self._requests[row] = request
        self.running[request] = None
        if request.stop_ids:
            self.stops.update(request.stop_ids)
        if row >= self.end:
            self.end = row + 1
        self.tenancy[row] = request.tenancy = self._next_tenancy
        self._next_tenancy += 1
        self.computed[row] = self.committed[row] = num_computed
        self.request_ids[row] = request.submit.request_id
        self.num_cached[row] = request.num_cached_tokens or 0
        if request.prompt_logprobs or request.cache_use is not None:
            self.scored.add(row)
        return row

    def settle(self, request: Request) -> None:
        """The request stops running: no step plans it any more."""
        row = request.row
        assert row is not None
        del self.running[request]
        self.prompts.pop(request, None)
        if self.scored:
            self.scored.discard(row)
        if request.stop_ids:
            self.stops -= Counter(request.stop_ids)
        self.tenancy[row] = self.due[row] = self.last[row] = self.notice_at[row] = 0

    def leave(self, request: Request) -> None:
        """Free the row of a request that has settled."""
        row = request.row
        assert row is not None
        self._requests[row] = None
        self.computed[row] = self.committed[row] = self.publish_at[row] = 0
        self._num_recent[row] = 0
        self.free.append(row)
        request.row = None
        request.sampled_by = None
        if row == self.end - 1:
            while self.end and self._requests[self.end - 1] is None:
                self.end -= 1

    # Planning

    def decode(self, most: int) -> tuple[Int64s, Int64s]:
        """Plan one token for all rows that need nothing else, at most `most` rows. Returns their
        rows, and the decoding rows that need pages first, in the order in which they started."""
        end = self.end
        computed, due = self.computed[:end], self.due[:end]
        is_plain = computed < due
        rows = is_plain.nonzero()[0]
        if len(rows) == end and end <= most:
            computed += _ONE
            return self._every_row[:end], NO_ROWS
        growing = (is_plain < (due < self.last[:end])).nonzero()[0]
        if len(growing) > 1:
            growing = growing[self.tenancy[growing].argsort()]
        if len(rows) > most:
            rows = rows[self.tenancy[rows].argsort()[:most]]
            rows.sort()
        self.computed[rows] = computed[rows] + _ONE
        return rows, growing

    def next_pages(self, rows: Int64s) -> Int64s:
        """Each row has one more page, and computes one token there; returns the index of that page
        in its sequence."""
        computed = self.computed[rows]
        self.due[rows] = np.minimum(computed + self._one_page, self.last[rows])
        self.computed[rows] = computed + _ONE
        return computed // self._one_page

    def _where(self, rows: Int64s) -> slice | Int64s:
        """The index of these rows in a column: a slice if they are the first ones, which costs
        half."""
        return slice(len(rows)) if rows.base is self._every_row else rows

    def to_int32(self, rows: Int64s) -> Int32s:
        if rows.base is self._every_row:
            return self._every_row_int32[: len(rows)]
        return rows.astype(np.int32)

    def place(self, row: Row, request: Request, lease: Lease, computed: int) -> bool:
        """Plan a request's tokens up to `computed`; returns whether the last of them samples."""
        self.computed[row] = computed
        samples = computed >= request.num_known_tokens  # those sampled since come after these
        if samples:
            if self.prompts:
                self.prompts.pop(request, None)
            request.sampled_by = self
        else:
            self.prompts[request] = None
        self._watch(row, request, lease, samples)
        return samples

    def place_draft(self, row: Row, num_tokens: int) -> None:
        """Plan a decoding row's token and guesses after it, `num_tokens` in all. The row is not
        planned again before its result: its progress is unknown until then."""
        self.computed[row] += num_tokens
        self.due[row] = self.last[row] = self.notice_at[row] = 0

    def take_draft(self, request: Request, num_computed: int, tokens: Int32s) -> None:
        """A step has checked guesses: this many tokens of the request are computed now, and these
        follow the known ones."""
        row = request.row
        assert row is not None
        self.hand_over(request)
        request.extend(tokens)
        self.computed[row] = self.committed[row] = num_computed
        if num_computed < request.num_tokens - 1:
            self.prompts[request] = None

    def watch(self, request: Request) -> None:
        """Record when a running request next needs pages, or has any to publish."""
        assert request.row is not None
        assert request.lease is not None
        self._watch(request.row, request, request.lease, request not in self.prompts)

    def _watch(self, row: Row, request: Request, lease: Lease, decodes: bool) -> None:
        last = request.max_num_tokens - 1
        if decodes:
            self.last[row] = last
            covered = lease.num_covered_tokens
            self.due[row] = covered if covered < last else last
        publish_at = 0
        if not lease.checkpoints:
            # Committed but unpublished pages need no wait.
            num_pages = lease.num_published_pages
            num_committed = self.committed.item(row) // self._page_size
            if num_committed > num_pages:
                num_pages = num_committed
            publish_at = (num_pages + 1) * self._page_size
        self.publish_at[row] = publish_at
        if decodes:
            self.notice_at[row] = publish_at if publish_at < last else last
        else:
            self.notice_at[row] = 0

    # Results

    def commit(self, rows: Int64s, num_tokens: Int64s | Int32s) -> list[Request] | None:
        """A step has computed this many tokens of each row; returns the requests that have
        something to publish now. None: no row has, and none has its last token."""
        where = self._where(rows)
        committed = self.committed[where]
        committed += num_tokens
        self.committed[where] = committed
        if not len((committed >= self.notice_at[where]).nonzero()[0]):
            return None
        return self.requests_at(rows[committed >= self.publish_at[rows]])

    def append(self, rows: Int64s, tokens: Int32s) -> None:
        """Sampled tokens become known."""
        where = self._where(rows)
        places = self._num_recent[where]
        self._recent[rows, places] = tokens
        self._num_recent[where] = places + _ONE

    def hand_over(self, request: Request) -> None:
        """Give a request the tokens that were sampled for it since the last time."""
        row = request.row
        assert row is not None
        count = self._num_recent.item(row)
        if count:
            request.extend(self._recent[row, :count])
            self._num_recent[row] = 0

    def can_draft(self, request: Request) -> bool:
        """Whether a request decodes, and all of its tokens are known."""
        row = request.row
        if row is None or request in self.prompts or self.is_in_flight(row):
            return False
        return 0 < self.computed.item(row) == request.num_tokens - 1

    def is_in_flight(self, row: Row) -> bool:
        """Whether a launched step computes tokens of this row."""
        return self.computed.item(row) != self.committed.item(row)

    def are_among(self, rows: Int64s, some: list[int]) -> Bools:
        """For each of `rows`: whether it is one of `some`."""
        is_one = np.zeros(self.count, np.bool_)
        is_one[some] = True
        return is_one[rows]

    def is_live(self, rows: Int64s, tenancies: Int64s) -> Bools:
        """For each row of a launched step: whether its sequence still runs there."""
        return np.equal(self.tenancy[rows], tenancies)
