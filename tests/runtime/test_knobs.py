import itertools
import pathlib

import pytest

from dprjax.runtime import config as configs
from dprjax.runtime import knobs
from tests.refusals import refused


def test_every_knob_of_the_file_is_explained():
  source = pathlib.Path(knobs.__file__).read_text()
  body = source[source.index('c = types.Simple') : source.index('  return c\n')]
  lines = body.splitlines()
  # A comment stands behind its knob or, where it is long, on the lines above.
  written = [
    (line, '#' in line or above.strip().startswith('#'))
    for above, line in itertools.pairwise(lines)
    if line.strip().startswith('c.') and 'SimpleNamespace()' not in line and 'c.mesh.' not in line
  ]
  assert len(written) > 40
  unexplained = [line.split('=')[0].strip() for line, explained in written if not explained]
  # What the name itself says.
  assert set(unexplained) <= {
    'c.optim.learning_rate',
    'c.optim.weight_decay',
    'c.optim.b1',
    'c.optim.b2',
    'c.optim.eps',
    'c.data.passage_max_length',
    'c.data.passage_prefix',
    'c.data.passage_buckets',
  }


KNOBS = dict(configs.flat(vars(knobs.table())))
WRONG = (float('nan'), float('inf'), -5, 10**15, '', 'a\nb', None, (), (0,), (32, 16), True, 1.5)


@pytest.mark.parametrize('name', KNOBS)
def test_every_knob_has_a_range(name):
  knob = KNOBS[name]
  assert knob.fits(knob.value)
  wrong = [value for value in WRONG if not knob.fits(value)]
  assert len(wrong) >= 5 and None in wrong
  config = configs.default()
  config.backbone.path = config.data.dir = 'x'
  config.unlock()
  *sections, last = name.split('.')
  section = config
  for each in sections:
    section = section[each]
  for value in wrong:
    with section.ignore_type():
      section[last] = value
    with refused(f'config.{name}'):
      configs.check(config)


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('steps', -5),
    ('optim.clip', -1.0),
    ('optim.learning_rate', -0.05),
    ('prompt.dropout', 1.5),
    ('backbone.dropout', 1.0),
    ('optim.b1', 1.5),
    ('optim.eps', -1.0),
    ('optim.weight_decay', -1.0),
    ('data.max_queries', -1),
    ('prompt.length', 10**12),
    ('batch_size', 10**9),
  ],
)
def test_values_that_would_mislead_are_refused(name, value):
  assert not KNOBS[name].fits(value)
