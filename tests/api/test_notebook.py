"""In a kernel of Jupyter, as a notebook runs it."""

import json
import pathlib
import time

import pytest

from tests import devices

ROOT = pathlib.Path(__file__).parent.parent.parent

STATE = """
import asyncio, logging, signal, sys
def state():
  loggers = [logging.getLogger(name) for name in ('', 'absl', 'jax', 'dprjax', 'asyncio')]
  return (
    [(one.handlers[:], one.level, one.propagate, one.filters[:]) for one in loggers],
    asyncio.BaseEventLoop.call_soon_threadsafe, asyncio.run, asyncio.get_running_loop(),
    type(asyncio.get_running_loop()), asyncio.Task, signal.getsignal(signal.SIGTERM),
    sys.unraisablehook, sys.excepthook,
  )
before = state()
"""

FIT = """
import dprjax
fitted = dprjax.fit(BACKBONE, *TEXTS, options=OPTIONS, workdir=WORKDIR)
"""


@pytest.fixture(scope='module')
def kernel():
  manager = pytest.importorskip('jupyter_client').manager
  pytest.importorskip('ipykernel')
  environment = devices.environment(JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT))
  made, client = manager.start_new_kernel(kernel_name='python3', env=environment)
  yield made, client
  client.stop_channels()
  made.shutdown_kernel(now=True)


def run(client, code, on_output=lambda text: None):
  """(standard error and plain results, HTML results, name of the error) of a cell."""
  texts, pages, error = [], [], None
  asked = client.execute(code)
  deadline = time.monotonic() + 300
  while time.monotonic() < deadline:
    message = client.get_iopub_msg(timeout=300)
    if message['parent_header'].get('msg_id') != asked:
      continue
    kind, content = message['msg_type'], message['content']
    if kind == 'stream':
      texts.append(content['text'])
      on_output(content['text'])
    elif kind in ('execute_result', 'display_data'):
      texts.append(content['data'].get('text/plain', ''))
      pages.append(content['data'].get('text/html', ''))
    elif kind == 'error':
      error = content['ename']
    elif kind == 'status' and content['execution_state'] == 'idle':
      break
  return ''.join(texts), ''.join(pages), error


@pytest.mark.slow
def test_a_cell_is_interrupted_and_goes_on(kernel, trained, texts, tmp_path):
  manager, client = kernel
  options = {
    'steps': 300,
    'batch_size': 8,
    'log_every': 1,
    'prompt.length': 2,
    'data.hold_out': 0.5,
    'eval.every': 5000,
    'checkpoint.every': 5000,
    'data.query_max_length': 16,
    'data.passage_max_length': 16,
  }
  given = f'BACKBONE, TEXTS = {str(trained / "backbone")!r}, {texts!r}\n'
  given += f'OPTIONS, WORKDIR = {options!r}, {str(tmp_path / "run")!r}\n'
  assert run(client, given + STATE)[2] is None
  pressed = []

  def press(text):
    if 'training' in text and not pressed and ' 0/' not in text:
      pressed.append(manager.interrupt_kernel())

  shown, _, error = run(client, FIT, press)
  assert error == 'KeyboardInterrupt' and pressed, shown[-2000:]
  assert 'Traceback' not in shown
  same = run(client, 'before == state()')[0]
  assert same == 'True', run(client, '(before, state())')[0]
  [saved] = [
    int(one.name)
    for one in (tmp_path / 'run/training/checkpoints').iterdir()
    if one.name.isdecimal()
  ]
  assert 0 < saved < 300
  # It goes on from there; the session is usable.
  shown, _, error = run(client, FIT)
  assert error is None, shown[-2000:]
  assert shown.count('\n') <= 5 and str(tmp_path) in shown
  plain, page, _ = run(client, 'fitted')
  assert 'nDCG@10' in plain and '<table>' in page and 'data:image/png' in page
  assert run(client, 'before == state()')[0] == 'True'


def execute(name, parameters, folder, monkeypatch):
  """A notebook of docs/notebooks, with other parameters and fewer docstrings; what it shows."""
  nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
  for variable, value in devices.environment(JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT)).items():
    monkeypatch.setenv(variable, value)
  monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
  monkeypatch.setenv('MPLBACKEND', 'module://matplotlib_inline.backend_inline')
  notebook = nbformat.read(ROOT / 'docs' / 'notebooks' / name, 4)
  [cell] = [cell for cell in notebook.cells if 'parameters' in cell.metadata.get('tags', ())]
  cell.source = '\n'.join(f'{key} = {value!r}' for key, value in parameters.items())
  for cell in notebook.cells:
    cell.source = cell.source.replace("build('docs')", "build('docs', ['email', 'json', 'xml'])")
  place = {'metadata': {'path': str(folder)}}
  nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
  outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
  return [output.get('data', {}) for output in outputs]


SMALL = {
  'steps': 2,
  'prompt.length': 2,
  'data.dev_split': 'dev',
  'data.query_max_length': 16,
  'data.passage_max_length': 16,
}


@pytest.mark.slow
def test_the_first_notebook(trained, tmp_path, monkeypatch):
  parameters = {'backbone': str(trained / 'backbone'), 'options': SMALL}
  shown = execute('first.ipynb', parameters, tmp_path, monkeypatch)
  pages = ''.join(''.join(data.get('text/html', '')) for data in shown)
  assert 'on the dev split' in pages and 'nDCG@10' in pages
  assert (tmp_path / 'searcher' / 'retriever.json').exists()


@pytest.mark.slow
def test_the_notebook_of_topics(trained, tmp_path, monkeypatch):
  pytest.importorskip('sklearn')
  pytest.importorskip('tomotopy')
  words = [
    *('matrix vector theorem', 'neuron brain pulse', 'query index database', 'galaxy star orbit'),
    *('protein cell gene', 'market price trade', 'poem verse rhyme', 'engine piston valve'),
  ]
  path = tmp_path / 'arxiv.jsonl'
  with path.open('w') as file:
    for n in range(150):
      said = f'We study {words[n % 8]} and {words[n % 8].split()[n % 2]}. ' * 3
      paper = {'id': f'{n}', 'title': f'on {words[n % 8]} {n}', 'abstract': said}
      file.write(json.dumps(paper | {'categories': [f'c{n % 8}']}) + '\n')
  options = SMALL | {'topics.path': 'topics.npz', 'topics.batch': 2, 'batch_size': 8}
  options['eval.skip_saturated'] = False  # words of a topic are all that these texts have
  parameters = {
    'papers': str(path),
    'backbone': str(trained / 'backbone'),
    'sizes': {'train': 80, 'dev': 20, 'test': 40},
    'options': options,
  }
  shown = execute('topics.ipynb', parameters, tmp_path, monkeypatch)
  assert any('image/png' in data for data in shown)
