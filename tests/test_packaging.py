"""setup.py, the constraints, the Makefile and the README agree."""

import ast
import importlib.metadata
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dprjax
from dprjax.base import version as dprjax_version

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(dprjax.__file__).parent
CONSTRAINTS = sorted((ROOT / 'constraints').glob('*.txt'))

# Not imported by dprjax, but needed by its imports.
INDIRECT = {
  'array-record': 'tensorflow-datasets, for file_format="array_record"',
  'grain': 'tensorflow-datasets, for as_data_source',
  'sentencepiece': 'transformers, for a tokenizer without tokenizer.json',
  'pystemmer': 'bm25s',
}

# Imported, and part of the interface of a package that is required.
INTERFACES = {
  'absl-py': 'ml-collections: config_flags reads the flags of absl',
  'etils': 'orbax-checkpoint: its paths are those of epath',
}


def literal(name):
  """The list or dictionary that setup.py assigns to `name`."""
  for node in ast.parse((ROOT / 'setup.py').read_text()).body:
    if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == name:
      return ast.literal_eval(node.value)
  raise KeyError(name)


REQUIRES = [Requirement(text) for text in literal('REQUIRES')]
EXTRAS = {
  extra: [Requirement(text) for text in texts] for extra, texts in literal('EXTRAS').items()
}

# Extras whose packages are imported where they are needed.
EXTRA = 'figures papers milvus qdrant pgvector serve tables tsne mteb hub-data'
OPTIONAL = [requirement for extra in EXTRA.split() for requirement in EXTRAS[extra]]


def pins(path):
  """{canonical name: version} of a constraints file."""
  lines = [line for line in path.read_text().splitlines() if not line.startswith('#')]
  return {canonicalize_name(line.split('==')[0]): Version(line.split('==')[1]) for line in lines}


def third_party_imports(folder):
  """Dotted names of third parties that the Python files of a folder import."""
  names = set()
  for path in folder.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_bytes())):
      if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        names.add(str(node.module))
  return {
    name
    for name in names
    if name.split('.')[0] not in sys.stdlib_module_names | {'dprjax', 'configs', 'setuptools'}
  }


def distributions(names):
  """The installed distributions that the imports come from."""
  owners = importlib.metadata.packages_distributions()
  # `orbax` is a namespace that several distributions share.
  namespaces = {'orbax.checkpoint': 'orbax-checkpoint'}
  optional = {requirement.name for requirement in OPTIONAL}
  found = set()
  for name in names:
    top = name.split('.')[0]
    full = [owner for prefix, owner in namespaces.items() if prefix.startswith(top)]
    owned = full or owners.get(top) or sorted(optional & {top})
    assert owned, f'{name} is imported and not installed'
    found.add(canonicalize_name(owned[0]))
  return found


@pytest.mark.slow
def test_what_is_imported_is_declared_and_what_is_declared_imported():
  required = {canonicalize_name(requirement.name) for requirement in REQUIRES}
  optional = {canonicalize_name(requirement.name) for requirement in OPTIONAL}
  used = distributions(third_party_imports(PACKAGE) | third_party_imports(ROOT / 'configs'))
  assert used - required - optional - INTERFACES.keys() == set()
  assert required - used <= INDIRECT.keys() <= required


def test_there_are_constraints_for_every_python():
  classifiers = re.findall(r'Python :: 3\.(\d+)', (ROOT / 'setup.py').read_text())
  assert (
    [path.stem for path in CONSTRAINTS]
    == [f'py3{minor}' for minor in classifiers]
    == ['py311', 'py312', 'py313']
  )


