"""Nomic Embed (Nussbaum et al., 2024) 1 and 1.5: `gte` without biases, under other names."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dprjax.base.errors import InputError
from dprjax.models.checkpoint_names import Tensor, stack, weights
from dprjax.models.families import bert, gte, llama
from dprjax.models.family import only

# Keys of config.json on the hub, for remote code, and the keys of transformers.
_KEYS = {
  'n_embd': 'hidden_size',
  'n_layer': 'num_hidden_layers',
  'n_head': 'num_attention_heads',
  'n_inner': 'intermediate_size',
  'n_positions': 'max_position_embeddings',
  'layer_norm_epsilon': 'layer_norm_eps',
  'rotary_emb_base': 'rope_theta',
  'embd_pdrop': 'hidden_dropout_prob',
  'attn_pdrop': 'attention_probs_dropout_prob',
}
_ONLY: dict[str, Any] = {
  'moe_every_n_layers': 0,
  'num_experts': 0,
  'prenorm': False,
  'parallel_block': False,
  'use_rms_norm': False,
  'qkv_proj_bias': False,
  'mlp_fc1_bias': False,
  'mlp_fc2_bias': False,
  'causal': False,
  'rotary_emb_fraction': 1,
  'rotary_emb_interleaved': False,
  'rotary_emb_scale_base': None,
}


def _read_config(hf_config: Mapping[str, Any]) -> gte.Config:
  only(hf_config, **_ONLY)
  settings = {_KEYS.get(key, key): value for key, value in hf_config.items()} | {
    key: hf_config[key] for key in _KEYS.values() if key in hf_config
  }
  if 'n_embd' in hf_config:
    act = {'swiglu': 'silu', 'geglu': 'gelu'}.get(settings.get('activation_function', 'swiglu'))
    if act is None:
      raise InputError(
        f'activation_function {settings["activation_function"]!r:.60} is not supported; use swiglu '
        'or geglu'
      )
    settings.setdefault('hidden_act', act)
    if settings.get('rotary_scaling_factor'):
      # For longer texts the base would depend on the length.
      settings['max_position_embeddings'] = settings.get('max_trained_positions', 2048)
  defaults = {'hidden_act': 'silu', 'hidden_dropout_prob': 0.0, 'rope_theta': 1000.0}
  keys = llama.read_keys(settings, gte.Keys, **defaults, type_vocab_size=2)
  return gte.read(keys, 'nomic_bert')


def _write_config(config: gte.Config) -> dict[str, Any]:
  written = gte.write(config)
  del written['rope_theta'], written['rope_scaling']
  scaling = config.rope.written() or {'rope_type': 'default'}
  return written | {'rope_parameters': {'rope_theta': config.rope.theta, **scaling}}


def _layer_tensors(config: gte.Config, num_layers: int) -> Iterator[Tensor]:
  width, inner = config.hidden_size, config.intermediate_size
  qkv = 'query', 'key', 'value'
  return stack(
    num_layers,
    'layers',
    weights('attn.Wqkv', ('attention', qkv[0]), (3 * width, width), False, qkv),
    weights('attn.out_proj', ('attention', 'output'), (width, width), False),
    weights('mlp.fc11', ('mlp', 'up'), (inner, width), False),
    weights('mlp.fc12', ('mlp', 'gate'), (inner, width), False),
    weights('mlp.fc2', ('mlp', 'down'), (width, inner), False),
    weights('norm1', ('after_attention',), (width,)),
    weights('norm2', ('after_mlp',), (width,)),
  )


FAMILY = gte.FAMILY._replace(
  model_type='nomic_bert',
  class_name='NomicBert',
  read_config=_read_config,
  write_config=_write_config,
  tensors=lambda config: gte.tensors(config, 'emb_ln', _layer_tensors(config, config.num_layers)),
  layer_tensors=_layer_tensors,
  canonical=lambda name: name.removeprefix('nomic_bert.').removeprefix('bert.'),
  prefix='nomic_bert.',
  extras=re.compile(r'(pooler|cls|classifier)\.'),
  mlm_tensors=lambda config: bert.mlm_tensors(
    config,
    'cls.predictions.transform.dense',
    'cls.predictions.transform.layer_norm',
    'cls.predictions.bias',
  ),
  mlm_copies=lambda config: {
    'cls.predictions.decoder.weight': 'embeddings.word_embeddings.weight',
    'cls.predictions.decoder.bias': 'cls.predictions.bias',
  },
  mlm_act=lambda config: config.hidden_act,
  pad_token_id=0,
)
