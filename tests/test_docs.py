"""The pages: their links, on the forge and on the site, and the commands that they name."""

import ast
import importlib
import importlib.util
import pathlib
import re
import tomllib

import pytest

import dprjax
from dprjax.base import cli, flags
from dprjax.training import config as configs
from tests import commands, pages

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(dprjax.__file__).parent
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md')])
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]


@pytest.fixture(scope='module')
def build():
  """docs/site/build.py."""
  spec = importlib.util.spec_from_file_location('build_site', ROOT / 'docs' / 'site' / 'build.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def without_code(text):
  """The text of a page without its blocks of code, whose comments look like headings."""
  text = re.sub(r'^```.*?^```$', '', text, flags=re.MULTILINE | re.DOTALL)
  return re.sub(r'^ {4}.*$', '', text, flags=re.MULTILINE)


def anchors(path):
  """The anchors that the forge gives to headings of a page."""
  headings = re.findall(r'^#+ (.+)$', without_code(path.read_text()), re.MULTILINE)
  plain = [re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).lower() for heading in headings]
  return [re.sub(r'[^\w\- ]', '', heading).strip().replace(' ', '-') for heading in plain]


@pytest.mark.parametrize('path', PAGES, ids=IDS)
def test_every_link_leads_somewhere(path):
  wrong = []
  for target in re.findall(r'\]\(([^)\s]+)\)', without_code(path.read_text())):
    if re.match(r'[a-z]+:', target):
      continue
    name, _, anchor = target.partition('#')
    to = (path.parent / name).resolve() if name else path
    if to.is_relative_to(ROOT / 'dprjax'):
      to = PACKAGE.parent / to.relative_to(ROOT)
    if not to.is_file() or (anchor and anchor not in anchors(to)):
      wrong.append(target)
  assert wrong == []


def test_the_root_file_leads_agents_to_their_page():
  assert '(docs/agents.md)' in (ROOT / 'AGENTS.md').read_text()


def test_the_site_has_every_page_once():
  shape = tomllib.loads((ROOT / 'docs' / 'site' / 'zensical.toml').read_text())['project']

  def pages(entries):
    for entry in entries:
      for value in entry.values():
        yield from pages(value) if isinstance(value, list) else [value]

  assert sorted(pages(shape['nav'])) == sorted(IDS)
  assert shape['theme']['font'] is False
  # Built only from a checkout: nothing of it names a host.
  assert '://' not in (ROOT / 'docs' / 'site' / 'zensical.toml').read_text()


class Parsed(Exception):
  """Raised in place of running the command."""


@pytest.mark.parametrize('page', IDS)
def test_every_command_is_taken(page, monkeypatch):
  def run(kind, command, argv=None):
    raise Parsed(flags.parse(kind, argv))

  monkeypatch.setattr(cli, 'run', run)
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(ROOT / 'experiments')
  monkeypatch.setenv('SLURM_ARRAY_TASK_ID', '0')
  for words in pages.commands(page, monkeypatch.setenv):
    if found := pages.command(words):
      name, arguments = found
      with pytest.raises(Parsed):
        commands.module(name).main(arguments)
      options = [word for word in arguments if word.startswith('--config')]
      # The config of a pipeline holds trainings, and a plan needs no data.
      if options and name not in ('pipeline', 'plan'):
        configs.check(configs.parse(options))
    for word in words:
      if re.fullmatch(r'(benchmarks|experiments|launch)/.*\.py', word):
        assert (ROOT / word).is_file()


def test_the_pages_have_commands(monkeypatch):
  found = [words for page in IDS for words in pages.commands(page, monkeypatch.setenv)]
  assert len([words for words in found if pages.command(words)]) > 120


def test_the_reference_names_every_command_and_every_public_name():
  text = (ROOT / 'docs' / 'reference.md').read_text()
  named = re.findall(r'^::: dprjax\.([\w.]+)$', text, re.MULTILINE)
  assert set(pages.MODULES.values()) <= set(named)
  assert set(dprjax.__all__) <= {name.rpartition('.')[2] for name in named}
  for name in named:
    module, _, what = name.rpartition('.')
    if name not in pages.MODULES.values():
      path = PACKAGE / module.replace('.', '/')
      source = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
      tree = ast.parse(source.read_bytes())
      assert what in {getattr(node, 'name', '') for node in tree.body}, name


def test_a_site_with_a_wrong_link_is_refused(build, tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'index.html').write_text(
    '<h1 id="here">x</h1><a href="a/b.html#there">1</a><a href="#here">2</a>'
    '<a href="https://elsewhere/">3</a><img src="data:image/png;base64,AA==">'
  )
  (tmp_path / 'a' / 'b.html').write_text('<p id="there">x</p><a href="../index.html">1</a>')
  assert build.check(tmp_path) == []
  (tmp_path / 'a' / 'b.html').write_text(
    '<a href="../index.html#gone">1</a><a href="c.html">2</a><script src="https://cdn/x.js"></script>'
    '<link rel="stylesheet" href="//fonts/x.css"><img src="no.png">'
  )
  assert build.check(tmp_path) == [
    'a/b.html leads to ../index.html#gone; there is no such anchor',
    'a/b.html loads //fonts/x.css',
    'a/b.html leads to c.html, which is not there',
    'a/b.html loads https://cdn/x.js',
    'a/b.html leads to no.png, which is not there',
    'index.html leads to a/b.html#there; there is no such anchor',
  ]
