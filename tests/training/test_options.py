from dprjax import configs as listing
from dprjax.training import config as configs
from dprjax.training import options as tables
from tests.refusals import refused


def test_every_option_is_explained():
  listed = [
    one for _, prefix, table in listing.tables() for one in listing.explained(prefix, table)
  ]
  assert len(listed) > 100
  # The mesh is explained as a whole; the others' names say it.
  assert {
    name.partition(' = ')[0].removeprefix('config.')
    for name, text in listed
    if not text and not name.startswith('config.mesh.')
  } <= {
    *(f'optim.{name}' for name in ('learning_rate', 'weight_decay', 'b1', 'b2', 'eps')),
    *(f'data.passage_{name}' for name in ('max_length', 'prefix', 'buckets')),
    *(f'tasks.NAME.data.passage_{name}' for name in ('max_length', 'prefix', 'buckets')),
  }


OPTIONS = dict(configs.flat(vars(tables.table())))
WRONG = (float('nan'), float('inf'), -5, 10**15, '', 'a\nb', None, (), (0,), (32, 16), True, 1.5)


def test_every_option_has_a_range():
  for name, option in OPTIONS.items():
    assert option.fits(option.value), name
    wrong = [value for value in WRONG if not option.fits(value)]
    assert len(wrong) >= 5 and None in wrong, name
    config = configs.default()
    config.backbone.path = config.data.dir = 'x'
    config.unlock()
    *sections, last = name.split('.')
    section = config
    for each in sections:
      section = section[each]
    for value in (None, wrong[0]):
      with section.ignore_type():
        section[last] = value
      with refused(f'config.{name}'):
        configs.check(config)
