"""Gradients that are born in their places: the CPU wrapper around torch's allocator, really run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn

from tests.runtime.signature_cases import (
    CPU,
    WIDTH,
    Autocast,
    Checkpointed,
    Embed,
    Odd,
    Residual,
    Rig,
    Twice,
    bytes_of,
    gradients_of,
    inputs,
    lay_out,
)
from torchtitan_dmuon.runtime.signatures import Signatures

Loss = Callable[[int], torch.Tensor]
RIGS: list[Rig] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Every test leaves torch's own allocator behind."""
    yield
    while RIGS:
        RIGS.pop().signatures.close()


def make(*layers: nn.Module, one_range: bool = False) -> tuple[nn.Sequential, Rig]:
    model = nn.Sequential(*layers)
    RIGS.append(Rig(model, one_range=one_range))
    return model, RIGS[-1]


def micro_batch(model: nn.Module, rig: Rig, seed: int, loss: Loss) -> None:
    """Run a micro-batch both ways; gradients must be the same bits."""
    want = gradients_of(model, lambda: loss(seed), seed)
    rig.step(lambda: loss(seed), seed)
    assert rig.taken.keys() == want.keys()
    for name, gradient in want.items():
        if gradient is None:
            assert rig.taken[name] is None, name
        else:
            assert torch.equal(rig.taken[name], gradient.to_dense()), name


def steady(model: nn.Module, rig: Rig, loss: Loss, *, learn: int = 1, measured: int = 4) -> int:
    """Return the hits per micro-batch after `learn` ones; asserts that there are no misses."""
    for seed in range(learn):
        micro_batch(model, rig, seed, loss)
    before = rig.signatures.counters()
    for seed in range(learn, learn + measured):
        micro_batch(model, rig, seed, loss)
    after = rig.signatures.counters()
    assert after.misses == before.misses
    hits, rest = divmod(after.hits - before.hits, measured)
    assert rest == 0
    return hits


@pytest.mark.parametrize("one_range", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "dropout", "checkpoint", "autocast"])
def test_every_gradient_is_born_in_its_place(kind: str, one_range: bool) -> None:
    """After one micro-batch every gradient of ordinary layers is made in its place, with changing
    batch shapes, cast norms, dropout, recomputation and autocast, also if layers share a range."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    block: Callable[[], nn.Module] = {
        "plain": Residual,
        "bfloat16": lambda: Residual(dtype),
        "dropout": lambda: Residual(dropout=0.3),
        "checkpoint": lambda: Checkpointed(dropout=0.3),
        "autocast": Autocast,
    }[kind]
    model, rig = make(block(), block(), block(), one_range=one_range)
    hits = steady(model, rig, lambda seed: model(inputs(seed, dtype)).float().square().mean())
    assert hits == len(rig.parameters)
    assert rig.signatures.unplaceable() == []
    assert rig.signatures.counters().hit_rate == 1


def test_a_weight_used_twice_in_a_layer() -> None:
    """The sum of two gradients is what is found, and it is in its place."""
    model, rig = make(Twice(), nn.Linear(WIDTH, WIDTH))
    assert steady(model, rig, lambda seed: model(inputs(seed)).square().mean()) == 3


def test_a_layer_used_twice() -> None:
    """A layer that runs twice, with another one between, gets its gradients in place."""
    model, rig = make(Residual(), nn.Linear(WIDTH, WIDTH), one_range=False)
    first, between = model

    def loss(seed: int) -> torch.Tensor:
        return first(between(first(inputs(seed)))).square().mean()

    assert steady(model, rig, loss) == len(rig.parameters)


def test_tied_weights() -> None:
    """An embedding that is the output head too: born in the head's backward or the embedding's."""
    embed, head = Embed(), nn.Linear(WIDTH, 16, bias=False)
    head.weight = embed.embedding.weight
    model, rig = make(embed, Residual(), head)

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(torch.randint(16, (2, 5))).logsumexp(-1).mean()

    assert steady(model, rig, loss) == len(rig.parameters)


def test_odd_gradients_are_copied_and_named() -> None:
    """Views of a larger gradient, transposed and sparse ones never are in place: they are copied,
    given up by name, and spoil neither values nor the hit rate; the others are in place."""
    torch.manual_seed(0)
    model, rig = make(Odd(), nn.Linear(WIDTH, WIDTH))
    hits = steady(model, rig, lambda seed: model(inputs(seed)).square().mean(), learn=4)
    odd = {"0.first", "0.second", "0.transposed", "0.table.weight"}
    assert set(rig.signatures.unplaceable()) == odd
    assert hits == len(rig.parameters) - len(odd)
    assert rig.signatures.counters().hit_rate == 1


def test_shared_gradient_memory_is_nobodys_place() -> None:
    """One gradient that is handed over for two parameters is copied for both: it was born in the
    first one's place before the second came, and is moved out."""
    signatures = Signatures(["a", "b"], CPU)
    weight = nn.Parameter(torch.randn(4, 4))
    places = dict(enumerate(lay_out([weight, weight])))
    for seed in range(6):
        y = inputs(seed).mean() * torch.tanh(weight)
        y.register_hook(lambda _: signatures.enter(0, places))
        signatures.begin()
        y.square().sum().backward()
        signatures.leave()
        gradient, weight.grad = weight.grad, None
        if seed < 2:
            delivery = signatures.deliver({0: gradient})
            assert delivery == ({0} if seed else set())
            continue
        want = gradient.clone()
        delivery = signatures.deliver({0: gradient, 1: gradient.view(-1)})
        assert delivery == frozenset()
        for place in places.values():
            place.fill_(7.0)
        assert torch.equal(gradient, want)
    assert signatures.unplaceable() == ["a", "b"]
    signatures.close()


