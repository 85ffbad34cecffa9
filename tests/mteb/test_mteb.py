"""What mteb asks of a model; its types have stand-ins, since mteb needs PyTorch. The last tests ask
mteb itself, where it is installed.
"""

import enum
import warnings
from typing import NamedTuple

import numpy as np
import pytest

import dprjax.mteb
from dprjax import mteb as models
from dprjax.encoding.text_encoder import Encoder
from dprjax.models.artifact import load_prompt, save_prompt
from dprjax.text import seen
from tests.refusals import refused

TEXTS = ['json decodes', 'an http server', 'parse the xml tree']
BATCHES = [{'id': ['1', '2'], 'text': TEXTS[:2]}, {'id': ['3'], 'text': TEXTS[2:]}]


class Task(NamedTuple):
  """The part of ``TaskMetadata`` of mteb that a model reads."""

  name: str = 'Toy'
  type: str = 'Retrieval'


class PromptType(enum.StrEnum):
  """As mteb has it."""

  query = 'query'
  document = 'document'


@pytest.fixture(scope='module')
def prompts(small, tmp_path_factory):
  folder = tmp_path_factory.mktemp('prompts')
  return {
    'qa': small.write(folder, 'qa', 2, passage=1),
    'chat': small.write(folder, 'chat', 3, normalize=False, query_prefix='query: '),
  }


@pytest.fixture(scope='module')
def encoder(small, prompts):
  return Encoder.load(small.path, prompts['qa'], batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('prompt_type', 'side'),
  [
    (PromptType.query, 'query'),
    (PromptType.document, 'passage'),
    (None, 'passage'),
  ],
)
def test_texts_of_batches_by_side(encoder, prompt_type, side):
  found = models.MtebModel(encoder).encode(
    BATCHES,
    task_metadata=Task(),
    hf_split='test',
    hf_subset='default',
    prompt_type=prompt_type,
    batch_size=2,
    show_progress_bar=False,
  )
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, encoder.encode(TEXTS, side))


def test_a_task_has_the_prompt_of_its_name_its_type_or_the_default(small, prompts):
  bank = {'Toy': prompts['qa'], 'STS': prompts['chat'], 'default': None}
  model = models.MtebModel(Encoder.load(small.path, bank, batch_size=8))
  for task, prompt in (
    (Task('Toy', 'STS'), 'Toy'),
    (Task('Other', 'STS'), 'STS'),
    (Task('Other', 'Retrieval'), 'default'),
  ):
    np.testing.assert_array_equal(
      model.encode(BATCHES, task_metadata=task),
      model.encoder.encode(TEXTS, 'passage', prompt=prompt),
    )
  one = models.MtebModel(Encoder.load(small.path, {'Toy': prompts['qa']}, batch_size=8))
  with refused('Other', 'Toy'):
    one.encode(BATCHES, task_metadata=Task('Other', 'STS'))


@pytest.mark.slow
def test_queries_that_a_prompt_has_seen_are_counted(small, prompts, tmp_path, caplog):
  known = load_prompt(prompts['qa'])
  known.queries.update({'train': seen.hashes(['JSON decodes', 'other'])})
  save_prompt(tmp_path / 'seen.npz', known)
  model = models.MtebModel(Encoder.load(small.path, tmp_path / 'seen.npz', batch_size=8))
  for side in (PromptType.query, PromptType.document):
    model.encode(BATCHES, task_metadata=Task('Toy'), prompt_type=side)
  assert [record.args[::2] for record in caplog.records] == [('Toy', 1)]


