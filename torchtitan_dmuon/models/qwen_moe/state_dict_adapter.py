"""Qwen1.5-MoE state dicts between this package's names and Hugging Face's (qwen2_moe).

The files on the hub have a tensor for each expert; here a projection of all experts is one 3-D
tensor. Nothing else but names changes: Hugging Face's Qwen2-MoE rotates halves, as torchtitan's
`CosSinRoPE` does.
"""

import re
from typing import Any

import torch
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from ..qwen_parts import HF_IGNORED_SUFFIX, HF_TO_LAYER, HF_TO_ROOT
from .model import QwenMoEModel

__all__ = ["QwenMoEStateDictAdapter"]

_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_HF_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERTS = "moe.routed_experts.inner_experts."

_HF_TO_LAYER = {
    **HF_TO_LAYER,
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.shared_expert.gate_proj.weight": "moe.shared_experts.w1.weight",
    "mlp.shared_expert.up_proj.weight": "moe.shared_experts.w3.weight",
    "mlp.shared_expert.down_proj.weight": "moe.shared_experts.w2.weight",
    "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
}
_HF_TO_EXPERTS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
_ROOT_TO_HF = {ours: hf for hf, ours in HF_TO_ROOT.items()}
_LAYER_TO_HF = {ours: hf for hf, ours in _HF_TO_LAYER.items()}
_EXPERTS_TO_HF = {f"{_EXPERTS}{ours}": hf for hf, ours in _HF_TO_EXPERTS.items()}


class QwenMoEStateDictAdapter(StateDictAdapter):  # type: ignore[misc, unused-ignore]
    """Rename a Qwen1.5-MoE state dict to and from the Hugging Face layout.

    `to_hf` gives views of the stacks of experts, `from_hf` copies experts into stacks. Of a stack
    that is a DTensor each expert becomes whole on every rank: large models go through
    `dmuon export` and `dmuon import`, which hold one stack at a time.
    """

    def __init__(self, model_config: QwenMoEModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._num_layers: int = len(model_config.layers)
        self._num_experts: int = model_config.layers[0].moe.num_experts

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a new dict with Hugging Face names.

        Raises:
            ValueError: a key is no parameter of this model; the message names it.
        """
        result = {}
        for key, value in state_dict.items():
            layer = _LAYER.fullmatch(key)
            if layer is None:
                result[self._lookup(_ROOT_TO_HF, key, key)] = value
                continue
            prefix = f"model.layers.{self._index(layer[1], 'layers', self._num_layers, key)}"
            if layer[2] in _EXPERTS_TO_HF:
                kind = _EXPERTS_TO_HF[layer[2]]
                for expert in range(self._num_experts):
                    result[f"{prefix}.mlp.experts.{expert}.{kind}.weight"] = value[expert]
            else:
                result[f"{prefix}.{self._lookup(_LAYER_TO_HF, layer[2], key)}"] = value
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a new dict with this package's names; the argument is left as it was.

        Raises:
            ValueError: a key is no parameter of this model (the message names it), a stack of
                experts is incomplete, or the model's RoPE is not `CosSinRoPE` (the weights would
                mean something else).
        """
        self._validate_hf_rope_config(CosSinRoPE.Config)
        result: dict[str, Any] = {}
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        for key, value in hf_state_dict.items():
            layer = _HF_LAYER.fullmatch(key)
            if layer is None:
                result[self._lookup(HF_TO_ROOT, key, key)] = value
                continue
            if layer[2] == HF_IGNORED_SUFFIX:
                continue
            prefix = f"layers.{self._index(layer[1], 'layers', self._num_layers, key)}"
            expert = _HF_EXPERT.fullmatch(layer[2])
            if expert is None:
                result[f"{prefix}.{self._lookup(_HF_TO_LAYER, layer[2], key)}"] = value
            else:
                index = self._index(expert[1], "experts", self._num_experts, key)
                name = f"{prefix}.{_EXPERTS}{_HF_TO_EXPERTS[expert[2]]}"
                stacks.setdefault(name, {})[index] = value
        for name, found in stacks.items():
            missing = [e for e in range(self._num_experts) if e not in found]
            if missing:
                raise ValueError(f"{name}: no tensor of expert {missing[0]} in the state dict")
            result[name] = torch.stack([found[e] for e in range(self._num_experts)])
        return result

    @staticmethod
    def _lookup(table: dict[str, str], name: str, key: str) -> str:
        if name not in table:
            raise ValueError(
                f"unknown key {key!r} in a Qwen1.5-MoE state dict; known here: {', '.join(table)}"
            )
        return table[name]

    @staticmethod
    def _index(index: str, what: str, count: int, key: str) -> int:
        if int(index) >= count:
            raise ValueError(
                f"unknown key {key!r}: this Qwen1.5-MoE model has {count} {what}, numbered from 0"
            )
        return int(index)
