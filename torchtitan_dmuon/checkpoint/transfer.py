"""Write a state as a checkpoint and read it back; every failure is one line, on every rank."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_dmuon.checkpoint.archive import Archive, ArchiveReader, ArchiveWriter
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.meter import Meter
from torchtitan_dmuon.checkpoint.planners import LoadPlanner, SavePlanner
from torchtitan_dmuon.log import logger

T = TypeVar("T")


class _GivenUpError(RuntimeError):
    """A save or load that all ranks have ended, for an error of one."""


def is_first() -> bool:
    """Whether this is the rank that chooses, commits, deletes and logs."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(what: str, choose: Callable[[], T]) -> T:
    """Return on every rank what the first one computes, or raise what it raises. Collective.

    Ranks that look at a shared file system for themselves can see different things.

    Args:
        what: What it is about, for errors.
        choose: Is called on the first rank alone.

    Raises:
        CheckpointError: as raised on the first rank.
        RuntimeError: another rank is lost.
    """
    answer: list[Any] = [None, None]
    if is_first():
        answer = _outcome(choose)
    if dist.is_initialized():
        with _named(f"{what}: waiting for the first rank's choice"):
            dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    result: T = answer[0]
    return result


def on_every_rank(what: str, do: Callable[[], T]) -> T:
    """Return what a call gives on this rank, or raise what it raises on any. Collective.

    Raises:
        CheckpointError: as raised on a rank.
        RuntimeError: another rank is lost.
    """
    result, error = _outcome(do)
    errors: list[Any] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        with _named(f"{what}: waiting for the other ranks"):
            dist.all_gather_object(errors, error)
    for text in errors:
        if text is not None:
            raise CheckpointError(text)
    return result  # type: ignore[no-any-return]


def _outcome(do: Callable[[], Any]) -> list[Any]:
    """Return a call's result and None, or None and its error's text."""
    try:
        return [do(), None]
    except CheckpointError as e:
        return [None, str(e)]
    except OSError as e:
        file = f"{e.filename}: " if e.filename else ""
        return [None, f"{file}{e.strerror or e}"]


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(f"{what}: {' '.join(str(e).split())}") from e


def write(states: dict[str, Any], writer: ArchiveWriter) -> None:
    """Save, and wait until the checkpoint has its name. Collective.

    Raises:
        CheckpointError: it cannot be written; what there was before is as it was.
        RuntimeError: another rank is lost.
    """
    with explained_save(writer), _alone_is_fine():
        save(states, storage_writer=writer, planner=SavePlanner())


def read(states: dict[str, Any], archive: Archive, parts: Iterable[str]) -> Sequence[str]:
    """Load into live tensors, in place. Collective.

    Args:
        states: The state; see `LoadPlanner` for what may differ from the checkpoint.
        archive: What is loaded from.
        parts: Top-level names that are no model's.

    Returns:
        Parameters whose optimizer state starts fresh.

    Raises:
        CheckpointError: it does not fit, or is damaged.
        RuntimeError: another rank is lost.
    """
    if archive.manifest is None and is_first():
        logger.warning(
            "%s has no manifest, as torchtitan's own: it cannot be checked for damage", archive.path
        )
    fresh: list[str] = []
    planner = LoadPlanner(archive, parts, fresh.extend)
    with _explained(f"loading {archive.path} failed", ""), _alone_is_fine():
        load(states, storage_reader=ArchiveReader(archive), planner=planner)
    return fresh


def say_saved(writer: ArchiveWriter, meter: Meter) -> None:
    """Log the size, the time and the memory of a save, on the first rank."""
    if is_first():
        total, largest = (size / 2**20 for size in writer.written)
        logger.info(
            "saved %s: %.1f MiB, at most %.1f by one rank, in %.2f s; %s",
            writer.folder.at(writer.step),
            total,
            largest,
            meter.seconds,
            meter.retained(),
        )


def say_read(archive: Archive, meter: Meter, *, model_only: bool = False) -> None:
    """Log the size, the time and the memory of a load, on the first rank."""
    if is_first():
        logger.info(
            "loaded %s%s: %.1f MiB in all, in %.2f s; %s",
            "the model alone of " if model_only else "",
            archive.path,
            archive.bytes / 2**20,
            meter.seconds,
            meter.retained(),
        )


@contextmanager
def explained_save(writer: ArchiveWriter) -> Iterator[None]:
    """Say what a save was about when it fails, and remove what it has left.

    Raises:
        CheckpointError: it cannot be written.
        RuntimeError: another rank is lost.
    """
    folder = writer.folder
    complete = folder.complete()
    kept = f"; step-{complete[-1]} is kept" if complete else ""
    try:
        with _explained(f"saving {folder.at(writer.step)} failed", kept):
            yield
    except (CheckpointError, _GivenUpError):
        # Only a lost rank may leave others writing.
        if is_first():
            shutil.rmtree(folder.saving(writer.step), ignore_errors=True)
        raise


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        # That there is no process group is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextmanager
def _explained(what: str, kept: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as e:
        _raise(what, kept, {rank: cause for rank, (cause, _) in e.failures.items()})
    except CheckpointError:
        raise
    except RuntimeError as e:
        # A rank is lost. What it was about is what a user wants to read first.
        why = " ".join(str(e).split())
        raise RuntimeError(f"{what}: waiting for the other ranks: {why}") from e


def _raise(what: str, kept: str, causes: dict[int, BaseException]) -> NoReturn:
    for cause in causes.values():
        if isinstance(cause, CheckpointError):
            raise cause
    rank, cause = next(iter(causes.items()))
    if isinstance(cause, OSError):
        file = f": {cause.filename}" if cause.filename else ""
        text = f"{what}: rank {rank}: {cause.strerror or cause}{file}{kept}"
        raise CheckpointError(text) from cause
    text = f"{what}: rank {rank}: {type(cause).__name__}: {cause}{kept}"
    raise _GivenUpError(text) from cause
