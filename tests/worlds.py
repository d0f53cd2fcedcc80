"""Worlds of several ranks for tests: processes with gloo on this machine, ready in milliseconds.

Ranks are forked from a server that has imported torchtitan once and has run nothing, so that a
world costs no imports. Every world has a time limit; reaching it fails the test and ends its ranks.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torchtitan_dmuon.config.build"])


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time; the message has its traceback."""


def _main(
    pipe: Connection, rank: int, size: int, port: int, target: Callable[..., Any], args: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        # The parent hosts the store, so no port has to be guessed.
        TORCHELASTIC_USE_AGENT_STORE="True",
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    try:
        pipe.send(("result", target(*args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        # At once: a rank that waits for this one must not keep its sockets open.
        os._exit(1)
    finally:
        pipe.close()


class World:
    """Ranks that run; what each returns or raises comes through its pipe.

    Args:
        size: Number of ranks.
        target: A function of a test module (it is imported by name).
        *args: Its arguments; they and the results travel by pickle.
        timeout_seconds: Limit of the ranks' waiting for each other at the start.
    """

    def __init__(
        self, size: int, target: Callable[..., Any], *args: Any, timeout_seconds: float = 60
    ) -> None:
        limit = timedelta(seconds=timeout_seconds)
        self.store = TCPStore("localhost", 0, is_master=True, timeout=limit)
        self.ranks: list[Any] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_main, args=(theirs, rank, size, self.store.port, target, args), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(ours)

    def survivors(self, victim: int, seconds: float) -> list[Any]:
        """Return what the ranks but `victim` returned, and end all; each has so many seconds."""
        results = []
        try:
            for rank, pipe in enumerate(self.pipes):
                if rank == victim:
                    continue
                assert pipe.poll(seconds), f"rank {rank} still waits"
                kind, value = pipe.recv()
                assert kind == "result", value
                results.append(value)
        finally:
            self.end()
        return results

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.ranks:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def run_world(
    size: int, target: Callable[..., Any], *args: Any, timeout_seconds: float = 60
) -> list[Any]:
    """Run `target(*args)` on `size` ranks whose environment is torchrun's.

    Args:
        size: Number of ranks.
        target: A function of a test module (it is imported by name).
        *args: Its arguments; they and the results travel by pickle.
        timeout_seconds: Limit for the whole world.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailed: with the traceback of the first rank that failed.
    """
    world = World(size, target, *args, timeout_seconds=timeout_seconds)
    try:
        return _collect(world.pipes, time.monotonic() + timeout_seconds)
    finally:
        world.end()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        left = deadline - time.monotonic()
        open_pipes = [p for rank, p in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, max(0.0, left))
        if not ready:
            missing = sorted(set(range(len(pipes))) - results.keys())
            raise RankFailed(f"ranks {missing} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} died") from None
            if kind == "error":
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def pack(value: Any) -> bytes:
    """Return bytes for a result: tensors must not travel as handles of a rank's files."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what `pack` was given."""
    return torch.load(io.BytesIO(data), weights_only=False)


def ranks_of(launcher: int) -> dict[int, int]:
    """Return the process ids of the ranks that a launcher's process has started, by rank."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            if f"PPid:\t{launcher}\n" not in text or "State:\tZ" in text:
                continue
            environment = status.with_name("environ").read_bytes().split(b"\0")
            ranks = [e for e in environment if e.startswith(b"RANK=")]
            found[int(ranks[0][5:])] = int(status.parent.name)
        except (OSError, IndexError):
            continue
    return found
