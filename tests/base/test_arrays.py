"""npz files of strangers."""

import concurrent.futures
import gc
import io
import sys
import zipfile

import numpy as np
import pytest

from dprjax.base import arrays
from dprjax.base.errors import InputError
from tests.refusals import refused


def member(array, **changes):
  """The bytes of an npy file, with another header."""
  buffer = io.BytesIO()
  header = np.lib.format.header_data_from_array_1_0(array) | changes
  np.lib.format.write_array_header_1_0(buffer, header)
  return buffer.getvalue() + array.tobytes()


def write(path, members, compression=zipfile.ZIP_STORED):
  with zipfile.ZipFile(path, 'w', compression) as archive:
    for name, content in members:
      archive.writestr(name, content)
  return path


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed, arrays.write_arrays])
def test_reads_what_numpy_writes(tmp_path, save):
  made = {
    'a': np.arange(6, dtype=np.int32).reshape(2, 3),
    'b/c': np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    'text': np.array('grün'),
    'empty': np.zeros((0, 4), np.float32),
  }
  path = tmp_path / 'a.npz'
  save(path, made) if save is arrays.write_arrays else save(path, **made)
  read = arrays.read_arrays(path, 'topics')
  assert read.keys() == made.keys()
  for name, array in made.items():
    assert read[name].dtype == array.dtype
    np.testing.assert_array_equal(read[name], array)


X = np.arange(4, dtype=np.int64)
REFUSED = {
  'larger than its bytes': [('a.npy', member(X, shape=(10**12,)))],
  'smaller than its bytes': [('a.npy', member(X, shape=(3,)))],
  'objects': [('a.npy', member(X, descr='|O'))],
  'no array': [('a.npy', b'hello')],
  'of a name on two lines': [('a\nb.npy', b'hello')],
  'twice': [('a.npy', member(X)), ('a.npy', member(X))],
}


@pytest.mark.parametrize('members', REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_refuses_arrays_that_are(tmp_path, members):
  with refused('a.npz') as error:
    arrays.read_arrays(write(tmp_path / 'a.npz', members), 'topics')
  assert len(str(error.value)) < 500 and '\n' not in str(error.value)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
  path = write(tmp_path / 'a.npz', [('a.npy', b'\0' * 10**6)], zipfile.ZIP_DEFLATED)
  content = bytearray(path.read_bytes())
  # The directory at the end says 2 GB.
  at = content.rindex(b'PK\x01\x02')
  content[at + 24 : at + 28] = (2 * 10**9).to_bytes(4, 'little')
  path.write_bytes(content)
  with refused('2,000,000,000'):
    arrays.read_arrays(path, 'topics')


@pytest.mark.parametrize('content', [b'', b'PK\x03\x04', b'\x93NUMPY'])
def test_refuses_what_is_no_npz(tmp_path, content):
  path = tmp_path / 'a.npz'
  path.write_bytes(content)
  with refused('a.npz'):
    arrays.read_arrays(path, 'topics')


def test_every_cut_of_a_file_is_refused(tmp_path):
  path = tmp_path / 'a.npz'
  np.savez_compressed(path, a=np.arange(50), b=np.ones(3))
  whole = path.read_bytes()
  for end in range(0, len(whole), 7):
    path.write_bytes(whole[:end])
    with pytest.raises(InputError):
      arrays.read_arrays(path, 'topics')


def test_a_harmed_file_is_refused_or_read_as_it_was(tmp_path):
  path, rng, refusals = tmp_path / 'a.npz', np.random.default_rng(7), 0
  given = {'a': np.arange(50), 'b': np.ones(3)}
  arrays.write_arrays(path, given)
  whole = path.read_bytes()
  for _ in range(300):
    harmed = bytearray(whole)
    for place in rng.integers(len(whole), size=rng.integers(1, 4)):
      harmed[place] = rng.integers(256)
    path.write_bytes(harmed)
    try:
      found = arrays.read_arrays(path, 'topics')
    except InputError as error:
      refusals += 1
      assert str(path) in str(error)
    else:
      for name, array in found.items():
        np.testing.assert_array_equal(array, given[name])
  assert refusals > 200


@pytest.mark.slow
def test_threads_read_headers_at_the_same_time():
  """Without a lock, Python 3.11 fails here: collections of garbage let other threads in."""
  content = member(np.zeros((2, 3)))
  threshold, interval = gc.get_threshold(), sys.getswitchinterval()

  def collected(*_):
    return [None for _ in range(300)]

  def read(_):
    return arrays.read_header(io.BytesIO(content))[0]

  gc.callbacks.append(collected)
  try:
    gc.set_threshold(3)
    sys.setswitchinterval(1e-6)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      assert {*pool.map(read, range(8000))} == {(2, 3)}
  finally:
    gc.callbacks.remove(collected)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)
