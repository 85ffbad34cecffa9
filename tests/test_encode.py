"""Texts to a folder of embeddings, with the real command on a small backbone."""

import functools
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from dprjax import Retriever, encode, load_prompt
from dprjax.base import mesh, outputs
from dprjax.base.files import sha256_file
from dprjax.encoding import codes, embedder, embeddings, folders, manifest
from dprjax.encoding.text_encoder import Encoder
from dprjax.text import texts
from tests.refusals import command_refused, named_in, refused

TEXTS = {
  f'd{i}': ' '.join(
    ['json', 'decodes', 'a', 'string', 'into', 'objects', 'and', 'raises', 'errors'][: 1 + i % 9]
    * (1 + i % 4)
  )
  + f' {i}'
  for i in range(50)
}


@pytest.fixture(scope='session')
def vectors(trained, prompt):
  """The expected output of the command, by the Python interface."""
  return Retriever.load(trained / 'backbone', prompt).encode(list(TEXTS.values()), 'passage')


@pytest.fixture(scope='module')
def load_once():
  """``Encoder.load``, which loads and compiles the same encoder once for all tests."""
  load = functools.cache(Encoder.load)

  def call(*paths, **options):
    encoder = load(*paths, **options)
    encoder.truncated.clear()
    return encoder

  return call


@pytest.fixture
def corpus(tmp_path):
  path = tmp_path / 'corpus.jsonl'
  path.write_text(
    ''.join(
      json.dumps({'_id': id_, 'title': text.split()[0], 'text': text.partition(' ')[2]}) + '\n'
      for id_, text in TEXTS.items()
    )
  )
  return path


@pytest.fixture
def run(command, trained, prompt, corpus, tmp_path, load_once, monkeypatch):
  """``run(*flags)``: encodes the corpus into tmp_path/out; flags come last and override."""
  monkeypatch.setattr(Encoder, 'load', load_once)

  def call(*flags, side='passage'):
    return command(
      encode,
      f'--backbone={trained}/backbone',
      f'--prompt={prompt}',
      f'--side={side}',
      f'--input={corpus}',
      f'--out={tmp_path}/out',
      *flags,
    )

  return call


def read(folder):
  found = embeddings.load_embeddings(folder)
  return found, np.concatenate([np.asarray(shard) for shard in found.shards])


@pytest.mark.slow
def test_equals_the_retriever(run, vectors, corpus, tmp_path, prompt):
  status, err = run()
  assert status == 0 and '50 passage vectors' in err
  found, values = read(tmp_path / 'out')
  assert found.ids == list(TEXTS)
  np.testing.assert_allclose(values, vectors, atol=1e-6)
  np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5)
  assert found.meta == manifest.Meta(
    dimension=128,
    dtype='float32',
    side='passage',
    backbone_sha256=load_prompt(prompt).meta['backbone_sha256'],
    config_sha256=found.meta.config_sha256,
    tokenizer_sha256=load_prompt(prompt).meta['tokenizer_sha256'],
    prompt_sha256=sha256_file(prompt),
    shift_positions=False,
    pooling='mean',
    normalize=True,
    prefix='',
    max_length=32,
    arithmetic='float32',
    input_sha256=found.meta.input_sha256,
  )


@pytest.mark.slow
def test_one_device_and_eight_give_the_same(trained, prompt, vectors):
  single = mesh.make_mesh({'data': -1}, jax.local_devices()[:1])
  one = Encoder.load(trained / 'backbone', prompt, mesh=single)
  np.testing.assert_allclose(one.encode(list(TEXTS.values())), vectors, atol=2e-6)


@pytest.mark.slow
def test_counts_cut_texts(run, vectors, tmp_path):
  flags = ('--max_length=4', '--shard_rows=20')
  status, err = run(*flags)
  [line] = [line for line in err.splitlines() if 'longer than 4 tokens' in line]
  # A continued command counts those of the shards that are there.
  manifest = json.loads((tmp_path / 'out' / 'manifest.json').read_text())
  assert all(shard['cut'] for shard in manifest['shards'])
  (tmp_path / 'out' / manifest['shards'][0]['ids']).unlink()
  assert line in run(*flags)[1].splitlines()
  count, _, rest = line.rpartition(': ')[2].partition(' ')
  assert status == 0 and rest == 'of 50 texts were longer than 4 tokens and cut'
  # A word has one token or more, and two tokens are special.
  assert int(count) >= sum(len(text.split()) > 2 for text in TEXTS.values())
  found, values = read(tmp_path / 'out')
  assert found.meta.max_length == 4 and np.abs(values - vectors).max() > 1e-3


