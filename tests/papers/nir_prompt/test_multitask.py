"""Several data sets in a run as the training loop gets them, and the measure of each dev split
against one worked out by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import scratch
from dprjax.models.template import Piece, Template, unpack
from dprjax.papers.nir_prompt import multitask, pairs
from dprjax.papers.nir_prompt import options as nir_options
from dprjax.text.token_cache import open_cache
from dprjax.training import config as configs
from dprjax.training import cross_encoder
from dprjax.training import method as methods
from dprjax.training.method import Model, Parts
from tests import beir
from tests.options import with_options
from tests.refusals import refused
from tests.training.conftest import WORDS

PI = [
  ('oak elm', 'oak', 1),
  ('ash', 'fir yew', 0),
  ('pine', 'pine', 1),
  ('larch oak elm', 'maple', 0),
  ('rowan', 'yew', 0),
  ('hazel fir', 'fir', 1),
]
# They share 2, 1, 0 and 1 words.
PI_DEV = [('oak elm', 'elm oak', 1), ('ash fir', 'fir', 0), ('yew', 'ash', 1), ('elm', 'elm', 1)]
WEIGHTS = {'query/weight': jnp.float32(2), 'passage/weight': jnp.float32(1)}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Retrieval sets qa and dr, whose query i is about passage i, and the pairs pi. In qa's dev split
  pine once is beaten by pine twice: ranks 1 and 2. In dr's the ranks are 1.
  """
  path = tmp_path_factory.mktemp('sets')
  for name, words, dev in (
    ('qa', WORDS[:8], {'oak oak': 'oak', 'pine': 'pine', 'pine pine': ''}),
    ('dr', WORDS[3:13], {'yew yew': 'yew', 'ash ash': 'ash'}),
  ):
    passages = {f'd{i}': f'{word} {words[i - 1]}' for i, word in enumerate(words)}
    own = {f'e{i}': text for i, text in enumerate(dev)}
    questions = {f'{word}?': (word, f'e{i}') for i, word in enumerate(dev.values()) if word}
    beir.write(
      path / name,
      passages | own,
      {word: word for word in words} | {q: word for q, (word, _) in questions.items()},
      train={word: [f'd{i}'] for i, word in enumerate(words)},
      dev={q: [passage] for q, (_, passage) in questions.items()},
    )
  (path / 'pi').mkdir()
  pairs.write_pairs(path / 'pi' / 'train.jsonl', PI)
  pairs.write_pairs(path / 'pi' / 'dev.jsonl', PI_DEV)
  return path


@pytest.fixture
def start(folder, tmp_path, devices, tokenizer, model):
  """``start('qa', 'pi', form='pairs', option=value)`` -> the data of these tasks."""

  def run(*names, form='retrieval', dev='dev', templates=None, numbered=True, **changes):
    options = {
      'batch_size': 4,
      'negatives': 1,
      'eval__measure': 'mean',
      'data__query_max_length': 8,
      'data__passage_max_length': 8,
      'data__query_buckets': (4, 8),
      'data__passage_buckets': (4, 8),
    }
    config = configs.default('nir_reranker')
    for name in names:
      config.tasks[name] = nir_options.task(dir=str(folder / name), dev_split=dev)
      if name == 'pi':
        config.tasks.pi.form, config.tasks.pi.measure = 'pairs', 'accuracy'
    for name, value in (options | changes).items():
      node = config
      *parents, last = name.split('__')
      for parent in parents:
        node = node[parent]
      node[last] = value
    configs.check_ranges(config)
    return multitask.find_tasks(
      config.data, config, tmp_path / 'run', devices, form, templates, numbered
    ).open(tokenizer, model)

  return run


def test_what_the_loop_is_given(start, words_of, tmp_path, batches_of):
  data = start('qa', 'dr')
  assert (len(data.batches), data.unit) == (4, 'queries')  # two batches of the smaller, dr is 0
  assert data.description == '2 tasks, alternate; training queries: dr 10, qa 8'
  iterator = batches_of(data)
  for step in range(8):
    batch = next(iterator)
    assert {key: (value.dtype.name, value.shape) for key, value in batch.items()} == {
      'task': ('int32', (4,)),
      'negative_source': ('int8', (4, 1)),
      'query_tokens': ('int32', (4, 4)),
      'query_mask': ('bool', (4, 4)),
      'passage_tokens': ('int32', (4, 2, 4)),
      'passage_mask': ('bool', (4, 2, 4)),
      'query_index': ('int32', (4,)),
      'passage_index': ('int32', (4, 2)),
      'relevant': ('int32', (4, 1)),
    }
    assert batch['task'].tolist() == [step % 2] * 4
    queries = [words_of(row) for row in batch['query_tokens']]
    positives = [words_of(row)[:1] for row in batch['passage_tokens'][:, 0]]
    assert queries == positives
    name = ('dr', 'qa')[step % 2]
    assert data.ids(batch).startswith(f'{name}: ') and data.ids(batch).count(' with d') == 4
    assert all(f'{query[0]} with d' in data.ids(batch) for query in queries)
  assert all((tmp_path / 'run' / 'token_cache' / name / 'train').is_dir() for name in ('qa', 'dr'))


