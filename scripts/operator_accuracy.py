"""Print how exact ReduceScatterV's sums are, beside those of a ring reduction of the same addends.

    python scripts/operator_accuracy.py

Over shared memory of this machine, with processes as ranks; about a minute on two cores. The
numbers are those of tests/operators/test_shm.py, which asserts what docs/operators.md says of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.operators.accuracy import DTYPES, Accuracy, measure_all
from tests.operators.shm_cases import MESHES, job_name
from tests.worlds import run_world


def row(mesh: tuple[int, int], name: str, ranks: list[dict[str, Accuracy]]) -> str:
    """Return one line of the table; errors are those of the rank where they are largest."""
    found = [rank[name] for rank in ranks]
    ours, ring = max(x.operator for x in found), max(x.ring for x in found)
    bound = max(x.of_bound for x in found)
    return f"| {mesh[0]} x {mesh[1]} | {name} | {ours:.2e} | {ring:.2e} | {bound:.2f} |"


def main() -> None:
    print("| nodes x ranks | payload | relative error | of a ring | largest error / bound |")
    print("|---|---|---|---|---|")
    for mesh in MESHES:
        size = mesh[0] * mesh[1]
        if size == 1:
            continue  # nothing is added
        ranks = run_world(size, measure_all, job_name(), mesh, timeout_seconds=300)
        for name in DTYPES:
            print(row(mesh, name, ranks), flush=True)


if __name__ == "__main__":
    main()