def test_accumulation_into_an_older_gradient() -> None:
    """A gradient that autograd adds to the one before is copied, with the right value, and the
    temporary that fired in the place is gone by then; afterwards the parameter is placed again."""
    layer = nn.Linear(WIDTH, WIDTH)
    model, rig = make(layer)

    def loss(seed: int) -> torch.Tensor:
        return model(inputs(seed)).square().mean()

    assert steady(model, rig, loss) == 2
    old = torch.randn(WIDTH, WIDTH)
    want = gradients_of(model, lambda: loss(9), 9)
    layer.weight.grad = old.clone()
    rig.step(lambda: loss(9), 9)
    assert torch.equal(rig.taken["0.weight"], old + want["0.weight"])
    assert rig.signatures.counters().misses == 1
    assert steady(model, rig, loss) == 2


def test_parameters_without_a_gradient() -> None:
    """Frozen and unused parameters are delivered as none, and disturb nobody."""
    layer = Residual()
    layer.up.bias.requires_grad_(False)
    model, rig = make(layer, nn.Linear(WIDTH, WIDTH))

    def loss(seed: int) -> torch.Tensor:
        x = inputs(seed)
        return (model(x) if seed != 3 else model[0](x)).square().mean()

    for seed in range(6):
        used = [name for name, p in model.named_parameters() if p.requires_grad]
        rig.step(lambda seed=seed: loss(seed), seed)
        want = torch.autograd.grad(
            _seeded(loss, seed), [model.get_parameter(n) for n in used], allow_unused=True
        )
        for name, gradient in zip(used, want, strict=True):
            assert (gradient is None) == (rig.taken[name] is None)
            assert gradient is None or torch.equal(rig.taken[name], gradient)
        assert rig.taken["0.up.bias"] is None
    # Of the fourth micro-batch the first layer's calls have the same numbers as ever.
    assert rig.signatures.counters().misses == 0


