"""Orders and random ids that are a function of a few seed numbers alone."""

import numpy as np
import numpy.typing as npt

from torchtitan_dmuon.config.errors import ConfigError


def permutation(length: int, *seed: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 .. length - 1, int64 [length], drawn from the seed numbers.

    It sorts raw draws of PCG64 and not ``Generator.permutation``: NumPy promises that the first
    stay the same in later versions, so a resumed run does not depend on the version.
    """
    return np.argsort(raw_draws(length, *seed), kind="stable").astype(np.int64)


def raw_draws(length: int, *seed: int) -> npt.NDArray[np.uint64]:
    """Uniform uint64 [length], drawn from the seed numbers (each at least 0)."""
    draws: npt.NDArray[np.uint64] = np.random.PCG64(seed).random_raw(length)
    return draws


def check_seed(seed: int) -> None:
    """Raise ValueError unless ``seed`` can seed a generator."""
    if seed < 0:
        raise ConfigError(f"seed: expected a number of at least 0, not {seed}")