@pytest.mark.slow
def test_codes(run, vectors, tmp_path):
  command_refused(run('--precision=float16', '--normalize=false'), '--normalize=true')
  stored = 'int8'
  flags = [f'--precision={stored}', '--shard_rows=20', '--calibrate=30']
  command_refused(run(*flags, side='query'), f'--precision={stored}')
  assert run(*flags)[0] == 0
  found, values = read(tmp_path / 'out')
  sample = vectors[np.linspace(0, 49, 30).astype(int)]
  code = codes.Code(stored, codes.calibrate(sample, stored))
  np.testing.assert_allclose(found.shards[0].code.ranges, code.ranges, atol=1e-5)
  np.testing.assert_allclose(values, codes.decode(codes.encode(vectors, code), code), atol=0.02)
  # A damaged shard is written again in the same ranges, whatever sample is asked for.
  content = {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
  (tmp_path / 'out' / 'embeddings-00001-of-00003.npy').write_bytes(b'')
  assert run(*flags, '--calibrate=5')[0] == 0
  assert {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()} == content


def test_bad_input(run, corpus, tmp_path):
  for flag, name in (('input', 'none.jsonl'), ('prompt', 'none.npz'), ('backbone', 'none')):
    command_refused(run(f'--{flag}={tmp_path}/{name}'), name)
  command_refused(run('--side=document'), '--side', 'document')
  corpus.write_text('{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n')
  command_refused(run(), corpus.name, 'line 1', 'line 2')
  corpus.write_text('')
  command_refused(run(), corpus.name)
  assert not (tmp_path / 'out').exists()


def _edit_json(path, **changes):
  content = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(content | changes))


def _keep_case(backbone):
  _edit_json(backbone / 'tokenizer_config.json', do_lower_case=False)


@pytest.mark.slow
def test_parts_together_are_the_whole(encoded, tmp_path):
  whole, values = read(encoded / 'out')
  parts = []
  for number in range(3):
    words = [*_plain(encoded, 'out'), f'--part={number}/3', f'--out={tmp_path}/{number}']
    encode.main([word for word in words if word != f'--out={encoded}/out'])
    parts.append(embeddings.load_embeddings(tmp_path / str(number)))
  joined = embeddings.join(parts, '--corpus')
  assert joined.ids == whole.ids and [len(part) for part in parts] == [16, 17, 17]
  np.testing.assert_allclose(joined.vectors(), values, atol=2e-6)


@pytest.mark.slow
def test_texts_that_change_meanwhile_are_refused(encoded, tmp_path, monkeypatch):
  path = tmp_path / 'corpus.tsv'
  path.write_bytes((encoded / 'corpus.tsv').read_bytes())
  encoder = Encoder.load(encoded / 'backbone')

  class Changing:
    readings = 0

    def __iter__(self):
      self.readings += 1
      for number, text in enumerate(texts.read_texts(path, 'passage')):
        changed = number == 30 and self.readings > 1
        yield text._replace(text='another') if changed else text

  with refused('corpus.tsv'):
    folders.fill_folder(
      encoder, 'passage', Changing(), tmp_path / 'out', source=str(path), shard_rows=20
    )
  progress = json.loads((tmp_path / 'out' / 'progress.json').read_text())
  assert [shard['index'] for shard in progress['shards']] == [0]


@pytest.fixture(scope='module')
def encoded(trained, tmp_path_factory):
  """A backbone without a prompt, a corpus, and its embeddings: finished, and interrupted."""
  folder = tmp_path_factory.mktemp('encoded')
  shutil.copytree(trained / 'backbone', folder / 'backbone')
  modules = [
    {'path': '', 'type': 'sentence_transformers.models.Transformer'},
    {'path': '1_Pooling', 'type': 'sentence_transformers.models.Pooling'},
  ]
  (folder / 'backbone' / 'modules.json').write_text(json.dumps(modules))
  (folder / 'backbone' / '1_Pooling').mkdir()
  _edit_json(folder / 'backbone' / '1_Pooling' / 'config.json', pooling_mode_mean_tokens=True)
  (folder / 'corpus.tsv').write_text(''.join(f'{id_}\t{text}\n' for id_, text in TEXTS.items()))
  encode.main(_plain(folder, 'out'))
  shutil.copytree(folder / 'out', folder / 'interrupted')
  manifest = json.loads((folder / 'out' / 'manifest.json').read_text())
  for shard in manifest['shards'][1:]:
    (folder / 'interrupted' / shard['embeddings']).unlink()
    (folder / 'interrupted' / shard['ids']).unlink()
  (folder / 'interrupted' / 'manifest.json').unlink()
  _edit_json(
    folder / 'interrupted' / 'progress.json', **(manifest | {'shards': manifest['shards'][:1]})
  )
  return folder


