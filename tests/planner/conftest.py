"""What the planner's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="package")
def _describe_once() -> Iterator[None]:
    """Models are read once per shape of a batch: lines and clusters do not change them."""
    from torchtitan_dmuon.planner import estimate

    original, known = estimate.describe, {}

    def describe(config: Any) -> Any:
        t = config.training
        key = repr(
            (config.model, t.seq_len, t.local_batch_size, t.mixed_precision_param, config.loss)
            + (config.activation_checkpoint, config.optimizer.per_head)
        )
        if key not in known:
            known[key] = original(config)
        return known[key]

    estimate.describe = describe
    yield
    estimate.describe = original
