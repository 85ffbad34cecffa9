"""Former names of options, for errors that give the new names."""

KEYS = {
  'system': 'method',
  'shrink': 'weight_interpolation',
  'data.form': 'data.format',
  'data.train': 'data.mined_negatives',
  'data.store': 'data.token_cache',
  'prompt.anchor': 'prompt.regularization',
  'prompt.anchor_to': 'prompt.regularization_on',
  'template.label_words': 'template.verbalizer',
}
"""Keys of a config, or of a part of a config: ``config.retriever.data.form``."""

FLAGS: dict[str, str] = {
  'kind': 'side',
  'store': 'precision',
}
"""Flags of commands, without their dashes."""


def key(name: str) -> str:
  """The new name of a config key; '' if it has not changed."""
  parts = name.split('.')
  # A task and an alternative may have any name.
  own = 2 * (len(parts) > 2 and parts[0] in ('tasks', 'alternatives'))
  rest = '.'.join(parts[own:])
  for old, new in KEYS.items():
    if f'.{rest}'.endswith(f'.{old}'):
      return '.'.join([*parts[:own], rest.removesuffix(old) + new])
  return ''