def _plain(folder, out):
  return [
    f'--backbone={folder}/backbone',
    '--side=passage',
    '--normalize=true',
    '--max_length=32',
    f'--input={folder}/corpus.tsv',
    f'--out={folder}/{out}',
    '--shard_rows=20',
  ]


def _content(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


@pytest.mark.slow
def test_embeddings_of_other_settings_are_not_continued(command, encoded, tmp_path):
  shutil.copytree(encoded, tmp_path, dirs_exist_ok=True)
  _keep_case(tmp_path / 'backbone')
  prompts = {'prompts': {'document': 'about '}}
  _edit_json(tmp_path / 'backbone' / 'config_sentence_transformers.json', **prompts)
  before = _content(tmp_path)
  for out in ('out', 'interrupted'):
    told = ('tokenizer_sha256', "prefix is '' there, 'about ' here", 'shard_rows is 20 there')
    command_refused(command(encode, *_plain(tmp_path, out), '--shard_rows=30'), *told, out)
  assert _content(tmp_path) == before


@pytest.mark.slow
def test_embeddings_of_the_same_settings_are(command, encoded, tmp_path):
  shutil.copytree(encoded, tmp_path, dirs_exist_ok=True)
  # Files for training only do not matter.
  _edit_json(tmp_path / 'backbone' / 'config.json', hidden_dropout_prob=0.3, note='mine')
  status, err = command(encode, *_plain(tmp_path, 'out'))
  assert status == 0 and '50 of 50 texts already there' in err
  status, err = command(encode, *_plain(tmp_path, 'interrupted'))
  assert status == 0 and '20 of 50 texts already there' in err
  # Also where the first process was killed with a file half written, and its lock.
  (tmp_path / 'killed').mkdir()
  (tmp_path / 'killed' / '.progress.json.12345678.tmp').write_text('{')
  (tmp_path / 'killed' / '.lock').touch()
  assert command(encode, *_plain(tmp_path, 'killed'))[0] == 0
  whole = _content(tmp_path / 'out')
  assert whole == _content(tmp_path / 'interrupted') == _content(tmp_path / 'killed')


@pytest.mark.slow
def test_two_encoders_with_two_tokenizers(command, encoded, tmp_path):
  shutil.copytree(encoded, tmp_path, dirs_exist_ok=True)
  (tmp_path / 'backbone').rename(tmp_path / 'one')
  for side in ('query', 'passage'):
    shutil.copytree(tmp_path / 'one', tmp_path / 'backbone' / side)
  _keep_case(tmp_path / 'backbone' / 'passage')
  command_refused(command(encode, *_plain(tmp_path, 'new')), tmp_path / 'backbone', 'tokenizer')
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(
  ('out', 'message'),
  [
    ('corpus.tsv', '--out'),
    ('link', '--backbone'),
    ('backbone/new', '--backbone'),
    ('web', '--out'),
    ('pipe', '--out'),
    ('busy', '--out'),
  ],
)
def test_an_out_that_would_harm_something(command, encoded, tmp_path, monkeypatch, out, message):
  shutil.copytree(encoded, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'link').symlink_to('backbone')
  (tmp_path / 'web').mkdir()
  (tmp_path / 'web' / 'manifest.json').write_text('{"name": "app"}')
  os.mkfifo(tmp_path / 'pipe')
  before = _content(tmp_path)
  with outputs.hold(epath.Path('busy/.lock'), 'a test'):
    result = command(encode, *_plain(pathlib.Path(), 'x'), f'--out={out}')
  command_refused(result, message)
  assert _content(tmp_path) == before and not (tmp_path / 'busy').exists()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--max_length=513'], ('passage_max_length', '513')),
    (['--input=spaces.tsv'], ('a b', 'row 2', 'spaces.tsv')),
  ],
)
def test_nothing_is_left_of_a_command_that_fails(
  command, encoded, tmp_path, monkeypatch, flags, message
):
  monkeypatch.chdir(encoded)
  (encoded / 'spaces.tsv').write_text('x\tone\na b\ttwo\n')
  command_refused(command(encode, *_plain(encoded, 'x'), f'--out={tmp_path}/a/b', *flags), message)
  assert list(tmp_path.iterdir()) == []
  # Files of an earlier command stay.
  shutil.copytree(encoded / 'interrupted', tmp_path / 'kept')
  monkeypatch.setattr(embedder.Embedder, '__call__', _fail)
  status, err = command(encode, *_plain(encoded, 'x'), f'--out={tmp_path}/kept')
  assert status == 2 and named_in(err, 'memory')
  assert _content(tmp_path / 'kept').keys() == _content(encoded / 'interrupted').keys()


def _fail(*_):
  raise MemoryError('no room')
