import contextlib
import json
import pathlib

import ml_collections
import pytest

from dprjax.base.errors import InputError
from dprjax.training import config as configs
from dprjax.training import options
from dprjax.training import workdir as workdirs
from dprjax.training.options import SET
from tests.options import with_options
from tests.refusals import refused


def test_a_workdir_in_which_nothing_was_made_may_be_reused(tmp_path):
  config = configs.default()
  workdirs.claim_workdir(config, tmp_path)
  config.data.dir = 'spelt right this time'
  workdirs.claim_workdir(config, tmp_path)
  assert workdirs.load_workdir(tmp_path).data.dir == 'spelt right this time'


def test_a_option_that_is_younger_than_the_workdir_has_its_default(tmp_path):
  config = configs.default('cross_encoder')
  workdirs.claim_workdir(config, tmp_path)
  (tmp_path / 'checkpoints').mkdir()
  path = tmp_path / 'config.json'
  written = json.loads(path.read_text())
  del written['prompt']['init_from'], written['cross_encoder'], written['in_batch']
  path.write_text(json.dumps(written))
  workdirs.claim_workdir(config, tmp_path)
  assert configs.to_json(workdirs.load_workdir(tmp_path)) == configs.to_json(config)
  config.log_every = 3  # free to change
  workdirs.claim_workdir(config, tmp_path)
  config.cross_encoder.loss = 'pointwise'
  with refused('cross_encoder.loss', 'listwise', 'pointwise'):
    workdirs.claim_workdir(config, tmp_path)


def test_options_that_nobody_reads_are_refused_but_in_the_methods_own_section():
  config = configs.default()
  config.backbone.path = config.data.dir = 'x'
  configs.check(config)
  config.prompt.lenght = 3
  with refused('config.prompt.lenght'):
    configs.check(config)
  del config.prompt.lenght
  config.method = 'lab.toy'
  config.toy = {'margin': 0.1}
  config.alternatives = {'wide': {'toy': {'margin': 0.5}}, 'other': {}}
  config.data.hold_out = 0.1
  configs.check_own(config, TOY)
  assert configs.resolve(config)['wide'].toy.margin == 0.5


TOY = {'margin': options.number(1.0, above=0, most=1)}


@pytest.mark.parametrize(
  ('own', 'key'),
  [
    ({'margin': 2.0}, 'toy.margin'),
    (None, 'toy.margin'),
  ],
)
def test_a_methods_own_options_are_those_of_its_table(own, key):
  config = configs.default()
  config.method = 'lab.toy'
  if own is not None:
    config.toy = own
  with refused(f'config.{key}'):
    configs.check_own(config, TOY)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('def get_config(arg=""):\n  return 1 / 0', ('c.py', 'line 2', 'ZeroDivisionError')),
    ('def get_config(:', ('c.py', 'line 1', 'SyntaxError')),
    ('def get_config(arg=""): return 5', ('get_config', 'ConfigDict')),
  ],
)
def test_a_config_file_that_raises_is_named_with_its_line(tmp_path, text, words):
  # Definitions of another file are not taken for those of this file.
  (tmp_path / 'before.py').write_text('def get_config(arg=""):\n  return 1 / 0')
  (tmp_path / 'c.py').write_text(text)
  with refused('before.py', 'line 2'):
    configs.parse([f'--config={tmp_path}/before.py'])
  with refused(words):
    configs.parse([f'--config={tmp_path}/c.py'])


def test_a_value_on_the_command_line_is_not_run(tmp_path):
  value = f'__import__("os").mkdir("{tmp_path}/ran")'
  root = pathlib.Path(configs.__file__).parent.parent.parent
  for option in ('trainable', 'task', 'optim.learning_rate', 'optim.learning_rate_rules'):
    with contextlib.suppress(InputError):
      configs.parse([f'--config={root}/configs/dptdr.py:local', f'--config.{option}={value}'])
  assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize(
  ('given', 'platform', 'expected'),
  [('auto', 'tpu', 'bfloat16'), ('auto', 'cpu', 'float32'), ('float32', 'gpu', 'float32')],
)
def test_the_arithmetic_is_settled_by_the_devices(given, platform, expected):
  config = configs.default()
  config.backbone.dtype = given
  settled = configs.settle(config, platform)
  assert configs.to_json(configs.settle(ml_collections.FrozenConfigDict(config), platform)) == (
    configs.to_json(settled)
  )
  assert (settled.backbone.dtype, config.backbone.dtype) == (expected, given)


RECIPES = pathlib.Path(__file__).parents[2] / 'configs'


def parse(recipe, *flags):
  if not (RECIPES / recipe.partition(':')[0]).exists():
    pytest.skip('a paper that is not here')
  return configs.parse([f'--config={RECIPES}/{recipe}', *(f'--config.{flag}' for flag in flags)])


@pytest.mark.parametrize(
  'recipe, flags, expected',
  [
    # (hold_out, folds, folds_below, dev_split)
    ('dptdr.py:beir', [], (0.2, 3, 500, '')),
    ('ft.py:beir', ['data.hold_out=0.3'], (0.3, 0, 500, '')),
    ('dptdr.py:beir', ['data.dev_split=dev'], (0.0, 0, 500, 'dev')),
    ('dptdr.py:beir', ['data.folds=5'], (0.2, 5, 10**9, '')),
    (
      'dptdr.py:beir',
      ['data.folds=4', 'data.hold_out=0.3', 'data.folds_below=90'],
      (0.3, 4, 90, ''),
    ),
  ],
)
def test_what_is_held_out_is_as_the_command_line_says(recipe, flags, expected):
  data = parse(recipe, *flags).data
  assert (data.hold_out, data.folds, data.folds_below, data.dev_split) == expected


