"""How the loss of a rank shows on the others, and what they waited for."""

from __future__ import annotations

import traceback
from pathlib import Path

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "closed by remote",
)
"""What the error of a rank says whose peer died."""

TIMED_OUT = "Timed out waiting"
"""What the error of a rank says whose peer does not answer."""


def is_lost(text: str) -> bool:
    """Whether an error's text says that another rank is gone or does not answer."""
    return any(phrase in text for phrase in (*LOST_PEER, TIMED_OUT))


def awaited(error: BaseException) -> str:
    """Say in which functions of torch a collective was waited for, outermost first.

    FSDP2's own collectives raise what the network says, which names neither module nor operation.
    """
    names = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        in_fsdp = path.parent.name == "_fully_shard" and path.name == "_fsdp_param_group.py"
        if in_fsdp or path.name in ("distributed_c10d.py", "_functional_collectives.py"):
            names.append(frame.name)
    kept = [n for n in names if n not in ("wrapper", "backward", "fn")]
    return ", ".join(dict.fromkeys((kept[0], kept[-1]))) if kept else "a collective"
