"""Multi-head latent attention (DeepSeek V2 and V3, Kimi Linear, ...): a cache of latents.

Such a model caches one latent c per token, and the one key k_rot that carries positions; keys
[W_k c, k_rot] and values W_v c of all heads are made from them after the cache. A query then meets
a token as <q, [W_k c, k_rot]> = <[W_k' q, q_rot], [c, k_rot]>, and W_v can be applied after the sum
over tokens instead of before it (DeepSeek-V2, 2405.04434, section 2.1.2: absorption). So a layer's
slots are those of one KV head with keys [c, k_rot] and values c, all attention heads its group, and
every method and every measured error works on them as on any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.errors import UnsupportedError
from kvsketch.hf.layer import SketchLayer
from kvsketch.slots import Slots


class LatentSketchLayer(SketchLayer):
    """A ``SketchLayer`` of latents. Once compressed, slots hold them twice, as part of the key and
    as the value, since a method may change one and not the other."""

    def _slots_of(self, key_states: Tensor, value_states: Tensor) -> Slots:
        both = torch.cat([key_states, value_states], dim=-1)
        return Slots(both, both[..., : key_states.shape[-1]])  # held once, until compressed

    def _to_return(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """All latents and rotated keys while nothing was compressed, for the model to expand;
        afterwards the new ones, since what it makes of them is not used."""
        if self.stream.compressed:
            return key_states, value_states
        keys, values = self.stream.parted.tokens
        return values, keys[..., key_states.shape[-1] :]

    def check_returned(self, module: nn.Module | None, key: Tensor, value: Tensor) -> None:
        """Raise UnsupportedError unless a module expanded just what ``update`` returned."""
        parts = ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "v_head_dim")
        known = all(hasattr(module, name) for name in parts)
        assert self._returned is not None
        tokens = self._returned[0].shape[2]
        if not known or key.shape[2] != tokens or value.shape[2] != tokens:
            raise UnsupportedError(
                f"{type(module).__name__} makes keys and values from latents in a way kvsketch "
                "does not know; use DynamicCache for this model"
            )
        assert module is not None  # no graph takes latents
        self.claim(module)

    def to_slots(self, module: Any, query: Tensor) -> Tensor:
        """Queries against latents: [W_k' q, q_rot]."""
        sizes = [module.qk_nope_head_dim, query.shape[-1] - module.qk_nope_head_dim]
        without, rotated = torch.split(query, sizes, dim=-1)
        keys, _ = _weights(module, query)
        return torch.cat([torch.einsum("bhqd,hdr->bhqr", without, keys), rotated], dim=-1)

    def from_slots(self, module: Any, out: Tensor) -> Tensor:
        """Values of sums of latents: W_v z."""
        _, values = _weights(module, out)
        return torch.einsum("bhqr,hvr->bhqv", out, values)


def _weights(module: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """W_k ``[num_attention_heads, qk_nope_head_dim, rank]`` and W_v ``[.., v_head_dim, rank]``."""
    project = module.kv_b_proj
    if type(project) is nn.Linear:
        weight = project.weight
    else:  # quantised, or with an adapter: what it does to every latent
        identity = torch.eye(project.in_features, dtype=like.dtype, device=like.device)
        weight = project(identity).mT
    both = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[-1])
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    keys, values = torch.split(both.to(like.dtype), sizes, dim=1)
    return keys, values
