"""The patch set that torchtitan 0.3.0 needs: apply it, undo it, and check for it.

Standard library and git only, so that it runs before anything else is installed, and imports
nothing of torch or torchtitan. A record beside the installed package holds the original text of
every patched file; it is what makes undoing exact. Invariant: at every moment, also after a kill,
each file on disk is either the original or what the record on disk says is patched.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TORCHTITAN_VERSION = "0.3.0"
PATCH_FOLDER = (
    Path(__file__).resolve().parent.parent / "patches" / f"torchtitan-{TORCHTITAN_VERSION}"
)
RECORD_NAME = "torchtitan_dmuon_patches.json"
_REINSTALL = f"pip install --force-reinstall --no-deps torchtitan=={TORCHTITAN_VERSION}"


class PatchError(Exception):
    """The installed torchtitan cannot be patched, restored or used; the message says what to do."""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class PatchSet:
    """The patch files of one folder, in the order of their names."""

    patches: tuple[Path, ...]
    files: tuple[str, ...]
    """Paths that the patches change, relative to the folder that holds the package."""
    digest: str

    @classmethod
    def load(cls, folder: Path = PATCH_FOLDER) -> PatchSet:
        """Read the set. Raises PatchError if the folder has no patches."""
        patches = tuple(sorted(folder.glob("*.patch")))
        if not patches:
            raise PatchError(
                f"no patches in {folder}: the patch set is part of the source checkout; "
                "install the package from one (git clone, then pip install -e .)"
            )
        texts = [p.read_text(encoding="utf-8") for p in patches]
        files = sorted({f for t in texts for f in re.findall(r"^\+\+\+ b/(\S+)", t, re.M)})
        return cls(patches, tuple(files), _sha256("\0".join(texts).encode()))


@dataclass(frozen=True, slots=True)
class Record:
    """What was applied: the patch set's digest, and per file its original text and new hash."""

    digest: str
    originals: dict[str, bytes]
    patched: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Record | None:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                raw["patch_set"],
                {f: v["original"].encode() for f, v in raw["files"].items()},
                {f: v["patched_sha256"] for f, v in raw["files"].items()},
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise PatchError(f"{path} is damaged ({e}): delete it, then {_REINSTALL}") from e

    def write(self, path: Path) -> None:
        files = {
            f: {"original": self.originals[f].decode(), "patched_sha256": self.patched[f]}
            for f in self.originals
        }
        text = json.dumps({"patch_set": self.digest, "files": files}, indent=1)
        _replace(path, text.encode())


