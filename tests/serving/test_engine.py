import collections
import concurrent.futures
import logging
import os
import random
import shutil
import time

import jax
import numpy as np
import pytest

pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")


from dprjax.base.errors import InputError
from dprjax.base.files import sha256_file
from dprjax.encoding import embedder, manifest
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact
from dprjax.serving import batcher
from dprjax.serving.engine import Engine
from dprjax.serving.indexes import ServedIndex
from dprjax.serving.library import UnknownPrompt
from dprjax.serving.options import ServerOptions
from dprjax.serving.turns import NOBODY, Tenant
from tests.refusals import named_in, refused

pytestmark = pytest.mark.xdist_group('serving')
WORDS = ['json', 'decodes', 'a', 'string', 'into', 'objects', 'an', 'http', 'server', 'xml']
PROMPTS = {
  'tied': {'length': 3},
  'cls': {'length': 1, 'pooling': 'cls', 'normalize': False},
  'untied': {'length': 2, 'passage': 5, 'normalize': False, 'query_prefix': 'http '},
  'shifted': {'length': 4, 'shift_positions': True, 'query_max_length': 9},
  'long': {'length': 5, 'passage_max_length': 43},
  'queries': {'length': 4, 'sides': 'query', 'shift_positions': True},
}
OPTIONS = ServerOptions(rows=(1, 4), lengths=(16, 64), budget=4 * 48, slots=5, prompt_length=5)


@pytest.fixture(scope='module')
def folder(small, tmp_path_factory):
  folder = tmp_path_factory.mktemp('prompts')
  for name, given in PROMPTS.items():
    small.write(folder, name, **given)
  return folder


@pytest.fixture(scope='module')
def alone(small, folder):
  """``alone(name, side, *texts)``: the vectors of an Encoder with only that prompt."""
  paths = {name: folder / f'{name}.npz' for name in PROMPTS} | {'model': None}
  encoders = {name: Encoder.load(small.path, path, batch_size=8) for name, path in paths.items()}
  return lambda name, side, *texts: encoders[name].encode(texts, side)


@pytest.fixture(scope='module')
def engine(small, folder):
  engine = Engine(small.path, folder, options=OPTIONS)
  engine.ready.result(60)
  yield engine
  engine.close()


@pytest.mark.slow
def test_devices_share_the_backbone(small, folder, alone):
  options = ServerOptions(rows=(1,), lengths=(16,), slots=2, prompt_length=5)
  engine = Engine(small.path, folder, options=options, mesh=embedder.server_mesh(2))
  engine.ready.result(60)
  params = engine.bank._params
  for leaf in (params['layers']['mlp']['up']['kernel'], params['embeddings']['word']['embedding']):
    assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes / 2
  for name in ('tied', 'model', 'untied'):
    found = engine.submit(name, 'query', ['json decodes']).result(60)
    expected = alone(name, 'query', 'json decodes')
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  engine.close()


def queue(engine, tokens, tenant=NOBODY):
  return engine.batcher.submit(tokens.texts, tenant)


def texts_of(rng, count):
  return [' '.join(rng.choices(WORDS, k=rng.choice((1, 3, 12, 50)))) for _ in range(count)]


@pytest.mark.slow
def test_every_vector_is_the_encoders_own_in_any_company(engine, alone):
  # Six prompts and the bare backbone share five slots, one of them empty: prompts come and go.
  assert engine.options.lengths == (16, 48)

  def client(seed):
    rng = random.Random(seed)
    asked = []
    for _ in range(6):
      name, side = rng.choice([*PROMPTS, 'model']), rng.choice(('query', 'passage'))
      texts = texts_of(rng, rng.choice((1, 1, 2, 7)))
      asked.append((name, side, texts, engine.submit(name, side, texts)))
      time.sleep(rng.choice((0, 0.001, 0.004)))
    return [(name, side, texts, f.result(60)) for name, side, texts, f in asked]

  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if 'compile' in event else None
  )
  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    answers = [answer for done in pool.map(client, range(6)) for answer in done]
  assert compiled == []
  for name, side in {answer[:2] for answer in answers}:
    own = [answer[2:] for answer in answers if answer[:2] == (name, side)]
    expected = alone(name, side, *(text for texts, _ in own for text in texts))
    vectors = np.concatenate([vectors for _, vectors in own])
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
  metrics = engine.metrics.text().decode()
  evictions = metrics.split('dprjax_prompt_evictions_total{place="device"} ')[1].split('\n')[0]
  assert float(evictions) > 0


