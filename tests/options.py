"""Configs for tests, from options given as keyword arguments."""

from dprjax.training import config as configs
from dprjax.training import method as methods


def with_options(**options):
  """The default config for a bare encoder; ``prompt__length=3`` is ``config.prompt.length = 3``."""
  config = configs.default(options.get('method', 'dpr'))
  config.pooling, config.normalize = 'cls', False
  config.data.query_max_length, config.data.passage_max_length = 32, 128
  config.data.query_prefix = config.data.passage_prefix = ''
  for name, value in options.items():
    *parents, last = name.split('__')
    node = config
    for parent in parents:
      node = node[parent]
    node[last] = value
  return config


def check_options(config):
  """Raises InputError for options out of range, or that do not go with others or the method."""
  configs.check_ranges(config)
  methods.of(config)
