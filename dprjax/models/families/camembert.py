"""CamemBERT (Martin et al., 2020): RoBERTa with a French vocabulary."""

from dprjax.models.families import roberta

FAMILY = roberta.FAMILY._replace(
  model_type='camembert',
  class_name='Camembert',
  shapes=lambda: roberta.shapes('camembert', 32005),
)
