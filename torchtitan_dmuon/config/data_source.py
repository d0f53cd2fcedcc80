"""How the `[dataloader]` section names its data."""

from __future__ import annotations

from pathlib import Path

from torchtitan_dmuon.config.schema import Data
from torchtitan_dmuon.data import LOCAL_FILES, dataset_names


def locate(data: Data) -> tuple[str, str | None]:
    """Return (name of the data set, path). A path given as the name is a set of local files."""
    name = data.dataset
    # Names of data sets have none of these marks, so a mistyped path is still taken for one.
    looks_like_path = any(mark in name for mark in "/*.~") or Path(name).exists()
    is_path = name not in dataset_names() and bool(name) and looks_like_path
    if is_path and data.dataset_path is None:
        return LOCAL_FILES, name
    return name, data.dataset_path
