"""Runs tests of the runtime over each transport: collectives (line C), and the operators (line D).

A test with `each_communication`, or `each_communication_at_length`, runs once with every transport.
Worlds that it starts with `run_world` from here know which, and the `dedicate` helpers of this
folder use it. The operators take over after two micro-batches and a step (`warm_up`); a world in
which they never moved anything fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests import worlds
from torchtitan_dmuon.comm import Event
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.window import Operation

_now = "c10d"


def chosen() -> str:
    """Return what owners communicate over in this test or rank."""
    return _now


@contextmanager
def choose(communication: str) -> Iterator[None]:
    """Have worlds of this process run over `communication`."""
    global _now
    before, _now = _now, communication
    try:
        yield
    finally:
        _now = before


def _each(*marks: Any) -> Any:
    parameters = ["c10d", pytest.param("operators", marks=marks)]
    return pytest.mark.parametrize("communication", parameters, indirect=True)


each_communication = _each()
each_communication_at_length = _each(pytest.mark.long)


def cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function's results, those of each transport for themselves."""

    @functools.cache
    def cached(communication: str, *args: Any) -> Any:
        return function(*args)

    return functools.wraps(function)(lambda *args: cached(_now, *args))


class Chosen:
    """A world's target that runs over the present transport.

    With the operators it raises AssertionError if the target returned without having used them.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target, self._communication = target, _now

    def __call__(self, *args: Any) -> Any:
        with choose(self._communication), _counted() as calls:
            result = self._target(*args)
        if self._communication == "operators":
            assert calls, "nothing moved over the operators"
        return result


def run_world(size: int, target: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`tests.worlds.run_world` over the present transport; one rank has none."""
    return worlds.run_world(size, target if size == 1 else Chosen(target), *args, **options)


def argument(mode: str = "owner") -> dict[str, str]:
    """Return what `dedicate_params` has to be told; the baseline knows collectives only."""
    return {"communication": _now} if mode == "owner" else {}


def warm_up(micro_batch: Callable[[], None], step: Callable[[], None]) -> None:
    """Have the operators take over: two micro-batches and a step. Nothing over collectives."""
    if _now == "operators":
        micro_batch()
        micro_batch()
        step()


Work = Callable[[], None]


def watch(around: Callable[[str, str, Work], Work], *, serial: bool = False) -> None:
    """Replace all work that communicators submit by what `around(kind, label, work)` returns.

    Kinds are gather, reduce, reduce_rows and publish; over the operators all_gather_v and
    reduce_scatter_v. In this process, for good. `serial`: wait for each where it is submitted.
    """
    submit, run = C10dCommunicator._submit, OperatorsCommunicator._run

    def finished(event: Event) -> Event:
        if serial:
            event.wait()
        return event

    def submitting(self: Any, kind: str, label: str, ranks: Any, work: Work, after: Any) -> Event:
        return finished(submit(self, kind, label, ranks, around(kind, label, work), after))

    def running(
        self: Any, operation: Operation, label: str, ranks: Any, work: Work, after: Any
    ) -> Event:
        work = around(operation.name.lower(), label, work)
        return finished(run(self, operation, label, ranks, work, after))

    C10dCommunicator._submit = submitting  # type: ignore[method-assign]
    OperatorsCommunicator._run = running  # type: ignore[method-assign]


@contextmanager
def _counted() -> Iterator[list[str]]:
    """Note the operator calls of this process."""
    calls: list[str] = []
    run = OperatorsCommunicator._run

    def counting(self: Any, operation: Any, *args: Any) -> Any:
        calls.append(operation.name)
        return run(self, operation, *args)

    OperatorsCommunicator._run = counting  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        OperatorsCommunicator._run = run  # type: ignore[method-assign]
