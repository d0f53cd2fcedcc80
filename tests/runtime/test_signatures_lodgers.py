"""What lives in a gradient's place and is none of the gradients that belong there."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn as nn

from tests.runtime.signature_cases import CPU, WIDTH, bytes_of, inputs, lay_out
from torchtitan_dmuon.runtime.signatures import Signatures


def test_a_foreign_tensor_in_a_place_is_told_of() -> None:
    """What else is born in a place, and lives on, is told by `vacate`; it can be moved out if it is
    known, and keeps its value."""
    stranger = nn.Parameter(torch.randn(WIDTH, WIDTH))
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    signatures = Signatures(["weight"], CPU)
    place = lay_out([layer.weight])[0]

    def step(first: torch.Tensor, second: torch.Tensor, seed: int) -> None:
        y = torch.tanh(inputs(seed) @ first.t()) @ second.t()
        y.register_hook(lambda _: signatures.enter(0, {0: place}))
        signatures.begin()
        y.square().mean().backward()
        signatures.leave()

    step(layer.weight, stranger, 0)
    signatures.deliver({0: layer.weight.grad})
    layer.weight.grad = stranger.grad = None
    step(stranger, layer.weight, 1)  # the other order: the stranger's gradient takes the place
    assert stranger.grad.data_ptr() == place.data_ptr()
    want = stranger.grad.clone()
    assert signatures.deliver({0: layer.weight.grad}) == frozenset()
    assert stranger.grad.data_ptr() == place.data_ptr()
    layer.weight.grad = None
    # Where it is expected now, but the stranger still lives in the place that is given.
    step(nn.Parameter(torch.randn(WIDTH, WIDTH)), layer.weight, 2)
    assert layer.weight.grad.data_ptr() != place.data_ptr()
    assert torch.equal(stranger.grad, want)
    assert signatures.deliver({0: layer.weight.grad}) == frozenset()
    (left,) = signatures.vacate(bytes_of(place))
    assert torch.equal(left.memory.view(torch.float32), want.flatten()) and not left.fixed
    assert signatures.vacate(bytes_of(place), [stranger.grad]) == []
    place.fill_(7.0)
    assert torch.equal(stranger.grad, want)
    signatures.close()


def test_what_numpy_reads_stays() -> None:
    """An array of a gradient does not follow a move: while it is kept its place is told of, and
    nothing is born there; a gradient whose array is gone leaves no trace."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    kept: list[np.ndarray] = []
    signatures = Signatures(["weight"], CPU)
    place = lay_out([layer.weight])[0]

    def step(seed: int) -> bool:
        y = layer(inputs(seed))
        y.register_hook(lambda _: signatures.enter(0, {0: place}))
        signatures.begin()
        y.square().mean().backward()
        signatures.leave()
        array = layer.weight.grad.numpy()
        if seed == 2:
            kept.append(array)
        born = signatures.deliver({0: layer.weight.grad}) == {0}
        layer.weight.grad = None
        return born

    assert [step(seed) for seed in range(3)] == [False, True, True]
    want = kept[0].copy()
    (left,) = signatures.vacate(bytes_of(place))
    assert left.memory.numel() == place.nbytes and left.fixed
    assert not step(3)
    assert np.array_equal(kept.pop(), want)
    assert [step(seed) for seed in (4, 5)] == [True, True]
    signatures.close()


def test_a_place_is_for_the_layer_that_it_is_given_for() -> None:
    """What is left over from a layer that has begun is not taken by another of the same number."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    signatures = Signatures(["weight"], CPU)
    place = lay_out([layer.weight])[0]
    for seed in range(4):
        y = layer(inputs(seed))

        def reached(_: torch.Tensor, other: bool = seed == 2) -> None:
            signatures.enter(0, {0: place})
            if other:
                signatures.enter(0, {})

        y.register_hook(reached)
        signatures.begin()
        y.square().mean().backward()
        signatures.leave()
        assert (layer.weight.grad.data_ptr() == place.data_ptr()) == (seed in (1, 3))
        signatures.deliver({0: layer.weight.grad})
        layer.weight.grad = None
    signatures.close()


def test_vacated_memory_is_nobodys_place() -> None:
    """A range that is given to somebody else takes no gradient of who had it, until given anew."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    signatures = Signatures(["weight"], CPU)
    place = lay_out([layer.weight])[0]

    def step(seed: int, *, vacated: bool) -> bool:
        def reached(_: torch.Tensor) -> None:
            signatures.enter(0, {0: place})
            if vacated:
                assert not signatures.vacate(bytes_of(place)[16:80])

        y = layer(inputs(seed))
        y.register_hook(reached)
        signatures.begin()
        y.square().mean().backward()
        signatures.leave()
        gradient, layer.weight.grad = layer.weight.grad, None
        assert (gradient.data_ptr() == place.data_ptr()) == (not vacated and seed > 0)
        return signatures.deliver({0: gradient}) == {0}

    assert [step(i, vacated=v) for i, v in enumerate([False, False, True, False])] == [
        False,
        True,
        False,
        True,
    ]
    counters = signatures.counters()
    assert (counters.hits, counters.misses) == (2, 0)
    signatures.close()