@pytest.mark.slow
def test_a_prompt_that_overflows_harms_no_other_row(engine, small, folder, alone):
  small.write(folder, 'huge', 2, scale=5e37)
  texts = ['json', 'xml tree']
  for _ in range(3):
    bad = engine.submit('huge', 'query', texts)
    good = {name: engine.submit(name, 'query', texts) for name in (*PROMPTS, 'model')}
    with refused('text [0]'):
      bad.result(60)
    for name, future in good.items():
      np.testing.assert_allclose(future.result(60), alone(name, 'query', *texts), rtol=0, atol=1e-5)


def test_a_queued_text_keeps_the_prompt_that_is_deleted(engine, folder):
  shutil.copy(folder / 'tied.npz', folder / 'new.npz')
  queued = engine.submit('new', 'query', ['a string'])
  engine.library.delete('new')
  assert queued.result(60).shape == (1, 16)
  with pytest.raises(UnknownPrompt):
    engine.submit('new', 'query', ['a string'])


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'backbone_sha256': 'a' * 64}, ('p', 'a' * 64)),
    ({'length': 6}, '--prompt_length=6'),
    ({'query_max_length': 49}, ('query_max_length', '49', '48')),
    ({'task': 'x' * 300_000}, 'meta'),
  ],
)
def test_a_prompt_that_does_not_fit_is_refused(engine, small, folder, tmp_path, changes, reason):
  content = small.write(tmp_path, 'p', **({'length': 2} | changes)).read_bytes()
  with refused(reason):
    engine.library.put('p', content)
  assert not list(folder.glob('*p.npz*'))
  # So it is where it comes by another way.
  (folder / 'p.npz').write_bytes(content)
  try:
    for _ in range(2):
      with refused(reason):
        engine.submit('p', 'query', ['json'])
    assert named_in(engine.library.about('p').refused, reason)
  finally:
    (folder / 'p.npz').unlink()


def test_a_prompt_among_the_tokens_is_refused(engine, folder, small, tmp_path):
  pytest.importorskip('dprjax.papers.nir_prompt.adapter')  # the kind of such prompts
  vectors = np.ones((2, 16), np.float32)
  more = {'kind': 'template', 'pooling': 'mask', 'fixed_layers': 1, 'words': {}}
  template = dict.fromkeys(('query', 'passage'), '[CLS] P1 text P2 [MASK] [SEP]')
  arrays = {f'slots/{side}/{slot}': vectors for side in template for slot in ('P1', 'P2')}
  artifact.save_prompt(
    tmp_path / 'p.npz', artifact.Prompt(small.meta | more | {'template': template}, arrays)
  )
  with refused('template', 'dprjax.encode', '--prompt'):
    engine.library.put('p', (tmp_path / 'p.npz').read_bytes())
  assert not list(folder.glob('*p.npz*'))


@pytest.mark.slow
def test_a_prompt_for_queries_alone_searches_an_index_of_the_bare_backbone(
  engine, small, tmp_path, write_embeddings
):
  passages = engine.submit('queries', 'passage', ['json decodes a string', 'xml']).result(60)
  bare = Encoder.load(
    small.path, pooling='mean', normalize=True, query_max_length=16, passage_max_length=16
  )
  assert engine.library.about('queries').lengths == {'query': 4, 'passage': 0}
  space = manifest.describe(bare, 'passage', 'float32', 'i' * 64).space()
  del space['dimension']
  write_embeddings(tmp_path / 'bare', ['a', 'b'], passages, **space)
  index = ServedIndex('bare', tmp_path / 'bare')
  index.check(engine.library.get('queries'), engine)
  for name, what in (('tied', 'prompt_sha256'), ('cls', 'pooling'), ('shifted', 'shift_positions')):
    with refused(name, what):
      index.check(engine.library.get(name), engine)
  for name, other in (('prompt_sha256', 'p' * 64), ('prefix', 'passage: ')):
    write_embeddings(tmp_path / name, ['a', 'b'], passages, **space | {name: other})
    unlike = ServedIndex('x', tmp_path / name)
    with refused('x', name):
      unlike.check(engine.library.get('queries'), engine)
    assert not unlike.takes(engine.library.about('queries'), engine)
  assert index.takes(engine.library.about('queries'), engine)


def test_a_damaged_prompt_is_refused(engine, folder):
  content = (folder / 'tied.npz').read_bytes()
  for damaged in (b'', b'x', content[:-100]):
    with refused('p') as info:
      engine.library.put('p', damaged)
    assert 'prompt prompt' not in str(info.value)
  assert not list(folder.glob('*p.npz*'))