def test_what_is_said_of_a_model(small, prompts, encoder):
  said = models.describe(encoder, small.path, prompts['qa'])
  bare = models.describe(Encoder.load(small.path), f'package:{small.path.name}', None)
  # Keys and values of 2 + 1 vectors, 16 wide, in 2 layers.
  assert said['n_parameters'] - bare['n_parameters'] == 2 * 2 * 3 * 16
  assert bare['memory_usage_mb'] == bare['n_parameters'] * 4 / 2**20
  assert (said['name'], bare['name']) == ('dprjax/qa', f'dprjax/{small.path.name}')
  assert (said['max_tokens'], said['embed_dim']) == (16, 16)
  assert (said['similarity_fn_name'], said['use_instructions']) == ('cosine', False)
  for given, name in (
    ('me/qa@1a2b', 'me/qa'),
    (prompts['qa'], 'dprjax/qa'),
    ({'default': prompts['qa']}, f'dprjax/{small.path.name}'),
  ):
    assert models.describe(encoder, small.path, given)['name'] == name
  assert models.describe(Encoder.load(small.path, dimensions=8), small.path, None)['embed_dim'] == 8
  other = models.describe(Encoder.load(small.path, prompts['chat']), small.path, prompts['chat'])
  assert (other['similarity_fn_name'], other['use_instructions']) == ('dot', True)
  unknown = ('license', 'open_weights', 'public_training_data', 'languages', 'release_date')
  assert [said[key] for key in unknown] == [None] * len(unknown)
  assert said['revision'] != bare['revision']


def test_a_revision_is_of_all_that_decides_a_vector(small, prompts, encoder):
  again = Encoder.load(small.path, prompts['qa'], batch_size=2)
  assert models.revision(again) == models.revision(encoder)
  changes = {'pooling': 'cls'}, {'query_max_length': 8}, {'dtype': 'bfloat16'}, {'dimensions': 8}
  others = [
    *(Encoder.load(small.path, other) for other in (None, prompts['chat'], {'x': prompts['qa']})),
    *(Encoder.load(small.path, prompts['qa'], **change) for change in changes),
  ]
  assert len({models.revision(one) for one in (encoder, *others)}) == 8


@pytest.fixture(scope='module')
def mteb(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter('ignore')
    patch.setenv('MTEB_CACHE', str(tmp_path_factory.mktemp('mteb')))
    patch.setenv('HF_DATASETS_OFFLINE', '1')
    yield pytest.importorskip('mteb', reason="pip install 'dprjax[mteb]' (it brings PyTorch)")


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_mteb_takes_the_model(mteb, small, prompts):
  backbone = 'sentence-transformers/all-MiniLM-L6-v2'
  own = {'training_datasets': ['SciFact'], 'batch_size': 8}
  model = dprjax.mteb.load(
    small.path, prompts['qa'], adapted_from=backbone, name='me/qa', meta={'license': 'mit'}, **own
  )
  one, other = np.array([[1.0, 2.0], [0.0, 1.0]]), np.array([[3.0, 1.0], [2.0, 2.0]])
  assert model.similarity(one, other).tolist() == [[5, 6], [1, 2]]
  assert model.similarity_pairwise(one, other).tolist() == [5, 2]
  assert isinstance(model, mteb.models.EncoderProtocol)
  assert not isinstance(model, mteb.models.SearchProtocol)
  meta = model.mteb_model_meta
  assert (meta.name, meta.training_datasets, meta.license) == ('me/qa', {'SciFact'}, 'mit')
  known = mteb.get_model_meta(backbone).get_training_datasets()
  assert known and meta.get_training_datasets() >= known | {'SciFact'}
  assert meta.is_zero_shot_on(['SciFact']) is False
  loaded = meta.load_model()
  np.testing.assert_array_equal(
    loaded.encode(BATCHES, task_metadata=Task()), model.encode(BATCHES, task_metadata=Task())
  )
  # Facts on only the prompt, or only the backbone, say nothing of both.
  for given in ({'adapted_from': backbone}, own):
    unknown = dprjax.mteb.load(small.path, prompts['qa'], **given).mteb_model_meta
    assert unknown.training_datasets is None and unknown.is_zero_shot_on(['SciFact']) is None
  with pytest.raises(KeyError, match='me/nonesuch'):
    dprjax.mteb.load(small.path, adapted_from='me/nonesuch', training_datasets=[])
  with pytest.raises(ValueError, match='noslash'):
    dprjax.mteb.load(small.path, name='noslash')
  report = mteb.mock_run(model)
  assert report.all_passed, report.to_markdown()