def _seeded(loss: Loss, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return loss(seed)


def test_a_changed_program_is_copied_once_and_learned_anew() -> None:
    """Two weights of one shape change their order: each is born in the other's place, is moved out
    before anything is written, and both are in their own places in the next micro-batch."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH, bias=False)
            self.b = nn.Linear(WIDTH, WIDTH, bias=False)
            self.swapped = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
            return second(torch.tanh(first(x)))

    pair = Pair()
    model, rig = make(pair)

    def loss(seed: int) -> torch.Tensor:
        return model(inputs(seed)).square().mean()

    assert steady(model, rig, loss) == 2
    pair.swapped = True
    micro_batch(model, rig, 20, loss)
    counters = rig.signatures.counters()
    assert (counters.misses, counters.relearned) == (2, 2)
    micro_batch(model, rig, 21, loss)
    assert rig.signatures.counters().hits == counters.hits + 2
    assert rig.signatures.counters().misses == 2


def test_an_erratic_parameter_is_given_up() -> None:
    """Whoever is made elsewhere every time is copied, after eight misses without firing."""

    class Flip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH, bias=False)
            self.b = nn.Linear(WIDTH, WIDTH, bias=False)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (self.a, self.b) if self.calls % 2 else (self.b, self.a)
            return second(torch.tanh(first(x)))

    flip = Flip()
    model, rig = make(flip)
    for seed in range(12):
        flip.calls = seed
        micro_batch(model, rig, seed, lambda seed: model(inputs(seed)).square().mean())
    assert set(rig.signatures.unplaceable()) == {"0.a.weight", "0.b.weight"}
    assert rig.signatures.counters().misses == 16


def test_a_kept_gradient_keeps_its_value() -> None:
    """Who holds a parameter's gradient beyond its delivery does not see the next one in it."""
    layer = nn.Linear(WIDTH, WIDTH)
    kept: list[torch.Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    model, rig = make(layer)
    for seed in range(5):
        micro_batch(model, rig, seed, lambda seed: model(inputs(seed)).square().mean())
        assert len(kept) == seed + 1
        for old, gradient in enumerate(kept):
            want = gradients_of(model, lambda old=old: model(inputs(old)).square().mean(), old)
            assert torch.equal(gradient, want["0.weight"])
    assert rig.signatures.counters().hits == 8
    # The last one still lives in its place until that is needed.
    place = rig.places[0]
    assert kept[-1].data_ptr() == place.data_ptr()
    assert not rig.signatures.vacate(bytes_of(place))
    assert kept[-1].data_ptr() != place.data_ptr()
    assert torch.equal(kept[-1].flatten(), place)


def test_a_failed_backward_leaves_nothing() -> None:
    """After an exception inside a layer's backward nothing that follows lands in a place, and the
    next micro-batch is as any other."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            if failing:
                raise ArithmeticError("on purpose")
            return gradient.clone()

    failing = False
    model, rig = make(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def loss(seed: int) -> torch.Tensor:
        return model[1](Failing.apply(model[0](inputs(seed)))).square().mean()

    assert steady(model, rig, loss) == 4
    failing = True
    with pytest.raises(ArithmeticError):
        rig.step(lambda: loss(9), 9)
    failing = False
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in rig.places.values()]
    held = [torch.empty(WIDTH, WIDTH) for _ in range(50)] + [torch.empty(WIDTH) for _ in range(50)]
    for tensor in held:
        assert not any(begin <= tensor.data_ptr() < end for begin, end in places)
    for parameter in rig.parameters:
        parameter.grad = None
    assert steady(model, rig, loss, learn=0) == 4
    assert rig.signatures.counters().misses == 0


def test_other_threads_do_not_count() -> None:
    """What other threads allocate during a layer's backward neither shifts numbers nor gets a
    place."""
    model, rig = make(Residual(), Residual())
    stop = threading.Event()

    def noise() -> None:
        while not stop.is_set():
            torch.empty(WIDTH, WIDTH)
            torch.empty(WIDTH)

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        hits = steady(model, rig, lambda seed: model(inputs(seed)).square().mean())
    finally:
        stop.set()
        thread.join(timeout=30)
    assert hits == len(rig.parameters)


def test_two_models_at_once() -> None:
    """Two tables in two threads: each backward uses its own places only; closing one leaves the
    other at work."""
    made = [make(Residual(), Residual()) for _ in range(2)]
    failures: list[BaseException] = []

    def train(model: nn.Sequential, rig: Rig) -> None:
        try:
            for seed in range(6):
                rig.step(lambda: model(inputs(seed)).square().mean(), seed)  # noqa: B023
            counters = rig.signatures.counters()
            assert counters.misses == 0
            assert counters.hits == 5 * len(rig.parameters)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=pair) for pair in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    made[0][1].signatures.close()
    model, rig = made[1]
    hits = steady(model, rig, lambda seed: model(inputs(seed)).square().mean(), learn=0)
    assert hits == len(rig.parameters)


def test_learning_without_places() -> None:
    """Micro-batches that give no places are learned from: the first one that does has only hits."""
    model, rig = make(Residual())
    rig.learn_only = True
    micro_batch(model, rig, 0, lambda seed: model(inputs(seed)).square().mean())
    rig.learn_only = False
    assert steady(model, rig, lambda s: model(inputs(s)).square().mean(), learn=0) == len(
        rig.parameters
    )
