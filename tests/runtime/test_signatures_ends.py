"""What `Signatures` refuses, and how processes end that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.signature_cases import CPU, aligned_memory
from torchtitan_dmuon.runtime.signatures import Signatures

ROOT = Path(__file__).resolve().parents[2]


def test_bad_places_are_refused() -> None:
    """A place that is not aligned, not contiguous or nobody's is one error that names it."""
    signatures = Signatures(["weight"], CPU)
    memory = aligned_memory(256).view(torch.float32)
    with pytest.raises(ValueError, match="place of parameter 0: starts 4 bytes behind"):
        signatures.enter(0, {0: memory[1:9]})
    with pytest.raises(ValueError, match="place of parameter 0: is not contiguous"):
        signatures.enter(0, {0: memory[::2]})
    with pytest.raises(ValueError, match="place of parameter 1: there are 1"):
        signatures.enter(0, {1: memory[:8]})
    with pytest.raises(ValueError, match="deliver: parameter 3, there are 1"):
        signatures.deliver({3: memory[:8]})
    signatures.close()
    with pytest.raises(RuntimeError, match="used after close"):
        signatures.begin()
    with pytest.raises(ValueError, match="device meta, expected cpu"):
        Signatures(["weight"], torch.device("meta"))


EXIT = """
import torch, torch.multiprocessing as mp
from torchtitan_dmuon.runtime.signatures import Signatures
from tests.runtime.signature_cases import CPU, lay_out

def train(rank=0):
    layer = torch.nn.Linear(8, 8)
    signatures = Signatures(["weight", "bias"], CPU)
    places = dict(enumerate(lay_out(list(layer.parameters()))))
    for _ in range(3):
        layer.weight.grad = layer.bias.grad = None
        y = layer(torch.randn(4, 8))
        y.register_hook(lambda _: signatures.enter(0, places))
        signatures.begin()
        y.square().sum().backward()
        found = signatures.deliver({0: layer.weight.grad, 1: layer.bias.grad})
    assert found == {0, 1}
    return layer, signatures

if __name__ == "__main__":
    kept = train()
    mp.spawn(train, nprocs=1)
    print("done")
"""


@pytest.mark.slow
def test_processes_end_with_tensors_in_places(tmp_path: Path) -> None:
    """A process, and one that it spawns, may end while gradients live in places and the wrapper is
    installed: no crash and no words."""
    script = tmp_path / "end.py"
    script.write_text(EXIT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
