"""One remote file read over HTTP in ranges: its size and validator first, then its bytes.

Takes a URL, and whether a redirect may be followed; gives bytes that all came from one state of the
file. A file that is shorter than announced, changes between two ranges, or exceeds the limit is
refused. Server errors are retried within the deadline.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import IO, Any, TypeVar
from urllib.parse import urljoin

from manyroots.errors import AdapterError, NotFoundError, UnavailableError

RANGE_BYTES = 8 << 20
NUM_THREADS = 4
"""Ranges of one file that are read at once."""
NUM_TRIES = 3
FIRST_PAUSE_S = 0.2
MAX_REDIRECTS = 5
SILENCE_S = 10.0
"""How long a server may send nothing."""
_COPY_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

T = TypeVar("T")
MayFollow = Callable[[str], bool]


class _RetryableError(Exception):
    """The server or the connection failed; the same request may succeed later."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the caller, which checks where they lead."""

    def redirect_request(
        self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True, slots=True)
class RemoteState:
    """A file's size and validator at one moment, as the server reports them."""

    num_bytes: int
    validator: str
    """Its ETag, otherwise its modification time; empty if the server gives neither."""
    has_ranges: bool


class RemoteFile:
    """A file at a URL."""

    def __init__(
        self,
        shown: str,
        make_url: Callable[[], str],
        may_follow: MayFollow,
        *,
        max_bytes: int,
        deadline: float,
    ) -> None:
        """`shown`: the name in messages, without a signature. `deadline`: monotonic seconds."""
        self._shown = shown
        self._make_url = make_url
        self._may_follow = may_follow
        self._max_bytes = max_bytes
        self._deadline = deadline

    def look(self) -> RemoteState:
        """Size and validator, by asking for the first byte."""
        return self._again(self._look)

    def read(self, state: RemoteState) -> bytes:
        """Read all of a small file."""
        target = bytearray(state.num_bytes)

        def put(offset: int, piece: memoryview) -> None:
            target[offset : offset + len(piece)] = piece

        self._again(lambda: self._range(state, 0, state.num_bytes, put))
        return bytes(target)

    def download(self, state: RemoteState, file: int) -> None:
        """Download into an open file, several ranges at once."""

        def put(offset: int, piece: memoryview) -> None:
            while piece:
                written = os.pwrite(file, piece, offset)
                piece, offset = piece[written:], offset + written

        def fetch(start: int) -> None:
            end = min(start + step, state.num_bytes)
            self._again(lambda: self._range(state, start, end, put))

        # Without ranges or a validator, parts could come from different states of the file.
        is_cut = state.has_ranges and state.validator
        step = RANGE_BYTES if is_cut else max(1, state.num_bytes)
        starts = range(0, state.num_bytes, step)
        if len(starts) <= 1:
            for start in starts:
                fetch(start)
            return
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="adapter-range") as threads:
            waiting = [threads.submit(fetch, start) for start in starts]
            try:
                for done in waiting:
                    done.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _look(self) -> RemoteState:
        with self._open({"Range": "bytes=0-0"}) as answer:
            headers = answer.headers
            validator = headers.get("ETag") or headers.get("Last-Modified") or ""
            if answer.status == HTTPStatus.PARTIAL_CONTENT:
                found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
                if found is None:
                    raise self._refused("answers a range without saying which")
                size, has_ranges = int(found[3]), True
            else:
                length = headers.get("Content-Length", "")
                if not length.isdecimal():
                    raise self._refused("has no Content-Length, so that a cut one can't be told")
                size, has_ranges = int(length), False
        if size > self._max_bytes:
            raise AdapterError(
                f"{self._shown} has {size} bytes; at most {self._max_bytes} are fetched. Raise "
                "--lora-max-fetch-size, or serve a smaller adapter.",
                field="lora_path",
            )
        return RemoteState(size, validator, has_ranges)

    def _range(
        self, state: RemoteState, start: int, end: int, put: Callable[[int, memoryview], None]
    ) -> None:
        headers = {}
        if state.has_ranges:
            headers["Range"] = f"bytes={start}-{end - 1}"
        if state.validator.startswith('"'):
            headers["If-Match"] = state.validator
        with self._open(headers) as answer:
            self._check_state(answer, state, start, end)
            room, offset = memoryview(bytearray(min(_COPY_BYTES, end - start))), start
            while offset < end:
                self._check_deadline()
                try:
                    count = answer.readinto(room[: end - offset])
                except (OSError, http.client.HTTPException) as error:
                    raise _RetryableError(f"{type(error).__name__} after {offset} bytes") from error
                if not count:
                    raise _RetryableError(f"it ended after {offset} of {end} bytes")
                put(offset, room[:count])
                offset += count

    def _check_state(
        self, answer: http.client.HTTPResponse, state: RemoteState, start: int, end: int
    ) -> None:
        now = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        told = f"bytes {start}-{end - 1}/{state.num_bytes}"
        is_same = now == state.validator
        if state.has_ranges:
            is_same &= answer.headers.get("Content-Range") == told
        if not is_same:
            raise self.changed()

    def changed(self) -> AdapterError:
        return AdapterError(
            f"{self._shown} changed while it was fetched; ask again when it is complete.",
            field="lora_path",
        )

    def _open(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        """A response with a body; allowed redirects are followed."""
        url = self._make_url()
        for _ in range(MAX_REDIRECTS):
            left_s = self._check_deadline()
            asked = urllib.request.Request(
                url, headers={"Accept-Encoding": "identity", "User-Agent": "manyroots"} | headers
            )
            try:
                answer: http.client.HTTPResponse
                answer = _OPENER.open(asked, timeout=min(SILENCE_S, left_s))
                return answer
            except urllib.error.HTTPError as error:
                with error:
                    url = self._follow(url, error)
            except urllib.error.URLError as error:
                raise _RetryableError(str(error.reason)) from error
            except (OSError, http.client.HTTPException) as error:
                raise _RetryableError(str(error) or type(error).__name__) from error
        raise self._refused(f"was redirected more than {MAX_REDIRECTS} times")

    def _follow(self, url: str, error: urllib.error.HTTPError) -> str:
        """The target of a redirect; raises the error for any other status."""
        status = error.code
        if status in (301, 302, 303, 307, 308):
            target = urljoin(url, error.headers.get("Location", ""))
            if not self._may_follow(target):
                raise self._refused(
                    "is redirected to a place outside its --lora-source, which is not followed"
                )
            return target
        if status in (404, 410):
            raise NotFoundError(f"{self._shown} does not exist.", field="lora_path")
        if status == HTTPStatus.PRECONDITION_FAILED:
            raise self.changed()
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise self._refused("is empty or has become shorter")
        if status in (401, 403):
            raise self._refused(
                f"can't be read (status {status}): it is missing, or the server's credentials may "
                "not read it"
            )
        if status in (408, 425, 429) or status >= 500:
            raise _RetryableError(f"status {status}")
        raise self._refused(f"was answered with status {status}")

    def _again(self, work: Callable[[], T]) -> T:
        """Retry until it succeeds, is refused, or the time or the number of tries is used up."""
        pause_s = FIRST_PAUSE_S
        for number in range(1, NUM_TRIES + 1):
            try:
                return work()
            except _RetryableError as error:
                if number == NUM_TRIES or time.monotonic() + pause_s > self._deadline:
                    raise UnavailableError(
                        f"{self._shown} could not be fetched after {number} tries: {error}. Try "
                        "again later, or raise --lora-fetch-timeout-s if it is slow."
                    ) from error
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError

    def _check_deadline(self) -> float:
        """Seconds left."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise UnavailableError(
                f"{self._shown} took longer than --lora-fetch-timeout-s to fetch; try again later, "
                "or raise it."
            )
        return left_s

    def _refused(self, why: str) -> AdapterError:
        return AdapterError(f"{self._shown} {why}.", field="lora_path")
