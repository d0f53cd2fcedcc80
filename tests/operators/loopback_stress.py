"""Runs both operators over the loopback fabric; started by tests under a sanitizer.

python -m tests.operators.loopback_stress LIBRARY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.operators.loopback import BFLOAT16, GATHER, REDUCE, Layout, Loopback


def main(library: Path) -> None:
    for nodes, rails, chunk, slots in ((2, 2, 64, 1), (3, 1, 32, 2)):
        rng = np.random.default_rng(0)
        lengths = [0, 2, 300, 64, 500]
        owners = [(i % nodes, i % rails) for i in range(len(lengths))]
        chain = Layout.of(lengths, owners)
        star = Layout.of([16, 8], [(0, 0), (1, rails - 1)])
        with Loopback(
            library, nodes, rails, user_bytes=1 << 16, chunk_bytes=chunk, slots=slots
        ) as loopback:
            data = rng.integers(0, 256, (loopback.ranks, chain.total)).astype(np.uint8)
            for rank in range(loopback.ranks):
                loopback.write(rank, 0, data[rank])
            tables = [
                loopback.table(op, BFLOAT16, layout)
                for layout in (chain, star)
                for op in (GATHER, REDUCE)
            ]
            calls = [(table, 8192 * (i % 2), 32768) for i, table in enumerate(tables)]
            loopback.run(calls * 2, seed=1, skew=100_000)
            for at, length, node, rail in chain.segments:
                for rank in range(loopback.ranks):
                    got = loopback.read(rank, at, length)
                    assert np.array_equal(got, data[node * rails + rail][at : at + length])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
