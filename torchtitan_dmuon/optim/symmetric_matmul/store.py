"""The choices of one device and set of libraries, in a JSON file that all processes share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchtitan_dmuon.log import logger

FORMAT = 1
"""Of the file; raised when the meaning of a key, a name or a time changes."""

_LONGEST_SECONDS = 1e6

LOCK_TIMEOUT_SECONDS = 10.0
"""Longest wait for another process that writes; writing takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a measurement found: the backend, seconds per product, and who was dropped why.

    Without seconds it is not from a measurement, for which there was no memory.
    """

    backend: str
    seconds: Mapping[str, float]
    dropped: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: Any, backends: frozenset[str]) -> Choice:
        """Read what `as_json` wrote. Raises ValueError, with the reason, for anything else."""
        if not isinstance(data, dict) or set(data) != {"backend", "seconds", "dropped"}:
            raise ValueError("an entry does not have backend, seconds and dropped")
        backend, seconds, dropped = data["backend"], data["seconds"], data["dropped"]
        if not isinstance(seconds, dict) or not isinstance(dropped, dict):
            raise ValueError("seconds or dropped is not a table")
        for name in [backend, *seconds, *dropped]:
            if not isinstance(name, str) or name not in backends:
                raise ValueError(f"{name!r} is no backend of this version")
        for value in seconds.values():
            if type(value) not in (int, float) or not (0 <= value < _LONGEST_SECONDS):
                raise ValueError(f"{value!r} is no time in seconds")
        # Reasons are printed: what is not printable could do things to a terminal.
        if not all(isinstance(text, str) and text.isprintable() for text in dropped.values()):
            raise ValueError("a reason is no text")
        if backend not in seconds:
            raise ValueError(f"{backend} has no time")
        return cls(backend, seconds, dropped)

    def as_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "seconds": dict(self.seconds),
            "dropped": dict(self.dropped),
        }


class Store:
    """One file. No method raises for what is on disk: at worst choices stay in this process.

    Args:
        folder: Made with mode 0700 at the first write.
        identity: What choices depend on: device model, library versions.
        backends: Names that this version knows.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], backends: frozenset[str]) -> None:
        digest = hashlib.blake2b(json.dumps(sorted(identity.items())).encode(), digest_size=6)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", identity.get("device", "")).strip("-")[:40]
        self.path = folder / f"{slug}-{digest.hexdigest()}.json"
        self._identity = dict(identity)
        self._backends = backends
        self._warned: set[str] = set()
        # Who holds the lock that long will not give it up: waiting for each shape would add up.
        self._patience = LOCK_TIMEOUT_SECONDS

    def read(self) -> tuple[dict[str, Choice], str]:
        """Return the choices by key, and the file's state: "ok", "absent" or what is wrong."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}, "absent"
        except (OSError, UnicodeDecodeError) as error:
            return {}, f"unreadable: {error}"
        try:
            return self._parse(json.loads(text)), "ok"
        except RecursionError:
            return {}, "corrupt: nested too deeply"
        except ValueError as error:
            return {}, f"corrupt or foreign: {error}"

    def choices(self) -> dict[str, Choice]:
        """Return the choices by key; none, with one warning, if the file is not as we write it."""
        choices, state = self.read()
        if state not in ("ok", "absent"):
            self._warn(
                "read", f"{self.path} is ignored, and replaced at the next measurement: {state}"
            )
        return choices

    def add(self, key: str, choice: Choice, usable: Callable[[str], bool]) -> Choice:
        """Keep a choice unless another process was first, and return the one that counts.

        The first one written counts for all: results must not depend on which process or run
        measured. It is replaced only if its backend can not be used here any more.

        Args:
            key: The problem.
            choice: What was measured.
            usable: Whether a backend can be used now.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"), mode=0o600)
            with lock.acquire(timeout=self._patience):
                choices = self.choices()
                if key in choices and usable(choices[key].backend):
                    return choices[key]
                choices[key] = choice
                self._write(choices)
        except Timeout:
            self._warn(
                "write",
                f"another process has held {self.path.with_suffix('.lock')} for "
                f"{self._patience:.0f} s: choices of kernels stay in this process, and the next "
                "run measures again",
            )
            self._patience = 0.0
        except OSError as error:
            self._warn(
                "write",
                f"choices of kernels can not be kept on disk ({error}): they stay in this process, "
                "and the next run measures again",
            )
        return choice

    def _parse(self, data: Any) -> dict[str, Choice]:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if data.get("made_for") != self._identity:
            raise ValueError("it is of another device or other libraries")
        if not isinstance(data.get("choices"), dict):
            raise ValueError("it has no table of choices")
        return {key: Choice.parse(x, self._backends) for key, x in data["choices"].items()}

    def _write(self, choices: Mapping[str, Choice]) -> None:
        """Replace the file. The caller holds the lock: temporary files are of dead processes."""
        for leftover in self.path.parent.glob(f".{self.path.stem}.*.tmp"):
            leftover.unlink(missing_ok=True)
        data = {
            "format": FORMAT,
            "made_for": self._identity,
            "choices": {key: choices[key].as_json() for key in sorted(choices)},
        }
        handle, name = tempfile.mkstemp(
            dir=self.path.parent, prefix=f".{self.path.stem}.", suffix=".tmp"
        )
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(text)
