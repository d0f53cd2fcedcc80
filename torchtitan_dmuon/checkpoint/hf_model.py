"""A model here and at Hugging Face: which tensor is which, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_dmuon.models.hf_config import hf_config
from torchtitan_dmuon.models.registry import get_model_spec

HEAD = "lm_head.weight"
EMBEDDING = "tok_embeddings.weight"


@dataclass(frozen=True, slots=True)
class HFModel:
    """A model and the adapter between its names and Hugging Face's.

    Attributes:
        name: Of the family.
        flavor: Its size.
        config: The model's config.
        hf_config: What `config.json` says of it.
        adapter: torchtitan's state-dict adapter; each tensor is converted for itself.
        tensors: Every tensor of the state dict, on the meta device, by canonical name.
        hf: Hugging Face's names and shapes for each of them: several for a stack of experts, none
            for the head of a tied model.
    """

    name: str
    flavor: str
    config: Any
    hf_config: dict[str, Any]
    adapter: Any
    tensors: dict[str, torch.Tensor]
    hf: dict[str, dict[str, torch.Size]]

    @classmethod
    def of(cls, name: str, flavor: str) -> HFModel:
        """Return a model of the registry; no weights are made.

        Raises:
            ConfigError: unknown name or flavor, or a model that has no Hugging Face form here.
        """
        spec = get_model_spec(name, flavor, attn_backend="sdpa")
        json = hf_config(name, spec.model)
        with torch.device("meta"):
            model: Any = spec.model.build()
        assert spec.state_dict_adapter is not None
        adapter = spec.state_dict_adapter(spec.model, None)
        tensors = dict(model.state_dict())
        found = {key: adapter.to_hf({key: meta}) for key, meta in tensors.items()}
        hf = {
            key: {hf_name: like.shape for hf_name, like in parts.items()}
            for key, parts in found.items()
            if parts
        }
        return cls(name, flavor, spec.model, json, adapter, tensors, hf)

    @property
    def title(self) -> str:
        """The model as messages name it."""
        return f"{self.name} {self.flavor}"

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(self.hf_config["tie_word_embeddings"])

    def to_hf(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a tensor of this model as Hugging Face has it, by name."""
        result: dict[str, torch.Tensor] = self.adapter.to_hf({name: tensor})
        return result

    def from_hf(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of this model, given Hugging Face's in the order of `hf`."""
        given = dict(zip(self.hf.get(name, (HEAD,)), tensors, strict=True))
        if self.tied:
            # The adapters of tied models insist on a head, or on an embedding to take it from.
            given[HEAD] = tensors[0]
        result: torch.Tensor = self.adapter.from_hf(given)[name]
        return result
