"""GTE (`gte`) under its name on the hub, where its code is remote."""

from dprjax.models.families import gte

FAMILY = gte.FAMILY._replace(
  read_config=gte.read_config,
  model_type='new',
  class_name='New',
  prefix='new.',
  pad_token_id=0,
  shapes=dict,
  prompted_by='',
  modules=None,
)