@pytest.fixture
def pairs_bag(tokenizer):
  """Scores a pair by the words that its texts share, less a number for each task."""
  ordinary = jnp.ones(tokenizer.vocab_size, jnp.float32).at[jnp.array(tokenizer.special_ids)].set(0)

  def embed(params, side, rows, mask, lengths, numbers):
    assert side == 'pair' and numbers.dtype == jnp.int32
    counted = []
    for text in unpack(rows, lengths):
      place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
      start = jnp.broadcast_to(jnp.asarray(text.start), text.lengths.shape)[:, None]
      inside = (place >= start) & (place < start + text.lengths[:, None])
      hot = jax.nn.one_hot(rows, tokenizer.vocab_size) * inside[:, :, None].astype(jnp.float32)
      counted.append(ordinary[None] * hot.sum(axis=1))
    shared = jnp.sum(counted[0] * counted[1], axis=1)
    return (shared - jnp.take(params['less'], numbers))[:, None]

  return Model(None, None, embed, {})


@pytest.mark.slow
def test_each_dev_split_by_its_measure(start, bag, tmp_path):
  numbers = []

  def embed(params, side, tokens, mask, task):
    numbers.append((side, task.dtype.name))
    return bag.embed(params, side, tokens, mask) * (1 + task.astype(jnp.float32))[:, None]

  data = start('qa', 'dr', tasks__dr__measure='nDCG@10')
  found = data.evaluation(bag._replace(embed=embed))(WEIGHTS)
  # qa: oak at 1, pine at 2 behind the passage that has it twice.
  assert found.means == pytest.approx({'dr/nDCG@10': 1.0, 'qa/RR@10': 0.75, 'mean': 0.875})
  assert {name: values.mean() for name, values in found.values.items()} == {'dr': 1.0, 'qa': 0.75}
  assert {side for side, _ in numbers} == {'query', 'passage'}
  assert (tmp_path / 'run' / 'dev-qa.tsv').exists()
  plain = start('qa', 'dr', numbered=False).evaluation(bag)(WEIGHTS)
  assert plain.means == pytest.approx({'dr/RR@10': 1.0, 'qa/RR@10': 0.75, 'mean': 0.875})
  assert start('qa', 'dr', dev='').evaluation is None


def test_pairs_are_classified_and_candidates_ranked(start, pairs_bag):
  data = start('qa', 'dr', 'pi', form='pairs', batch_size=6)
  evaluate = data.evaluation(pairs_bag)
  # Scores of pi: 2, 1, 0, 1, of which 1, 0, 1, 1 match.
  found = evaluate({'less': jnp.zeros(3)})
  assert found.means == pytest.approx(
    {
      **{'dr/RR@10': 1.0, 'qa/RR@10': 0.75, 'mean': 0.75},
      # Of equal scores the later pair comes first.
      **{'pi/accuracy': 0.5, 'pi/F1': 4 / 6, 'pi/AP': (1 + 1 + 3 / 4) / 3, 'pi/yes': 0.75},
    }
  )
  assert not found.note
  assert evaluate({'less': jnp.array([0.0, 1.0, 0.0])}).means['pi/accuracy'] == 0.5  # 1, -, -, -
  silent = evaluate({'less': jnp.array([0.0, 3.0, 9.0])})
  assert silent.means['pi/accuracy'] == 0.25 and silent.note == 'pi: yes to 0% of the pairs'
  # One answer is no gain: yes to all would be right for three of four.
  start_scores = data.floor(silent)
  assert start_scores.means['pi/accuracy'] == start_scores.values['pi'].mean() == 0.75
  assert start_scores.means['mean'] == pytest.approx((1 + 0.75 + 0.75) / 3)
  assert data.floor(start_scores).means == start_scores.means
  data = start('qa', 'pi', form='pairs', tasks__pi__measure='F1')
  # Said to match: the first, second and fourth. Two of them do, and two of three are said.
  found = data.evaluation(pairs_bag)({'less': jnp.zeros(2)})
  assert found.means['pi/F1'] == pytest.approx(4 / 6)
  assert found.values['pi'].mean() == pytest.approx(4 / 6)


