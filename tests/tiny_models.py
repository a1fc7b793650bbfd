"""A tiny random model of every causal language model that transformers has.

The model types come from transformers' own mapping. A configuration is made from the defaults of
its class, with every size cut down by name and one layer of every kind the family knows.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class NotConstructible(Exception):
    """No tiny model of this type can be made here; the message says why."""


def config_of(model_type: str) -> PretrainedConfig:
    """A tiny configuration with every kind of layer that the family has."""
    if model_type in NOT_CONSTRUCTIBLE:
        raise NotConstructible(NOT_CONSTRUCTIBLE[model_type])
    config = _tiny(CONFIG_MAPPING[model_type])
    if model_type == "gemma3n":  # its vision tower needs the package timm; text does not use it
        vars(config)["vision_config"] = config.audio_config
    return getattr(config, "decoder", config)  # musicgen: the language model is the decoder


def with_buffer(cache: Any, tokens: int) -> Any:
    """The cache with another buffer than the default."""
    for layer in cache.layers:
        if not hasattr(layer, "stream"):
            continue
        pace = layer.stream.pace
        pace._buffer = tokens
        pace.store(pace.bits, layer.stream.seen)
        if not layer.stream.seen:
            layer.stream.reset()
    return cache


def build(
    model_type: str, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model with random weights, large enough that greedy ids vary."""
    config = config_of(model_type)
    known = type(config) in AutoModelForCausalLM._model_mapping
    named = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    make = AutoModelForCausalLM.from_config if known else named._from_config
    with torch.device("meta"):
        model = make(copy.deepcopy(config), attn_implementation=attention)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size < 5_000_000, f"{model_type} has {size} parameters"
    for seed, factor in itertools.product(range(9), (4.0, 8.0)):  # mostly the first is enough
        torch.manual_seed(seed)
        model = make(copy.deepcopy(config), attn_implementation=attention).float().eval()
        if _enlarge(model, factor) >= 3:
            break
    model.generation_config.eos_token_id = None  # a full-length answer, always
    model.generation_config.forced_eos_token_id = None
    model.generation_config.use_cache = True
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict or ()):
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def _enlarge(model: PreTrainedModel, factor: float) -> int:
    """Multiply weights by `factor`, or by less where that overflows; return the variety of ids.

    Learned sinks are drawn at random, so that they are not 0."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    for name, parameter in model.named_parameters():
        if "sink" in name or name.endswith("self_attn.A"):  # A is a bias of doge
            parameter.normal_()
    torch._foreach_mul_(weights, factor)
    for _ in range(9):
        if variety := _variety(model):
            break
        torch._foreach_mul_(weights, 0.5)
    return variety


@torch.no_grad()
def _variety(model: PreTrainedModel) -> int:
    """The number of different ids in the least varied of three greedy answers, or 0 if a logit is
    not finite."""
    ids = torch.randint(3, 101, (3, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        logits = model(ids).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
    return bool(logits.isfinite().all()) * min(len(row.unique()) for row in ids[:, 12:])


def _tiny(cls: type[PretrainedConfig]) -> PretrainedConfig:
    """`cls` with its defaults, every size at most the one in `_SIZES`."""
    default = cls()
    fields = {field.name: field for field in dataclasses.fields(cls)}
    standard = {own: name for name, own in cls.attribute_map.items()}
    layers, sizes = _layer_types(cls, default), dict(_SIZES)
    # embeddings that are also the output layer would make many models repeat their last token
    values: dict[str, Any] = {"tie_word_embeddings": False}
    if layers:
        own = cls.attribute_map.get("layer_types", "layer_types")
        values["layer_types" if "layer_types" in fields else own] = layers
        sizes["num_hidden_layers"] = len(layers)
    if "kv_lora_rank" in fields:  # latent attention expands to a key and value for every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, field in fields.items():
        own = cls.attribute_map.get(name, name)
        value = vars(default).get(own, field.default)
        if isinstance(value, list):  # an integer that became a list, one for every layer
            value = field.default
        size = next((sizes[n] for n in (standard.get(name), name, own) if n in sizes), None)
        if isinstance(value, PretrainedConfig):
            values[name] = _tiny(type(value))
        elif name in _FIXED:
            values[name] = _FIXED[name]
        elif size is not None and type(value) is int:
            values[name] = min(size, value)
        elif name in ("head_dim", "num_key_value_heads"):  # None: from other sizes
            values[name] = size
    if kinds := list(dict.fromkeys(vars(default).get("mlp_layer_types") or ())):
        kinds = kinds if len(kinds) > 1 else ["dense", "sparse"]
        count = sizes["num_hidden_layers"]
        values["mlp_layer_types"] = (kinds[:-1] + kinds[-1:] * count)[:count]
    window = cls.attribute_map.get("sliding_window", "sliding_window")
    if any("sliding" in kind or "compressed" in kind for kind in layers):
        values |= {window: 8}
        values |= {"use_sliding_window": True} if "use_sliding_window" in fields else {}
    elif window in fields and "None" in str(fields[window].type):
        values |= {window: None}  # all layers would slide
    if "is_decoder" in fields and not default.is_encoder_decoder:
        values |= {"is_decoder": True}
    return cls(**{**values, **_OVERRIDES.get(cls.model_type, {})})


def _layer_types(cls: type[PretrainedConfig], default: PretrainedConfig) -> list[str]:
    """Every kind of layer that the family's own source names, the last kind two times."""
    own = cls.attribute_map.get("layer_types", "layer_types")
    if not {own, "layer_types"} & {field.name for field in dataclasses.fields(cls)}:
        return []
    source = inspect.getsource(sys.modules[cls.__module__])
    if not any("hybrid" in kind for kind in getattr(default, own) or ()):
        # a hybrid model also names the two masks of a hybrid layer
        model = cls.__module__.replace(".configuration_", ".modeling_")
        source += inspect.getsource(importlib.import_module(model))
    kinds = [k for k in ALLOWED_ATTN_LAYER_TYPES if f'"{k}"' in source and k != "moe"][::-1]
    shared = kinds if "num_kv_shared_layers" in vars(default) else []
    return [*kinds, kinds[-1], *shared]


