"""Every architecture that mlx-lm can build, small and with random weights: import as `from architectures import ...`.

A configuration is `COMMON`, which every architecture reads what it knows of, and what the table adds to that. Sizes are
such that each kind of layer occurs, windows fill within a prompt, and sparse attention has something to leave out.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.bitlinear_layers import BitLinear

VOCABULARY = 96
WINDOW = 12

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
    # Experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    # Latent attention, and its index
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": WINDOW,
    # Gated delta
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    # Granite
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}

_SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
_ROPES = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in _SLIDING_FULL}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
_GPT: dict[str, Any] = {"n_ctx": 512, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 512, "n_inner": 48}
_MAMBA_2: dict[str, Any] = {"conv_kernel": 4, "n_groups": 2, "use_conv_bias": True, "time_step_limit": (0.001, 100.0)}
_KIMI_LINEAR: dict[str, Any] = {
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 512,
}
_NAS_BLOCK = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Klear": {"mlp_only_layers": [0], "decoder_sparse_step": 2},
    "afm7": {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"layer_types": _SLIDING_FULL, "num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe": {"use_qk_norm": True},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 24},
    "bitnet": {},
    "cohere": {"num_key_value_heads": 4, "logit_scale": 1.0},
    "cohere2": {"sliding_window_pattern": 2, "logit_scale": 1.0},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {},
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v3": {"rope_scaling": _YARN},
    "deepseek_v32": {},
    "deepseek_v41": {
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_hidden_layers": 3,
        "compress_ratios": (0, 4, 4),
        "kv_source_layer_ids": (0, 1, 2),
        "index_source_layer_ids": (0, 1, 2),
        "index_topk": 2,
        "hc_sinkhorn_iters": 3,
    },
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLG"},
    "exaone_moe": {"layer_types": _SLIDING_FULL, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
    },
    "gear": {"layer_types": ["sliding_attention", "conv_mixer", "full_attention", "conv_mixer"]},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "gemma3": {"text": "gemma3_text"},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gemma3n": {
        "text": None,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "layer_types": _SLIDING_FULL,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 4,
    },
    "gemma4": {"text": "gemma4_text"},
    "gemma4_text": {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "layer_types": _SLIDING_FULL,
    },
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": _SLIDING_FULL},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "helium": {},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW, "num_hidden_layers": 2},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text": None},
    "kimi_k3": {**_KIMI_LINEAR, "text": None},
    "kimi_linear": _KIMI_LINEAR,
    "kimi_vl": {"text": None},
    "laguna": {"layer_types": _SLIDING_FULL},
    "lfm2": {
        "conv_bias": True,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "lfm2-vl": {"text": "lfm2"},
    "lfm2_moe": {
        "conv_bias": True,
        "conv_L_cache": 3,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "full_attn_idxs": [1, 3],
    },
    "lille-130m": {**_GPT, "n_embd": 96, "block_size": 512, "n_kv_heads": 2},
    "llama": {"layer_types": _SLIDING_FULL},
    "llama4": {
        "text": None,
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [0, 1, 0, 1], "use_qk_norm": True},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 4,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4},
    "mamba2": {**_MAMBA_2, "num_heads": 4, "state_size": 8, "time_step_rank": 4, "intermediate_size": 32},
    "mellum": {"layer_types": _SLIDING_FULL, "rope_parameters": _ROPES},
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "rope_scaling": {"original_max_position_embeddings": 512, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    },
    "minimax": {"rotary_dim": 4},
    "minimax_m3_vl": {
        "text": None,
        "dense_intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_layer_freq": None,
        "layer_types": ["full_attention", "sparse", "full_attention", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "ministral3": {
        "layer_types": _SLIDING_FULL,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral3": {"text": "llama"},
    "mistral4": {
        "rope_parameters": {
            **_YARN,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "mixtral": {},
    "muse_glimmer": {"layer_types": _SLIDING_FULL, "output_multiplier": 1.0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            _NAS_BLOCK,
            {**_NAS_BLOCK, "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
            {**_NAS_BLOCK, "ffn": {"ffn_mult": None, "no_op": False, "replace_with_linear": True}},
            {**_NAS_BLOCK, "attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False}},
        ]
    },
    "nemotron_h": {
        **_MAMBA_2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 24,
        "hybrid_override_pattern": ["M", "*", "E", "-", "M"],
    },
    "olmo2": {},
    "olmo3": {"layer_types": _SLIDING_FULL},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 8],
        "num_kv_heads": [2, 4],
        "ffn_multipliers": [1.0, 2.0],
        "share_input_output_layers": False,
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 4,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 4,
            "short_mscale": 1.2,
        }
    },
    "phixtral": {"num_vocab": VOCABULARY, "model_dim": 32, "num_heads": 2, "num_layers": 4, "rotary_dim": 8},
    "pixtral": {"text": "llama"},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 8,
        "attention_window_size": 512,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
        "mamba_chunk_size": 8,
    },
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 8},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {"text": "qwen2"},
    "qwen3": {},
    "qwen3_5": {"text": None, "full_attention_interval": 2, "num_experts": 0},
    "qwen3_5_moe": {"text": None, "full_attention_interval": 2},
    "qwen3_moe": {},
    "qwen3_next": {"full_attention_interval": 2, "partial_rotary_factor": 0.5},
    "qwen3_vl": {"text": "qwen3"},
    "qwen3_vl_moe": {"text": "qwen3_moe"},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "seed_oss": {},
    "smollm3": {"layer_types": _SLIDING_FULL, "no_rope_layer_interval": 2},
    "solar_open": {"partial_rotary_factor": 1.0},
    "spark2_5": {"layer_types": _SLIDING_FULL, "rope_parameters": _ROPES},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": {},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": _SLIDING_FULL,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 24,
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {},
}

_WEIGHTS: dict[str, tuple[int, float]] = {
    "apertus": (0, 1.0),
    "gemma2": (3, 2.0),
    "gemma3n": (0, 6.0),
    "gpt2": (2, 2.0),
    "gpt_neox": (3, 2.0),
    "gptj": (1, 3.0),
    "nanochat": (2, 2.0),
    "openelm": (1, 2.0),
    "phi": (2, 2.0),
    "phi3small": (1, 3.0),
    "phixtral": (2, 2.0),
    "starcoder2": (3, 2.0),
}
"""Seed and scale, where greedy output would collapse to a few tokens with the usual ones (0 and 2)."""

CANNOT_BE_BUILT = {
    "muse_spark": "its attention, norms and experts exist as Metal kernels only",
    "olmo": "needs the package ai2-olmo, and exits the process without it",
    "prism_hadamard_qwen35": "qwen3_5 with packed 2-bit weights: has no random weights, only a checkpoint's",
}

FAULTS_OF_MLX_LM = {
    "phi3small": "adds a boolean mask to the attention scores, so that the rows of a pass see the later ones; "
    "localspec notices and drafts nothing, so that ids are the same with speculation on and off, but a turn that uses "
    "the cache differs from a cold run, whose prompt has other passes",
    "plamo3": "lets the rows of a longer pass attend to one token more than a pass of one row can; localspec always "
    "takes the latter's window, so its ids are not those of mlx-lm's loop where the prompt is longer than the window",
}
"""Where mlx-lm does not agree with itself, and what comes of it."""

_HELPERS = "activations base bitlinear_layers cache gated_delta mla pipeline rope_utils ssm switch_layers"
HELPERS = frozenset(_HELPERS.split())
"""Modules of mlx_lm.models that are no architectures."""


def modules() -> set[str]:
    """The modules in mlx_lm.models."""
    package = importlib.import_module("mlx_lm.models")
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def configuration(name: str) -> dict[str, Any]:
    """The small configuration of an architecture, as a config.json would hold it."""
    added = dict(ARCHITECTURES[name])
    if "text" not in added:
        return {**COMMON, "model_type": name, **added}
    text = added.pop("text")
    return {
        "model_type": name,
        "vocab_size": VOCABULARY,
        "text_config": {**COMMON, "model_type": name, **added} if text is None else configuration(text),
    }


def build(name: str, seed: int | None = None, scale: float | None = None) -> Any:
    """The architecture with random weights in float32, the same ones for the same seed and scale."""
    chosen = _WEIGHTS.get(name, (0, 2.0))
    seed, scale = chosen[0] if seed is None else seed, chosen[1] if scale is None else scale
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(configuration(name)))
    if name == "bitnet":
        _without_ternary_weights(model)
    if name == "phi3small":
        # Logits that it blanks, by ids far beyond the small vocabulary: MLX would write out of bounds.
        model._dummy_tokenizer_ids = mx.array([VOCABULARY - 1])
    keys = iter(mx.random.split(mx.random.key(seed), 1024))
    for _, part in model.named_modules():
        for key, value in list(part.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                part[key] = _random(key, value, next(keys), scale)
    model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return model


def _random(name: str, value: mx.array, key: mx.array, scale: float) -> mx.array:
    """Matrices get normal weights of standard deviation scale / sqrt(inputs), biases small ones; norms stay."""
    if value.ndim > 1:
        depthwise = value.ndim == 3 and value.shape[-1] == 1
        inputs = value.shape[1] if depthwise else value.shape[-1]
        return mx.random.normal(value.shape, key=key) * (scale / inputs**0.5)
    if name.endswith("bias"):
        return value + mx.random.normal(value.shape, key=key) * 0.1
    # A factor that a checkpoint would bring, and that would blank its branch as it is.
    return mx.ones_like(value) if name.endswith("scale") else value


def _without_ternary_weights(model: Any) -> None:
    """Ordinary matrices for BitNet's packed ones, whose product exists as a Metal kernel only."""
    for _, part in model.named_modules():
        for key, value in list(part.items()):
            if isinstance(value, BitLinear):
                part[key] = nn.Linear(value.in_features, value.out_features, bias=value.bias is not None)
