"""Logging: a quiet console on rank 0, and everything in a file per rank."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

logger = logging.getLogger("torchtitan_dmuon")

_DETAILED = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _ForPeople(logging.Filter):
    """Let through this project's own lines, validation losses, and every warning that helps."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        # torchtitan sets these NCCL variables whatever torchrun set them to before.
        if message.startswith("ENV["):
            return False
        return (
            record.levelno >= logging.WARNING
            or record.name.startswith("torchtitan_dmuon")
            or "validate step:" in message
        )


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            message = f"{record.levelname.lower()}: {message}"
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return f"[{self.formatTime(record, '%H:%M:%S')}] {message}"


def end_of_pipe() -> int:
    """Return the exit status after BrokenPipeError: the reader of a pipe (head, less) has had
    enough; nothing is wrong."""
    # What is still buffered goes nowhere, or the interpreter's end would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def init_console(rank: int) -> None:
    """Send messages for people to stdout on rank 0; nothing but errors on the other ranks."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers.clear()
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(_Console())
    console.addFilter(_ForPeople())
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.addHandler(console)
    os.environ["KINETO_LOG_LEVEL"] = "5"  # torch.profiler's own chatter, as torchtitan does


def log_to_file(folder: Path, rank: int) -> Path:
    """Append everything this rank logs, torchtitan's own lines included, to `rank_<N>.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.log"
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_DETAILED))
    logging.getLogger().addHandler(handler)
    return path