@pytest.mark.slow
def test_a_file_is_served_or_told(small, tmp_path, caplog):
  folder = tmp_path / 'prompts'
  served = ['QA', 'a b', 'fragen-über', 'x.npz', 'n' * 64, 'qa']
  content = small.write(folder, 'qa', 1).read_bytes()
  for name in served:
    (folder / f'{name}.npz').write_bytes(content)
  refused = ['base', '.hidden', '', 'a:query', ' x', 'line\nbreak', 'n' * 65, 'folder', 'link']
  for name in refused[:-2]:
    (folder / f'{name}.npz').write_bytes(content)
  (folder / 'folder.npz').mkdir()
  (folder / 'link.npz').symlink_to(tmp_path / 'nowhere')
  (folder / os.fsdecode(b'\xff.npz')).write_bytes(content)
  (folder / 'notes.txt').write_text('none of these')
  (folder / '.qa.npz.01234567.tmp').write_text('an upload')
  with caplog.at_level(logging.WARNING, 'dprjax'):
    engine = Engine(small.path, folder, name='base', options=OPTIONS)
  listed = dict(engine.library.listing())
  found = {name for name, about in listed.items() if not about.refused}
  assert found == {*served} and listed.keys() - found == {*refused, '\\udcff'}
  told = [record.getMessage() for record in caplog.records if 'not served' in record.getMessage()]
  assert len(told) == len(refused) + 1 == len(set(told))
  for name in found:
    assert engine.tokenize(name, 'query', ['json']).version.meta
  for name in ('a/b', '../prompts/qa', '..', '', 'a\0b', '\ud800', 'hidden', 'link'):
    with pytest.raises(UnknownPrompt):
      engine.library.get(name)
  assert not engine.tokenize('base', 'query', ['json']).version.meta
  engine.close()


def test_a_flood_of_one_tenant_does_not_hold_up_another(engine):
  done, flood, quiet = [], Tenant('flood'), Tenant('quiet')

  def steps(count):
    for number in range(count):
      yield 0.001
      time.sleep(0.001)
      done.append(f'slice {number}')

  long = queue(engine, engine.tokenize('tied', 'query', ['json'] * 300), flood)
  sliced = engine.batcher.submit_steps(steps(300), flood)
  one = queue(engine, engine.tokenize('cls', 'query', ['json']), quiet)
  one.add_done_callback(lambda _: done.append('quiet'))
  own = queue(engine, engine.tokenize('cls', 'query', ['json']), flood)  # a short one of its own
  own.add_done_callback(lambda _: done.append('own'))
  long.add_done_callback(lambda _: done.append('long'))
  assert one.result(60).shape == own.result(60).shape == (1, 16)
  assert not long.done() and not sliced.done()
  assert long.result(60).shape == (300, 16) and sliced.result(60) is None
  assert done.index('quiet') < done.index('long') and done.index('own') < done.index('long')
  # A job in slices ends when nobody waits for it.
  left = engine.batcher.submit_steps(steps(10**6), flood)
  while f'slice {100}' not in done:
    time.sleep(0.001)
  assert left.cancel()
  assert engine.submit('tied', 'query', ['json']).result(60).shape == (1, 16)


def batches_of(engine):
  """The number of batches by their rows."""
  found = collections.Counter()
  for sample in engine.metrics.batches.collect()[0].samples:
    if sample.name.endswith('_total'):
      found[sample.labels['rows']] += int(sample.value)
  return found


def test_a_batch_takes_no_longer_than_a_slice_while_several_tenants_ask(engine, monkeypatch):
  before = batches_of(engine)
  monkeypatch.setattr(batcher, 'SLICE_S', 0.0)
  flood = queue(engine, engine.tokenize('tied', 'query', ['json'] * 60), Tenant('flood'))
  quiet = queue(engine, engine.tokenize('cls', 'query', ['json']), Tenant('quiet'))
  assert quiet.result(60).shape == (1, 16) and flood.result(60).shape == (60, 16)
  assert (batches_of(engine) - before)['1'] > 50  # else 15 batches of four rows


def test_a_tenant_with_little_work_shares_no_batch_with_a_flood(engine, monkeypatch):
  monkeypatch.setattr(batcher, 'SLICE_S', 5.0)
  monkeypatch.setattr(engine.batcher, 'costs', dict.fromkeys(engine.options.lengths, 1.0))
  monkeypatch.setattr(batcher, 'learn', lambda *_: None)
  before = batches_of(engine)

  def hold():
    yield 0.001
    time.sleep(0.1)  # until both requests below are there

  engine.batcher.submit_steps(hold(), Tenant('flood'))
  flood = queue(engine, engine.tokenize('tied', 'query', ['json'] * 7), Tenant('flood'))
  quiet = queue(engine, engine.tokenize('cls', 'query', ['json']), Tenant('quiet'))
  assert quiet.result(60).shape == (1, 16) and flood.result(60).shape == (7, 16)
  assert batches_of(engine) - before == {'1': 1 + 3, '4': 1}  # eight rows: two batches of four