def test_a_few_shot_dev_split_is_no_larger_than_its_training_set(start, tmp_path, caplog):
  caplog.set_level('INFO', 'dprjax')
  (tmp_path / 'pi').mkdir()
  rows = [(f'oak {i}', f'elm {i}', int(i % 7 == 0)) for i in range(140)]
  for split in ('train', 'dev'):
    pairs.write_pairs(tmp_path / 'pi' / f'{split}.jsonl', rows)
  few = {
    'tasks__pi__data__dir': str(tmp_path / 'pi'),
    'tasks__pi__data__max_queries': 8,
    'tasks__qa__data__max_queries': 1,
  }
  for name, hold_out in (('a', 0.0), ('b', 0.5)):
    splits = {'tasks__pi__data__hold_out': hold_out, 'tasks__qa__data__hold_out': hold_out}
    cache = tmp_path / name
    data = start(
      *('qa', 'pi'),
      form='pairs',
      dev='' if hold_out else 'dev',
      data__token_cache=str(cache),
      **splits,
      **few,
    )
    assert data.description.endswith('training pairs: pi 16, qa 2')  # 8 of each label
    caplog.clear()
    data.evaluation(Model(None, None, lambda *_: None, {}))
    assert '16 pairs, 8 of them matching' in caplog.text
    assert open_cache(cache / 'qa' / 'dev_candidates').num_queries == 1


LONG = {'query': [Template((Piece((5,) * 26), Piece(None)))]}


@pytest.mark.parametrize(
  ('names', 'form', 'changes', 'message'),
  [
    (('qa', 'pi'), 'retrieval', {}, 'config.tasks.pi.form'),
    (('qa', 'dr'), 'retrieval', {'tasks__dr__data__dev_split': ''}, ('config.eval.measure', 'dr')),
    (('qa', 'dr'), 'retrieval', {'arrangement': 'balanced', 'batch_size': 5}, 'config.batch_size'),
    (
      ('qa',),
      'retrieval',
      {
        'templates': lambda _: {'query': LONG['query'], 'passage': LONG['query']},
        'data__passage_max_length': 9,
      },
      ('config.data.passage_max_length', '33', '32'),
    ),
  ],
)
def test_what_cannot_be(start, names, form, changes, message):
  with refused(message):
    start(*names, form=form, **changes)


@pytest.mark.slow
def test_the_fine_tuned_retriever_and_reranker_train_on_the_feed(
  folder, tmp_path, devices, tokenizer
):
  shape = scratch.shape('tiny', tokenizer.vocab_size)
  parts = Parts(scratch.init_params(shape, jax.random.key(0)))
  options = {
    'batch_size': 4,
    'eval__measure': 'mean',
    'trainable': ('backbone/.*', 'head/.*'),
    'data__query_max_length': 8,
    'data__passage_max_length': 8,
    'data__query_buckets': (8,),
    'data__passage_buckets': (8,),
    'grad_cache': 2,
    'arrangement': 'balanced',
  }
  tasks = {
    name: nir_options.task(dir=str(folder / name), dev_split='dev') for name in ('qa', 'dr', 'pi')
  }
  tasks['pi'].form, tasks['pi'].measure = 'pairs', 'F1'
  for name, other in (('ft_retriever', 'dr'), ('ft_reranker', 'pi')):
    own = {'cross_encoder__loss': 'pointwise'} if other == 'pi' else {}
    both = {f'tasks__{task}': tasks[task] for task in ('qa', other)}
    config = with_options(method=name, **options, **own, **both)
    method = methods.load(name)
    data = method.data(config.data, config, tmp_path / 'run', devices).open(tokenizer, shape)
    model = method.build(config, shape, devices, tokenizer)
    params = model.init(parts, jax.random.key(1))
    batch = data.batches[0]
    value, metrics = jax.jit(model.loss)(params, batch, None)
    assert 0.3 < value < 5 and set(metrics) >= {'accuracy'}
    flat = {
      '/'.join(key.key for key in path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    scores = data.evaluation(model)(flat).means
    assert len(scores) >= 3 and 0 < scores['mean'] <= 1
  # The loss of pairs is the cross-entropy of each label.
  rows = [batch[f'{view}_{what}'] for view in pairs.VIEWS for what in ('tokens', 'mask')]
  lone = {
    'query_tokens': rows[0],
    'query_mask': rows[1],
    'passage_tokens': np.stack([rows[2]] * 2, 1),
    'passage_mask': np.stack([rows[3]] * 2, 1),
  }
  alone = {key: value for key, value in options.items() if key != 'arrangement'}
  single = with_options(method='cross_encoder', cross_encoder__loss='pointwise', **alone)
  listed = cross_encoder.build(single, shape, devices, tokenizer)
  both, _ = jax.jit(listed.loss)(params, lone, None)  # the mean of label 1 and of label 0
  flipped, _ = jax.jit(model.loss)(params, batch | {'label': 1 - batch['label']}, None)
  np.testing.assert_allclose((value + flipped) / 2, both, rtol=1e-6)