_BY_SIZE: dict[int, str] = {
    512: "max_position_embeddings max_seq_len max_source_positions max_target_positions",
    101: """vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size
        audio_vocab_size encoder_hash_byte_group_vocab shape_vocab_size pronunciation_vocab_size
        ngram_vocab_size_base""",
    96: """intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dff d_ff dim_ff d_inner
        feed_forward_size ffn_hidden_size dense_intermediate_size intermediate_size_mlp mlp_dim""",
    64: """hidden_size embedding_size input_embedding_size output_embedding_size input_size
        word_embed_proj_dim out_hidden_size adapter_out_dim adapter_in_dim adapter_input_size
        projector_input_dim projector_output_dim hidden_size_global encoder_cross_output_size
        lru_width mamba_d_ssm""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size q_lora_rank
        kv_lora_rank o_lora_rank hc_lowrank router_hidden_size image_size pronunciation_embed_dim
        shape_embed_dim ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels""",
    16: """head_dim dim_head d_head attention_head_size swa_head_dim qk_nope_head_dim
        query_pre_attn_scalar index_n_heads index_head_dim index_topk
        linear_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state
        ssm_state_size state_size chunk_size mamba_chunk_size laurel_rank
        hidden_size_per_layer_input""",
    8: """qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim mamba_n_heads mamba_num_heads
        num_heads gated_norm_rank attention_chunk_size window_size attention_window_size
        local_attention_window_len block_size index_block_size patch_size""",
    4: """num_attention_heads decoder_attention_heads encoder_attention_heads
        num_decoder_attention_heads num_encoder_attention_heads conf_num_attention_heads
        swa_num_attention_heads swa_num_key_value_heads linear_num_heads linear_num_value_heads
        n_mamba_heads num_experts num_local_experts n_routed_experts
        moe_num_experts mamba_dt_rank time_step_rank""",
    2: """num_hidden_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers conf_num_hidden_layers num_global_layers num_key_value_heads
        num_experts_per_tok zero_expert_num linear_num_key_heads n_groups n_group o_groups
        num_kv_shared_layers no_rope_layer_interval attn_layer_period index_topk_blocks""",
    1: "first_k_dense_replace num_dense_layers attn_layer_offset topk_group",
}
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
_FIXED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True}

# wider heads than the sliding layers, and two layers that read the keys of others
_GEMMA4 = {"global_head_dim": 32, "num_kv_shared_layers": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: settings that the rules above do not make, by the model type of the (text) configuration
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1, 2]},  # layer types are computed
    "blt": {"num_hidden_layers": 2},  # the class has no default, but its cache needs it
    "cohere_compass_text": {  # None: a layer without positions
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": None}
    },
    "ctrl": {"n_positions": 512},  # 256 by default
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},  # None by default
    "deepseek_v4": {  # so small that 40 tokens are compressed and selected
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 4,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},  # None
    "dots3_note_text": {  # sliding layers have sizes of their own
        "head_dim": 32,
        "per_layer_config": {
            1: {"kv_lora_rank": 16, "q_lora_rank": 16, "head_dim": 24, "qk_rope_head_dim": 8}
        },
    },
    "gemma3n_text": {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0]},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["local", "global", "global"], 1]]},
    "granitemoeshared": {"shared_intermediate_size": 32},  # 0 by default
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "jamba": {"num_hidden_layers": 4},  # every other layer has attention
    "laguna": {"num_attention_heads_per_layer": [8, 4, 4]},
    "longcat_flash": {"head_dim": 8},  # the part with positions
    "minimax": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "musicgen_decoder": {"num_codebooks": 1},  # ids of shape [batch, tokens], as elsewhere
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "full_attention"]
    },
    "qwen4_exp_text": {  # the indexer and the n-gram embeddings are off by default
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 4},
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [32, 16],
        "attn_layers": ["local", "lsh"],
        "hash_seed": 0,  # None: other hashes in every forward
    },
    "xlm": {"causal": True},  # bidirectional by default
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"qk_dim_factor": 1.0},  # the class rounds up to 64
    "xmod": {"default_language": "en_XX"},
}
_ASSISTANT = "Its forward needs the embeddings and the keys of the model that it assists."
NOT_CONSTRUCTIBLE: dict[str, str] = {
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
}