def test_files_on_the_command_line_take_the_place_of_docstrings(tmp_path):
  (tmp_path / 'corpus.jsonl').write_text('{"text": "a"}\n')
  for recipe in ('dptdr.py:local', 'condenser.py:local'):
    assert parse(recipe, f'data.dir={tmp_path}/corpus.jsonl').data.format == 'auto'
    assert parse(recipe, 'data.dir=email,http').data.format == 'docstrings'
    assert parse(recipe, f'data.dir={tmp_path}', 'data.format=beir').data.format == 'beir'


def test_the_dev_split_of_a_task_is_as_the_command_line_says():
  config = parse('nir_retriever.py:emm', 'tasks.qa.data.dev_split=dev')
  assert (config.tasks.qa.data.dev_split, config.tasks.qa.data.hold_out) == ('dev', 0.0)
  assert config.tasks.dialogue.data.hold_out > 0


def test_alternatives_differ_in_nothing_that_the_command_line_says():
  def both(*flags):
    found = configs.resolve(parse('dptdr.py:beir', 'data.dir=x', *flags))
    return [found[name] for name in ('query', 'both')]

  assert [one.batch_size for one in both()] == [16, 32]
  assert [one.batch_size for one in both('batch_size=64')] == [64, 64]
  one_alone = both('batch_size=64', 'alternatives.both.batch_size=8')
  assert [one.batch_size for one in one_alone] == [64, 8]
  assert [one.prompt.regularization for one in both('prompt.regularization=1.0')] == [1.0, 1.0]
  # Only a prompt for queries can have these.
  given = both('data.passage_embeddings=emb', 'corpus_negatives=64')
  assert [(one.data.passage_embeddings, one.corpus_negatives) for one in given] == [
    ('emb', 64),
    ('', 0),
  ]
  # Two that differ in nothing are no choice.
  parsed = parse('nir_retriever.py:adapt=qa', "optim.learning_rate_rules=(('.*', 1.0),)")
  assert not parsed.alternatives and parsed.optim.learning_rate_rules == (('.*', 1.0),)


def test_epochs_on_the_command_line_replace_the_steps_of_a_recipe():
  config = parse('dptdr.py:local', 'epochs=2', 'eval.epochs=1')
  assert (config.steps, config.epochs, config.eval.every) == (0, 2.0, 0)
  config = parse('dptdr.py:local', 'epochs=0', 'steps=5')
  assert (config.steps, config.epochs) == (5, 0.0)
  config = parse('unm.py:beir,local', 'retriever.epochs=2', 'retriever.eval.epochs=1')
  assert (config.retriever.steps, config.retriever.eval.every) == (0, 0)
  assert config.reranker.steps > 0


@pytest.mark.parametrize(
  'flags, option',
  [
    (['data.hold_out=0.3', 'data.dev_split=dev'], 'config.data.dev_split'),
    (['epochs=3', 'steps=5'], 'config.steps'),
    (['prompt.sides=query'], 'config.prompt.sides'),
  ],
)
def test_a_command_line_that_contradicts_itself(flags, option):
  with refused(option):
    parse('dptdr.py:beir', *flags)


def alternatives_of(changes, **more):
  config = with_options(**{'data__hold_out': 0.1, 'data__dir': 'd', 'backbone__path': 'b'} | more)
  with config.ignore_type():
    config.alternatives = changes
  return config


def test_a_config_is_one_experiment_or_its_alternatives():
  config = alternatives_of({})
  assert configs.resolve(config) == {'': ml_collections.FrozenConfigDict(config)}
  # Prompts for queries only come first.
  changes = {'a': {}, 'b': {'prompt': {'sides': 'query'}}, 'c': {}}
  found = configs.resolve(alternatives_of(changes))
  assert list(found) == ['b', 'a', 'c'] and found['b'].prompt.sides == 'query'
  with pytest.raises(AttributeError):
    found['a'].steps = 3


@pytest.mark.parametrize(
  'changes, more, name',
  [
    ({'a': {}, 'b': {}}, {'data__hold_out': 0.0}, 'config.data.hold_out'),
    ({'a': {'batch': 3}}, {}, 'config.alternatives.a.batch'),
  ],
  ids=str,
)
def test_alternatives_that_cannot_be(changes, more, name):
  with refused(name):
    configs.resolve(alternatives_of(changes, **more))


def test_an_option_is_refused_by_a_method_without_it_and_without_what_it_needs():
  config = with_options(prompt__length=4, prompt__sides='query', corpus_negatives=5)
  configs.check_rules(config, ('prompt.length', 'prompt.sides'), {})
  with refused('config.prompt.sides'):
    configs.check_rules(config, {'prompt.length'}, {})
  config.prompt.sides = 'both'
  with refused('corpus_negatives=5', 'config.prompt.sides'):
    configs.check_rules(config, ('prompt.length', 'prompt.sides'), {})


def test_what_a_method_needs():
  configs.check_rules(with_options(negatives=1), (), {'negatives': SET, 'in_batch': True})
  with refused('config.method=dpr', 'config.in_batch'):
    configs.check_rules(with_options(negatives=1), (), {'in_batch': False})


def test_the_same_data_by_another_path_are_the_same_experiment(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('text', 'more'):
    (tmp_path / name).mkdir()
  (tmp_path / 'link').symlink_to('text')
  config = configs.default()
  config.data.dir = 'text,more'
  workdirs.claim_workdir(config, tmp_path / 'run')
  (tmp_path / 'run' / 'checkpoints').mkdir()
  for config.data.dir in (f'{tmp_path}/text,./more', 'link,more/'):
    workdirs.claim_workdir(config, tmp_path / 'run')
  config.data.dir = 'more,text'
  with refused('data.dir', 'text,more', 'more,text'):
    workdirs.claim_workdir(config, tmp_path / 'run')
