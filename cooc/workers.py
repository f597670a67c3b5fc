"""How a decoding process begins. Every worker imports this module, so it imports nothing heavy."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

__all__ = ["start"]


def start() -> None:
    """Ctrl-C is for the parent, which stops feeding its workers. One that is killed cannot, so they watch over it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
