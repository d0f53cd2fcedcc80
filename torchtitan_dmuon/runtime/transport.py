"""Which communicator moves a model's groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch

from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.streams import CommunicationError

logger = logging.getLogger("torchtitan_dmuon")

Mode = Literal["owner", "gather"]
Communication = Literal["c10d", "operators", "auto"]
OpenCommunicator = Callable[
    [Sequence[Sequence[int]], torch.device, timedelta | None], C10dCommunicator
]


class OperatorsRefused(CommunicationError):
    """This job cannot use the operators; says which rank lacks what."""


def open_communicator(
    communication: Communication | OpenCommunicator,
    mode: Mode,
    grid: Sequence[Sequence[int]],
    device: torch.device,
    timeout: timedelta | None,
) -> C10dCommunicator:
    """Open what moves a model's groups. Collective over the grid.

    Args:
        communication: See `dedicate_params`.
        mode: "gather" knows collectives only.
        grid: Global rank at each (row, column).
        device: Where groups live.
        timeout: Limit of an operation; None: 30 minutes.

    Raises:
        ValueError: mode "gather" with the operators.
        OperatorsRefused: "operators", and a rank cannot use them.
    """
    if callable(communication):
        return communication(grid, device, timeout)
    if communication == "c10d" or (communication == "auto" and mode == "gather"):
        return C10dCommunicator(grid, device, timeout)
    if mode == "gather":
        raise ValueError('communication: mode gather, the baseline, knows "c10d" only')
    found = OperatorsCommunicator(grid, device, timeout)
    found.optional = communication == "auto"
    refusal = found.refusal()
    if refusal is not None:
        refuse(found, refusal)
    return found


def refuse(communicator: OperatorsCommunicator, refusal: str) -> None:
    """Go on without the operators, if they are optional. All ranks call it alike.

    Raises:
        OperatorsRefused: they are not.
    """
    if not communicator.optional:
        raise OperatorsRefused(
            f'communication="operators": {refusal}; "auto" takes "c10d" where they cannot run'
        )
    if communicator.rank == 0:
        logger.info("communication: c10d, the operators cannot run: %s", refusal)
    # Without a pool it is the communicator over c10d.
    communicator.refused = refusal


def uses_pool(communicator: C10dCommunicator | None) -> bool:
    """Whether a pool is to be opened for it."""
    return isinstance(communicator, OperatorsCommunicator) and communicator.refused is None