def test_the_next_batch_is_sent_before_the_vectors_of_the_last_one_are_given_out(engine):
  sent = []

  def hold():
    yield 0.001
    time.sleep(0.1)  # until both requests below are there

  before = batches_of(engine)
  engine.batcher.submit_steps(hold())
  one, two = (queue(engine, engine.tokenize('tied', 'query', ['json'] * 4)) for _ in range(2))
  one.add_done_callback(lambda _: sent.append((batches_of(engine) - before).total()))
  assert len(one.result(60)) == len(two.result(60)) == 4
  assert sent == [2]


def test_a_text_of_megabytes_costs_what_its_beginning_does(engine):
  long = 'json decodes a string ' * 200_000
  began = time.monotonic()
  tokens = engine.tokenize('tied', 'query', [long, 'json'])
  assert time.monotonic() - began < 0.5 and tokens.truncated == [0]
  expected = engine.tokenize('tied', 'query', [long[:3000]])
  np.testing.assert_array_equal(tokens.texts[0].ids, expected.texts[0].ids)
  with refused('text 0'):
    engine.tokenize('tied', 'query', [' ' * 10**6 + 'json'])


def test_files_that_a_server_does_not_follow(engine, small, folder, tmp_path):
  library = engine.library
  (tmp_path / 'secret').write_text('secret')
  harmful = {
    'outside': lambda path: path.symlink_to(tmp_path / 'secret'),
    'pipe': os.mkfifo,
    'loop': lambda path: path.symlink_to(path.name),
  }
  inside = folder / 'inside.npz'
  inside.symlink_to('tied.npz')
  try:
    assert library.get('inside').sha256 == library.get('tied').sha256
    for name, make in harmful.items():
      path = folder / f'{name}.npz'
      make(path)
      try:
        with pytest.raises((InputError, OSError)):
          library.get(name)
        listed = dict(library.listing())
        assert listed['tied'].sha256 and any(name in key for key in listed)
        assert all(about.refused for key, about in listed.items() if name in key)
      finally:
        path.unlink()
  finally:
    inside.unlink()


def test_a_file_replaced_by_one_of_its_size_and_time_is_read_again(engine, folder, small):
  first, second = (small.write(folder, f'same-{i}', 2) for i in 'ab')
  try:
    before = engine.library.get('same-a').sha256
    times = first.stat()
    content = second.read_bytes()
    assert len(content) == times.st_size
    with first.open('r+b') as file:
      file.write(content)
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert engine.library.get('same-a').sha256 == sha256_file(second) != before
  finally:
    first.unlink()
    second.unlink()


def test_a_folder_that_is_gone_is_no_unknown_prompt(engine, folder):
  away = folder.with_name('away')
  folder.rename(away)
  try:
    for call in (engine.library.get, engine.library.delete):
      with pytest.raises(OSError, match='folder of prompts'):
        call('tied')
    assert engine.library.get('model').sha256 == ''
  finally:
    away.rename(folder)
  assert engine.library.get('tied').sha256


@pytest.mark.slow
def test_prompts_beyond_the_memory_of_the_host_are_read_again(small, folder):
  options = ServerOptions(rows=(1,), lengths=(48,), slots=2, host_bytes=1)
  engine = Engine(small.path, folder, options=options)
  first = {name: engine.submit(name, 'query', ['json']).result(60) for name in PROMPTS}
  again = {name: engine.submit(name, 'query', ['json']).result(60) for name in PROMPTS}
  for name in PROMPTS:
    np.testing.assert_array_equal(first[name], again[name])
  assert 'dprjax_prompts_resident{place="host"} 1.0' in engine.metrics.text().decode()
  engine.close()


def test_options_that_do_not_fit(small, tmp_path):
  with refused('query_max_length'):
    Engine(small.path, tmp_path / 'new', options=ServerOptions(lengths=(2,)))


def test_the_rows_of_a_batch():
  shapes = ServerOptions((1, 4, 16, 64), (32, 256), 4096)
  assert list(shapes.shapes()) == [
    (1, 32),
    (1, 256),
    (4, 32),
    (4, 256),
    (16, 32),
    (16, 256),
    (64, 32),
  ]
  waiting = (1, 2, 3, 4, 13, 14, 16, 32, 55, 56, 64, 999)
  rows = [shapes.choose_rows(count, 64) for count in waiting]
  assert rows == [1, 1, 1, 4, 4, 16, 16, 16, 16, 64, 64, 64]
  assert shapes.choose_rows(999, 16) == 16
  assert [shapes.most_rows(length, 64) for length in (32, 256)] == [64, 16]
  assert [shapes.most_rows(32, most) for most in (999, 63, 1, 0)] == [64, 16, 1, 1]
  assert [shapes.bucket(tokens) for tokens in (1, 32, 33, 256)] == [32, 32, 256, 256]
