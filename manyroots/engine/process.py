"""The engine's own process: `python -m manyroots.engine.process ADDRESS BEGIN`.

Started by `child.py`, at BEGIN on the monotonic clock. Reads settings from its socket, builds the
engine and sends READY or FAILED. Then it runs the loop until it is told to close or its parent
exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from socket import socketpair

import zmq

from manyroots.engine.build import build_engine
from manyroots.engine.loop import EngineLoop
from manyroots.engine.page_report import PageReport
from manyroots.engine.snapshots import Snapshots
from manyroots.engine.wire import MessageKind, SubmitReader, decode, encode
from manyroots.engine.wire_key import WIRE_KEY, secure
from manyroots.errors import ManyrootsError
from manyroots.ids import RequestId
from manyroots.messages import Batch
from manyroots.observe.steps import StepRing
from manyroots.process.gc_tuning import keep_for_good, taken_apart_at_exit
from manyroots.process.progress import Progress, in_words, told_to

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


def main(address: str, begin: float) -> int:
    import_s = time.monotonic() - begin
    logging.basicConfig(
        level=os.environ.get("MANYROOTS_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s engine %(levelname)s %(message)s",
    )
    threading.Thread(target=_exit_with_parent, args=(address,), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    if (key := os.environ.pop(WIRE_KEY, None)) is not None:
        secure(socket, key, is_gateway=False)
    socket.connect(address)
    try:
        return _serve(socket, begin, import_s)
    finally:
        socket.close(linger=1000)
        context.term()


def _serve(socket: Socket, begin: float, import_s: float) -> int:
    def tell(progress: Progress) -> None:
        socket.send_multipart(encode(MessageKind.PROGRESS, progress))

    kind, settings = decode(socket.recv_multipart())
    assert kind is MessageKind.SETTINGS
    try:
        with told_to(tell) as seconds:
            seconds["process and imports"] = import_s
            engine = build_engine(settings)
    except ManyrootsError as error:
        _send_reason(socket, str(error))
        return 1
    except Exception as error:
        logger.exception("the engine could not start")
        _send_reason(socket, f"{type(error).__name__}: {error}")
        return 1
    keep_for_good()
    logger.info("engine ready in %.1f s: %s", time.monotonic() - begin, in_words(seconds))
    socket.send_multipart(encode(MessageKind.READY, engine.info))
    try:
        engine.loop.ring = StepRing(engine.info.max_num_seqs)
        snapshots = Snapshots(engine.parts, engine.loop, engine.loop.ring)
        run(socket, engine.loop, snapshots, engine.pages)
    except Exception as error:
        logger.exception("the engine died")
        _send_reason(socket, str(error))
        return 1
    finally:
        engine.loop.close()
    return 0


def _send_reason(socket: Socket, reason: str) -> None:
    """Sends the reason and stays until CLOSE confirms it: a parent on a busy machine may see the
    process's end before its last message. If the parent is gone, this process ends, too."""
    socket.send_multipart(encode(MessageKind.FAILED, reason))
    while decode(socket.recv_multipart())[0] is not MessageKind.CLOSE:
        pass


def run(
    socket: Socket,
    loop: EngineLoop,
    snapshots: Snapshots | None = None,
    pages: PageReport | None = None,
) -> None:
    """Handle messages whenever there are any, step whenever there is work, and sleep otherwise."""
    with _Bell() as bell:
        loop.wake_by(bell.ring)

        def tell_begun(request_ids: list[RequestId]) -> None:
            socket.send_multipart(encode(MessageKind.BEGUN, request_ids))

        loop.tell_begun = tell_begun
        submits = SubmitReader()
        sleeper = zmq.Poller()
        sleeper.register(socket, zmq.POLLIN)
        sleeper.register(bell.ear, zmq.POLLIN)
        while True:
            is_asked = snapshots is not None and snapshots.is_asked
            if not loop.has_work and not is_asked:
                sleeper.poll()
                bell.hush()
            while socket.poll(0):
                frames = socket.recv_multipart()
                if frames[0] == MessageKind.SUBMIT.value:
                    loop.handle(submits.decode(frames))
                    continue
                kind, message = decode(frames)
                if kind is MessageKind.CLOSE:
                    return
                if kind is MessageKind.SNAPSHOT:
                    assert snapshots is not None
                    snapshots.ask(message)
                else:
                    loop.handle(message)
            if loop.has_work:
                outputs = loop.step()
                batch = Batch(
                    outputs,
                    loop.stats(),
                    loop.take_replies(),
                    loop.take_loads(),
                    loop.take_controls(),
                    [] if pages is None else pages.take(),
                )
                socket.send_multipart(encode(MessageKind.BATCH, batch))
            if snapshots is not None and snapshots.is_asked:
                _show(socket, snapshots)


def _show(socket: Socket, snapshots: Snapshots) -> None:
    """Answer the page's oldest question, or continue with it after the next step."""
    snapshot = snapshots.answer()
    if snapshot is not None:
        begin_s = time.thread_time()
        socket.send_multipart(encode(MessageKind.SEEN, snapshot))
        snapshots.encode_cpu_s = time.thread_time() - begin_s


class _Bell:
    """Rung on any thread, it wakes the thread that polls `ear`."""

    def __init__(self) -> None:
        self.ear, self._rope = socketpair()
        self.ear.setblocking(False)
        self._rope.setblocking(False)

    def ring(self) -> None:
        # A full buffer wakes it already; a closed one has no reader left.
        with contextlib.suppress(OSError):
            self._rope.send(b"!")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.ear.recv(4096)

    def __enter__(self) -> _Bell:
        return self

    def __exit__(self, *_: object) -> None:
        self._rope.close()
        self.ear.close()


def _exit_with_parent(address: str) -> None:
    """Standard input is a pipe that the parent holds open; its end means that the parent is gone.
    If that happened before this process connected, the socket's folder still exists."""
    # os.read, not sys.stdin: a thread inside a buffered reader makes the interpreter abort at exit.
    while os.read(0, 4096):
        pass
    socket = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()
    os._exit(1)


if __name__ == "__main__":
    with taken_apart_at_exit():
        sys.exit(main(sys.argv[1], float(sys.argv[2])))