@pytest.mark.parametrize('path', CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_are_only_names_and_versions(path):
  text = path.read_text()
  assert [
    line for line in text.splitlines() if not re.fullmatch(r'#.*|[\w.-]+==[\w.!+-]+', line)
  ] == []
  assert '://' not in text
  assert not re.search(r'\+\w', text), 'a local version, which no index has'
  heavy = {'tensorflow', 'tensorflow-cpu', 'tf-nightly', 'keras', 'torch', 'torchvision', 'dprjax'}
  assert heavy.isdisjoint(pins(path))
  assert not any(name.startswith('nvidia-') for name in pins(path))


@pytest.mark.parametrize('path', CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_all_requirements(path):
  python = f'{path.stem[2]}.{path.stem[3:]}'
  pinned = pins(path)
  others = (EXTRAS[extra] for extra in ('plan', 'quickstart', 'test', 'docs', 'dev'))
  asked = itertools.chain(REQUIRES, OPTIONAL, *others)
  for requirement in asked:
    here = {'python_version': python, 'python_full_version': f'{python}.0', 'sys_platform': 'linux'}
    if requirement.name != 'dprjax' and (
      requirement.marker is None or requirement.marker.evaluate(here)
    ):
      name = canonicalize_name(requirement.name)
      assert name in pinned, f'{path.name} does not pin {name}'
      assert pinned[name] in requirement.specifier, (
        f'{path.name} pins {name} {pinned[name]}, setup.py wants {requirement.specifier}'
      )


def test_the_version_is_in_one_place():
  version = re.search(r"'(.+)'", (PACKAGE / 'base' / 'version.py').read_text())[1]
  assert Version(version)
  assert version not in (ROOT / 'setup.py').read_text()


@pytest.mark.parametrize('page', ['README.md', 'CONTRIBUTING.md'])
def test_pages_name_only_what_exists(page):
  text = (ROOT / page).read_text()
  targets = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
  named = set(re.findall(r'(?:^ {4}|`)make ([a-z-]+)', text, re.MULTILINE))
  assert named
  assert named <= targets
  assert {'quickstart', 'test', 'test-quick', 'lint', 'clean'} <= targets
  links = re.findall(r'`((?:docs|configs|tests|dprjax|constraints)/[\w/]+\.\w+)', text)
  files = [link for link in links if 'NAME' not in link]
  homes = {file: PACKAGE.parent if file.startswith('dprjax/') else ROOT for file in files}
  assert [file for file in files if not (homes[file] / file).exists()] == []


def test_the_changelog_and_the_citation_are_of_this_version():
  headings = re.findall(r'^## \[(.+?)\](.*)$', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
  released = [name for name, _ in headings if name != 'Unreleased']
  assert released[0] == dprjax_version.__version__
  assert sorted(released, key=Version, reverse=True) == released
  assert all(
    re.fullmatch(r' - \d{4}-\d\d-\d\d', rest) for name, rest in headings if name in released
  )
  yaml = pytest.importorskip('yaml', reason='pip install PyYAML')
  citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
  # Required keys of https://github.com/citation-file-format.
  assert {'cff-version', 'message', 'title', 'authors'} <= citation.keys()
  assert citation['version'] == dprjax_version.__version__
  assert str(citation['date-released']) in dict(headings)[citation['version']]


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """The names of the files in the sdist and, made from it, in the wheel; its entry points."""
  if not (ROOT / 'dprjax').is_dir():
    pytest.skip('what was installed is tested, without its sources')
  pytest.importorskip('build', reason='pip install build')
  setuptools = pytest.importorskip('setuptools', reason='pip install setuptools')
  if Version(setuptools.__version__) < Version('77'):
    pytest.skip('setuptools is older than pyproject.toml asks for')
  folder = tmp_path_factory.mktemp('built')
  # A copy, since setuptools writes beside the sources.
  skip = shutil.ignore_patterns('.*', '__pycache__', 'build', 'dist', '*.egg-info', 'runs')
  shutil.copytree(ROOT, folder / 'checkout', ignore=skip)
  done = subprocess.run(
    [sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder, folder / 'checkout'],
    capture_output=True,
    text=True,
    env={name: value for name, value in os.environ.items() if name != 'PYTHONPATH'},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  stem = f'dprjax-{dprjax_version.__version__}'
  with tarfile.open(folder / f'{stem}.tar.gz') as archive:
    source = {name.removeprefix(f'{stem}/') for name in archive.getnames()}
  with zipfile.ZipFile(folder / f'{stem}-py3-none-any.whl') as archive:
    entry = archive.read(f'{stem}.dist-info/entry_points.txt').decode()
    return source, set(archive.namelist()), entry


def files_below(folder):
  """Paths from the checkout on, without compiled files."""
  paths = (ROOT / folder).rglob('*')
  return {
    path.relative_to(ROOT).as_posix()
    for path in paths
    if path.is_file() and path.suffix != '.pyc' and not path.name.startswith('.')
  }


@pytest.mark.slow
@pytest.mark.xdist_group('built')
def test_the_wheel_holds_what_runs_and_nothing_else(built):
  _, wheel, entry = built
  names = {name for name in wheel if '.dist-info/' not in name}
  copied = {
    f'dprjax/training/{name}'
    for folder in ('configs', 'constraints', 'launch')
    for name in files_below(folder)
  }
  assert {
    'dprjax/training/configs/dptdr.py',
    'dprjax/training/constraints/py312.txt',
    'dprjax/training/launch/slurm.sbatch',
    'dprjax/training/launch/serve/Containerfile',
    'dprjax/serving/page.html',
  } <= names
  assert names == files_below('dprjax') | copied
  assert 'dprjax = dprjax.__main__:main' in entry


@pytest.mark.slow
@pytest.mark.xdist_group('built')
def test_the_sdist_holds_what_the_tests_need(built):
  source, *_ = built
  wanted = {'Makefile', 'CHANGELOG.md', 'CITATION.cff', 'LICENSE', 'pyproject.toml', 'setup.py'}
  for folder in ('tests', 'configs', 'docs', 'launch', 'experiments', 'constraints'):
    wanted |= files_below(folder)
  assert sorted(wanted - source) == []
  assert [name for name in source if name.endswith('.pyc') or name.startswith('runs')] == []


def test_links_of_the_description_are_absolute_where_there_is_an_address():
  code = compile(ast.Module([describe_function()], []), 'setup.py', 'exec')
  names = {'re': re}
  exec(code, names)
  text = '![a b](docs/x.png)\n\n[two\nlines](docs/y.md#z) [out](https://e.org) [here](#top)'
  assert names['describe'](text, 'https://h/o') == (
    '![a b](https://h/o/raw/HEAD/docs/x.png)\n\n[two\nlines](https://h/o/blob/HEAD/docs/y.md#z) '
    '[out](https://e.org) [here](#top)'
  )
  assert names['describe'](text, '') == 'two\nlines [out](https://e.org) [here](#top)'


def describe_function():
  body = ast.parse((ROOT / 'setup.py').read_text()).body
  return next(node for node in body if getattr(node, 'name', '') == 'describe')


def test_make_names_the_pythons_that_it_needs(tmp_path):
  done = subprocess.run(
    ['make', 'quickstart', 'PYTHON=/nonesuch/python', f'VENV={tmp_path}/venv'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert 'dprjax needs Python 3.11, 3.12 or 3.13' in done.stderr
  assert '/nonesuch/python is not one' in done.stderr
  assert not (tmp_path / 'venv').exists()


def test_a_second_make_installs_nothing(tmp_path):
  """If the stamp is newer than its dependencies, only the command itself runs."""
  tag = f'py{sys.version_info.major}{sys.version_info.minor}'
  (tmp_path / 'venv').mkdir()
  (tmp_path / 'venv' / f'.installed-{tag}').touch()
  arguments = ['make', '-n', 'quickstart', f'PYTHON={sys.executable}', f'VENV={tmp_path}/venv']
  done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
  assert 'dprjax.quickstart' in done.stdout
  assert 'pip' not in done.stdout
  (tmp_path / 'venv' / f'.installed-{tag}').unlink()
  done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
  assert f"pip install --quiet --no-compile -c 'constraints/{tag}.txt'" in done.stdout
