"""EuroBERT (Boizard et al., 2025): Llama without the causal mask."""

from dprjax.models.families import llama

FAMILY = llama.FAMILY._replace(
  model_type='eurobert',
  class_name='EuroBert',
  read_config=lambda hf_config: llama.read_config(
    llama.read_keys(hf_config, llama.Keys, rms_norm_eps=1e-5), 'eurobert', causal=False
  ),
  prompted_by='attention',
  shapes=dict,
)
