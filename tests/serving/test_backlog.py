"""Files and batches on disk."""

import io
import os
import time

import pytest

from dprjax.serving.backlog import Backlog, Full, InUse, UnknownEntry
from tests.refusals import refused


@pytest.fixture
def backlog(tmp_path):
  backlog = Backlog(tmp_path / 'later', most_bytes=100, most_tenant_bytes=2000, days=1)
  yield backlog
  backlog.close()


def add(backlog, tenant, content=b'{}\n'):
  return backlog.add_file(tenant, 'a.jsonl', 'batch', io.BytesIO(content)).id


def test_a_tenant_reaches_its_own_files_alone(backlog, tmp_path):
  file = add(backlog, 'one', b'secret\n')
  batch = backlog.add_batch('one', file, '/v1/embeddings', '24h', None).id
  assert backlog.content('one', file).read_bytes() == b'secret\n'
  assert [card.id for card in backlog.files('one')] == [file]
  assert backlog.files('two') == [] and backlog.batches('two') == []
  for tenant in ('two', '', '../one', 'ONE'):
    with pytest.raises(UnknownEntry):
      backlog.content(tenant, file)
    with pytest.raises(UnknownEntry):
      backlog.delete_file(tenant, file)
    with pytest.raises(UnknownEntry):
      backlog.add_batch(tenant, file, '/v1/embeddings', '24h', None)
    with pytest.raises(UnknownEntry):
      backlog.cancel(tenant, batch)
  for id in ('', '.', '../x', f'{file}/../{file}', f'../{file}', file.upper(), 'file-' + 'a' * 24):
    with pytest.raises(UnknownEntry):
      backlog.content('one', id)
  modes = {path.stat().st_mode & 0o077 for path in [*tmp_path.glob('later/**/*')]}
  assert modes == {0}


def test_the_room_of_a_tenant(backlog):
  for _ in range(4):
    add(backlog, 'one', b'x' * 300)
  with pytest.raises(Full):
    add(backlog, 'one', b'x' * 300)
  add(backlog, 'two', b'x' * 300)
  backlog.delete_file('one', backlog.files('one')[0].id)
  file = add(backlog, 'one', b'x' * 100)
  backlog.add_batch('one', file, '/v1/embeddings', '24h', None)
  with pytest.raises(InUse):
    backlog.delete_file('one', file)
  [record] = backlog.active()
  with pytest.raises(Full):
    backlog.append(record, b'x' * 300, b'')


def test_answers_that_were_not_counted_are_written_again(backlog):
  file = add(backlog, 'one')
  id = backlog.add_batch('one', file, '/v1/embeddings', '24h', {'a': 'b'}).id
  [record] = backlog.active()
  backlog.append(record, b'1\n', b'')
  backlog.write(record)
  backlog.append(record, b'2\n', b'bad\n')  # the server is killed here
  [record] = backlog.active()
  assert (record.out, record.err) == (2, 0)
  backlog.append(record, b'two\n', b'')
  backlog.write(record)
  backlog.finish(record, 'completed')
  backlog.finish(record, 'completed')  # it was killed within the first
  card = backlog.batch('one', id)
  assert card.status == 'completed' and card.error_file_id is None and card.completed_at
  assert backlog.content('one', card.output_file_id).read_bytes() == b'1\ntwo\n'
  assert backlog.active() == [] and backlog.cancel('one', id).status == 'completed'


def test_one_server_works_and_what_has_expired_goes(backlog, tmp_path):
  other = Backlog(tmp_path / 'later', most_bytes=100, most_tenant_bytes=2000, days=-1)
  assert backlog.acquire() and not other.acquire() and backlog.acquire()
  backlog.close()
  assert other.acquire()
  other.close()
  old, new, needed = add(other, 'one'), add(backlog, 'one'), add(other, 'one')
  batch = other.add_batch('one', needed, '/v1/embeddings', '24h', None)
  aside = backlog.content('one', new).parent / '.x.jsonl.12345678.tmp'
  aside.touch()
  os.utime(aside, (time.time() - 9000,) * 2)
  backlog.clear()
  assert {card.id for card in backlog.files('one')} == {new, needed} and not aside.exists()
  [record] = backlog.active()
  assert record.card.id == batch.id and old != needed
  backlog.finish(record, 'failed')
  backlog.clear()
  assert [card.id for card in backlog.files('one')] == [new] and backlog.batches('one') == []
  (tmp_path / 'file').touch()
  with refused('--batches'):
    Backlog(tmp_path / 'file', most_bytes=100, most_tenant_bytes=2000, days=1)
