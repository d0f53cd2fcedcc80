"""The model registry: names, flavors, and errors that say what to type instead."""

import pytest
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.qwen3 import qwen3_configs

from torchtitan_dmuon.models.registry import get_model_spec, model_flavors, model_names


def test_names_and_flavors_are_listed() -> None:
    """Every supported model and flavor can be discovered, torchtitan's own included."""
    assert model_names() == ["llama3", "qwen2_5", "qwen3", "qwen_moe"]
    assert model_flavors("qwen2_5") == ["debug", "bench", "0.5B", "1.5B", "7B", "32B"]
    assert model_flavors("llama3") == [*llama3_configs, "3.2-3B", "3.1-8B"]
    assert model_flavors("qwen3") == list(qwen3_configs)
    assert model_flavors("qwen_moe") == ["debug", "A2.7B"]


@pytest.mark.parametrize(
    ("name", "flavor"),
    [(name, flavor) for name in model_names() for flavor in model_flavors(name)],
)
def test_every_flavor_builds_a_spec(name: str, flavor: str) -> None:
    """Every listed flavor yields a complete spec under the name and flavor that were asked for."""
    spec = get_model_spec(name, flavor, attn_backend="flex")
    assert (spec.name, spec.flavor) == (name, flavor)
    assert spec.pipelining_fn is not None
    assert spec.state_dict_adapter is not None
    assert callable(spec.parallelize_fn)


@pytest.mark.parametrize("backend", ["flex", "varlen", "sdpa"])
def test_attention_backend_reaches_every_layer(backend: str) -> None:
    """The backend asked for is the backend used, in every layer of every family."""
    expected = {"flex": "FlexAttention", "varlen": "VarlenAttention", "sdpa": "DocumentSDP"}
    for name, flavor in [("qwen2_5", "debug"), ("llama3", "3.2-3B"), ("qwen3", "debugmodel")]:
        spec = get_model_spec(name, flavor, attn_backend=backend)
        for layer in spec.model.layers:
            kind = type(layer.attention.inner_attention).__qualname__
            assert kind.startswith(expected[backend])


def test_specs_do_not_share_configs() -> None:
    """Changing one spec's config (sharding, RoPE length, init) leaves the next one alone."""
    first = get_model_spec("qwen2_5", "debug", attn_backend="flex").model
    second = get_model_spec("qwen2_5", "debug", attn_backend="flex").model
    first.layers[0].attention.rope.max_seq_len = 7
    first.layers[0].attention.wo.param_init.clear()
    assert second.layers[0].attention.rope.max_seq_len == 32768
    assert second.layers[1].attention.wo.param_init
    assert first.layers[1].attention.wo.param_init


@pytest.mark.parametrize(
    ("name", "flavor", "backend", "message"),
    [
        (
            "qwen2.5",
            "debug",
            "flex",
            "unknown model name 'qwen2.5'; did you mean 'qwen2_5'? Valid: llama3, qwen2_5, qwen3, "
            "qwen_moe",
        ),
        (
            "qwen2_5",
            "7b",
            "flex",
            "unknown flavor of qwen2_5 '7b'; did you mean '7B'? Valid: debug, bench, 0.5B, 1.5B,",
        ),
        ("llama3", "3.1-8", "flex", "did you mean '3.1-8B'? Valid: debugmodel, "),
        (
            "qwen2_5",
            "debug",
            "spda",
            "unknown attention backend 'spda'; did you mean 'sdpa'? "
            "Valid: flex, flex_flash, varlen, sdpa",
        ),
        (
            "xyz",
            "debug",
            "flex",
            "unknown model name 'xyz'. Valid: llama3, qwen2_5, qwen3, qwen_moe",
        ),
    ],
)
def test_mistakes_are_explained(name: str, flavor: str, backend: str, message: str) -> None:
    """A wrong name, flavor or backend is an error with the nearest valid choice and the list."""
    with pytest.raises(ValueError) as error:
        get_model_spec(name, flavor, attn_backend=backend)
    assert message in str(error.value)
