"""The one error type for anything a user can get wrong in a job config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A mistake in a config file or on the command line.

    The message is one line that says where the mistake is, what is wrong and what is expected.
    Entry points print it and exit with status 2, without a traceback.
    """


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the closest of `choices`, or an empty string."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""
