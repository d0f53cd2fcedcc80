"""Qwen2.5 state dicts between this package's names and Hugging Face's.

Only names change. Hugging Face's Qwen2 rotates halves, as torchtitan's ``CosSinRoPE`` does, so the
query and key rows need no permutation. Values pass through untouched: plain tensors, DTensors and
the placeholders of a distributed checkpoint all work.
"""

import re
from typing import Any

from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from ..qwen_parts import HF_IGNORED_SUFFIX, HF_TO_LAYER, HF_TO_ROOT
from .model import Qwen2_5Model

__all__ = ["Qwen2_5StateDictAdapter"]

_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

_HF_TO_LAYER = {
    **HF_TO_LAYER,
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}
_ROOT_TO_HF = {ours: hf for hf, ours in HF_TO_ROOT.items()}
_LAYER_TO_HF = {ours: hf for hf, ours in _HF_TO_LAYER.items()}


class Qwen2_5StateDictAdapter(StateDictAdapter):  # type: ignore[misc, unused-ignore]
    """Rename a Qwen2.5 state dict to and from the Hugging Face layout.

    With tied weights the Hugging Face side has no ``lm_head.weight``: ``to_hf`` drops it and
    ``from_hf`` supplies it from the embedding (a ``lm_head.weight`` that is present is kept).
    """

    def __init__(self, model_config: Qwen2_5Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._tied: bool = model_config.enable_weight_tying
        self._num_layers: int = len(model_config.layers)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a new dict with Hugging Face names.

        Raises:
            ValueError: a key is no parameter of this model; the message names it.
        """
        hf_state_dict = {}
        for key, value in state_dict.items():
            if self._tied and key == "lm_head.weight":
                if self.fqn_to_index_mapping:
                    self.fqn_to_index_mapping.pop(key, None)
                continue
            layer = _LAYER.fullmatch(key)
            if layer is None:
                hf_state_dict[self._lookup(_ROOT_TO_HF, key, key)] = value
            else:
                suffix = self._lookup(_LAYER_TO_HF, layer[2], key)
                hf_state_dict[f"model.layers.{self._layer(layer[1], key)}.{suffix}"] = value
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a new dict with this package's names; the argument is left as it was.

        Raises:
            ValueError: a key is no parameter of this model (the message names it), the model
                ties its weights and there is neither an embedding nor a head, or the model's
                RoPE is not ``CosSinRoPE`` (the weights would mean something else).
        """
        self._validate_hf_rope_config(CosSinRoPE.Config)
        state_dict = {}
        for key, value in hf_state_dict.items():
            layer = _HF_LAYER.fullmatch(key)
            if layer is None:
                state_dict[self._lookup(HF_TO_ROOT, key, key)] = value
            elif layer[2] != HF_IGNORED_SUFFIX:
                suffix = self._lookup(_HF_TO_LAYER, layer[2], key)
                state_dict[f"layers.{self._layer(layer[1], key)}.{suffix}"] = value
        if self._tied and "lm_head.weight" not in state_dict:
            if "tok_embeddings.weight" not in state_dict:
                raise ValueError(
                    "Qwen2.5 with tied weights needs 'model.embed_tokens.weight' or "
                    "'lm_head.weight'; the state dict has neither"
                )
            state_dict["lm_head.weight"] = state_dict["tok_embeddings.weight"]
        return state_dict

    @staticmethod
    def _lookup(table: dict[str, str], name: str, key: str) -> str:
        if name not in table:
            raise ValueError(
                f"unknown key {key!r} in a Qwen2.5 state dict; known here: {', '.join(table)}"
            )
        return table[name]

    def _layer(self, index: str, key: str) -> int:
        if int(index) >= self._num_layers:
            raise ValueError(
                f"unknown key {key!r}: this Qwen2.5 model has {self._num_layers} layers, "
                f"numbered from 0"
            )
        return int(index)
