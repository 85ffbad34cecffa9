"""XLM-R (Conneau et al., 2020): RoBERTa with a vocabulary of a hundred languages."""

from dprjax.models.families import roberta

FAMILY = roberta.FAMILY._replace(
  model_type='xlm-roberta',
  class_name='XLMRoberta',
  shapes=lambda: roberta.shapes('xlm-roberta', 250002),
)