def _replace(path: Path, data: bytes) -> None:
    """Write `path` atomically; a hard-linked original (a package cache) keeps its content."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Installation:
    """One installed torchtitan.

    Args:
        site: Folder that holds the `torchtitan` package. Default: the one Python would import.

    Raises:
        PatchError: if torchtitan is missing or of another version than 0.3.0.
    """

    def __init__(self, site: Path | None = None) -> None:
        path = sys.path if site is None else [str(site)]
        found = metadata.distributions(name="torchtitan", path=path)
        distribution = next(iter(found), None)
        if distribution is None:
            where = f" in {site}" if site else ""
            raise PatchError(
                f"torchtitan is not installed{where}: pip install torchtitan=={TORCHTITAN_VERSION}"
            )
        if distribution.version != TORCHTITAN_VERSION:
            raise PatchError(
                f"torchtitan {distribution.version} is installed; this package extends "
                f"{TORCHTITAN_VERSION}: {_REINSTALL}"
            )
        self.site = Path(str(distribution.locate_file("")))
        self.record_path = self.site / RECORD_NAME
        # The wheel's own list of hashes tells an original from a file that somebody changed.
        self._wheel_hashes = {
            str(f): base64.urlsafe_b64decode(f.hash.value + "=").hex()
            for f in distribution.files or ()
            if f.hash is not None and f.hash.mode == "sha256"
        }

    def _read(self, name: str) -> bytes:
        try:
            return (self.site / name).read_bytes()
        except FileNotFoundError:
            raise PatchError(f"{self.site / name} is missing: {_REINSTALL}") from None

    def _original(self, name: str, record: Record | None) -> bytes:
        """Return the original text of a file that is original or patched.

        Raises PatchError if it is neither: somebody else's change is never overwritten.
        """
        data = self._read(name)
        wheel = self._wheel_hashes.get(name)
        if wheel == _sha256(data):
            return data
        if record is not None and name in record.patched:
            original = record.originals[name]
            if _sha256(data) == record.patched[name] and wheel in (None, _sha256(original)):
                return original
            if wheel is None and data == original:
                return data
        elif wheel is None:  # an installation without hashes: trust what git can patch
            return data
        raise PatchError(
            f"{self.site / name} is neither torchtitan {TORCHTITAN_VERSION}'s nor patched by this "
            f"package: save your change if it is yours, then {_REINSTALL}"
        )

    def is_patched(self, patches: PatchSet) -> bool:
        """Whether every file is as this very patch set leaves it."""
        record = Record.read(self.record_path)
        if record is None or record.digest != patches.digest:
            return False
        return all(_sha256(self._read(f)) == record.patched.get(f) for f in patches.files)

    def apply(self, patches: PatchSet) -> bool:
        """Apply the set; an older set is undone first. Returns False if nothing was to be done."""
        with self._locked():
            if self.is_patched(patches):
                return False
            record = Record.read(self.record_path)
            originals = {f: self._original(f, record) for f in patches.files}
            results = _patched(originals, patches)
            self._restore(record)
            # The record goes first: see the invariant in the module's docstring.
            Record(patches.digest, originals, {f: _sha256(d) for f, d in results.items()}).write(
                self.record_path
            )
            for name, data in results.items():
                _replace(self.site / name, data)
            return True

    def reverse(self) -> bool:
        """Restore every original, byte for byte. Returns False if nothing was patched."""
        with self._locked():
            record = Record.read(self.record_path)
            self._restore(record)
            return record is not None

    def _restore(self, record: Record | None) -> None:
        if record is None:
            return
        originals = {name: self._original(name, record) for name in record.originals}
        for name, data in originals.items():
            if self._read(name) != data:
                _replace(self.site / name, data)
        self.record_path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not os.access(self.site / "torchtitan", os.W_OK):
            raise PatchError(f"{self.site} is not writable: use a virtual environment of your own")
        fd = os.open(self.site / "torchtitan", os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _patched(originals: dict[str, bytes], patches: PatchSet) -> dict[str, bytes]:
    """Apply the patches to copies of the originals, in a folder of their own."""
    if shutil.which("git") is None:
        raise PatchError("git is needed to apply the patch set: install it and try again")
    with tempfile.TemporaryDirectory(prefix="torchtitan_dmuon-") as folder:
        for name, data in originals.items():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        # Without the ceiling git would look for a repository above the folder and skip files.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        for patch in patches.patches:
            done = subprocess.run(
                ["git", "apply", "--whitespace=nowarn", str(patch)],
                check=False,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                raise PatchError(f"{patch.name} does not apply: {done.stderr.strip()}")
        return {name: Path(folder, name).read_bytes() for name in originals}


def require_patched_torchtitan() -> None:
    """Raise PatchError with the remedy unless torchtitan 0.3.0 is installed and patched."""
    installation = Installation()
    if not installation.is_patched(PatchSet.load()):
        script = Path(__file__).resolve().parent.parent / "scripts" / "apply_patches.py"
        raise PatchError(
            f"torchtitan in {installation.site} lacks this version's patches: "
            f"{Path(sys.executable).name} {script}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of scripts/apply_patches.py. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="apply_patches.py",
        description=f"Patch the installed torchtitan {TORCHTITAN_VERSION} for this project.",
        epilog="Exit status: 0 done (or --check: applied), 1 --check: not applied, 2 error.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only say whether they are applied")
    action.add_argument("--reverse", action="store_true", help="restore the original files")
    parser.add_argument(
        "--site", type=Path, help="folder that holds torchtitan (default: Python's)"
    )
    options = parser.parse_args(arguments)
    try:
        installation, patches = Installation(options.site), PatchSet.load()
        where = f"torchtitan {TORCHTITAN_VERSION} in {installation.site}"
        if options.check:
            applied = installation.is_patched(patches)
            print(f"{where}: {'patched' if applied else 'NOT patched'}")
            return 0 if applied else 1
        if options.reverse:
            done = installation.reverse()
            print(f"{where}: {'restored' if done else 'was not patched'}")
        else:
            done = installation.apply(patches)
            how = "applied" if done else "already applied"
            print(f"{where}: {len(patches.patches)} patches {how}")
    except PatchError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0
