"""The text of the quickstart: docstrings of installed Python packages, as a BEIR folder.

Each documented function or class gives a passage: its qualified name is the title, its docstring
without the summary is the text. The summary is a query for that passage.

Source files are parsed and never imported, except numpy, whose ufuncs have docstrings in compiled
code. Names follow re-exports (`jax._src.numpy.lax_numpy.where` is `jax.numpy.where`).
"""

import ast
import collections
import hashlib
import importlib.util
import inspect
import itertools
import pathlib
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.text.qrels import write_dataset

STDLIB = 'stdlib'
PACKAGES = (STDLIB, 'numpy', 'scipy', 'jax', 'flax', 'optax')
HELD_OUT = 0.1  # of the queries, for dev and for test each

_TESTS = re.compile(r'tests?|idle_test|conftest|test_.*|.*_tests?')
_SIGNATURE = re.compile(r'[\w.]+\(.*[)\]](\n--)?', re.DOTALL)
_UNDERLINE = re.compile(r'\s*([-=~^*#]{3,}|--)\s*')
_NUMPY_UFUNCS = 'numpy._core.umath'


class Docstring(NamedTuple):
  """A function or class; ``page`` is its module, which decides the split."""

  name: str
  page: str
  summary: str
  body: str


class _Module:
  """Definitions and imported names of a source file."""

  def __init__(self) -> None:
    self.docs: dict[str, str] = {}
    self.imports: dict[str, tuple[str, str]] = {}  # local name -> (module, name in it)
    self.stars: list[str] = []  # modules of `from module import *`
    self.listed: set[str] | None = None  # __all__


def build(
  out_dir: files.PathLike,
  packages: Sequence[str] = PACKAGES,
  categories: bool = False,
) -> dict[str, dict[str, int]]:
  """Writes `corpus.jsonl`, `queries.jsonl` and `qrels/{train,dev,test}.tsv`; returns the counts.

  The corpus has all passages. A passage has no query if its summary has fewer than three words, is
  repeated in the body, or also summarises other passages. Pages are sorted by a hash of their
  names; they fill test and then dev with a tenth of the queries each, and the rest is train. So
  each page is in one split, and the same packages give the same split.

  Args:
    out_dir: the folder, written atomically; an existing one is replaced.
    packages: `stdlib`, or names of installed packages and modules.
    categories: whether each passage gets its package and module as categories.
  """
  docstrings = entries(packages)
  shared = collections.Counter(_plain(entry.summary) for entry in docstrings)
  left_out: collections.Counter[str] = collections.Counter()
  asking: dict[str, list[Docstring]] = collections.defaultdict(list)
  for entry in docstrings:
    summary = _plain(entry.summary)
    if len(summary.split()) < 3:
      left_out['summary too short'] += 1
    elif shared[summary] > 1:
      left_out['summary shared'] += 1
    elif f' {summary} ' in f' {_plain(entry.body)} ':
      left_out['summary repeated in the body'] += 1
    else:
      asking[entry.page].append(entry)

  enough = HELD_OUT * sum(map(len, asking.values()))
  splits: dict[str, list[Docstring]] = {'train': [], 'dev': [], 'test': []}
  for left, page in zip(range(len(asking), 0, -1), sorted(asking, key=_digest), strict=True):
    # Each later split needs at least one page.
    if len(splits['test']) < enough and left > 2:
      split = 'test'
    else:
      split = 'dev' if len(splits['dev']) < enough and left > 1 else 'train'
    splits[split] += asking[page]

  with files.atomic_path(out_dir) as folder:
    write_dataset(
      folder,
      (
        {'_id': entry.name, 'title': entry.name, 'text': entry.body}
        | ({'categories': [entry.page.split('.')[0], entry.page]} if categories else {})
        for entry in docstrings
      ),
      (
        {'_id': f'q:{entry.name}', 'text': entry.summary}
        for entry in itertools.chain(*splits.values())
      ),
      {
        split: {f'q:{entry.name}': {entry.name: 1} for entry in members}
        for split, members in splits.items()
      },
    )
  tops = (entry.page.split('.')[0] for entry in docstrings)
  return {
    'passages': dict(collections.Counter(top if top in packages else STDLIB for top in tops)),
    'queries': {split: len(members) for split, members in splits.items()},
    'pages': {split: len({entry.page for entry in members}) for split, members in splits.items()},
    'ask no query': dict(left_out),
  }


def entries(packages: Sequence[str] = PACKAGES) -> list[Docstring]:
  """Functions and classes whose docstring `split_docstring` can split, sorted by name.

  Methods, private names and test code are left out. Among equal docstrings, the one with the fewest
  dots in its name stays.
  """
  modules: dict[str, _Module] = {}
  for package in packages:
    for path, name in _source_files(package):
      _read(path, name, modules)
  public = _public_names(modules)
  docstrings = []
  for page, module in modules.items():
    for name, doc in module.docs.items():
      if not name.startswith('_') and (parts := split_docstring(doc)):
        docstrings.append(Docstring(public.get((page, name), f'{page}.{name}'), page, *parts))
  if 'numpy' in packages:
    ufuncs = {value.__name__: value for value in vars(np).values() if isinstance(value, np.ufunc)}
    for name, ufunc in ufuncs.items():
      if parts := split_docstring(inspect.getdoc(ufunc) or ''):
        docstrings.append(Docstring(f'numpy.{name}', _NUMPY_UFUNCS, *parts))
  distinct: dict[str, Docstring] = {}
  for entry in sorted(docstrings, key=lambda entry: (entry.name.count('.'), entry.name)):
    distinct.setdefault(_plain(f'{entry.summary} {entry.body}'), entry)
  return sorted(distinct.values())


def split_docstring(doc: str) -> tuple[str, str] | None:
  """The summary on one line and the body; None if either is missing or too short.

  The summary ends with the first line that ends in a full stop, or with the first paragraph. The
  body has at least three words; a leading signature and underlines of headings are removed.

  >>> split_docstring('''sum(a)\\n\\nAdd all\\nelements.\\n\\nArgs\\n----\\na: the elements.''')
  ('Add all elements.', 'Args\\na: the elements.')
  """
  paragraphs = re.split(r'\n\s*\n', inspect.cleandoc(doc).strip())
  while paragraphs and _SIGNATURE.fullmatch(paragraphs[0].strip()):
    paragraphs = paragraphs[1:]
  if not paragraphs:
    return None
  first = paragraphs[0].splitlines()
  end = next(
    (number for number, line in enumerate(first, start=1) if line.rstrip().endswith('.')),
    len(first),
  )
  rest = '\n'.join(first[end:])
  lines = '\n\n'.join([rest, *paragraphs[1:]]).splitlines()
  body = '\n'.join(line.rstrip() for line in lines if not _UNDERLINE.fullmatch(line)).strip()
  summary = ' '.join(' '.join(first[:end]).split())
  if not _plain(summary) or len(_plain(body).split()) < 3:
    return None
  return summary, body


def _source_files(package: str) -> Iterator[tuple[pathlib.Path, str]]:
  """Yields (path, module name) of the source files of a package, sorted, without tests."""
  if package == STDLIB:
    root = base = pathlib.Path(sysconfig.get_paths()['stdlib'])
  else:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
      raise InputError(
        f'docstrings: no package {package!r} with source files is installed; install or omit it'
      )
    root = pathlib.Path(next(iter(spec.submodule_search_locations or []), spec.origin or ''))
    base = root.parent
  for path in [root] if root.is_file() else sorted(root.rglob('*.py')):
    parts = path.relative_to(base).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    # This also excludes `site-packages` and `config-3.12-x86_64-linux-gnu`.
    if all(part.isidentifier() and not _TESTS.fullmatch(part) for part in parts):
      yield path, '.'.join(parts)


def _read(path: pathlib.Path, name: str, modules: dict[str, _Module]) -> None:
  """Parses one file into ``modules``; skips files of another Python version."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # invalid escape sequences in the packages
      tree = ast.parse(path.read_bytes())
  except (SyntaxError, ValueError):
    return
  module = modules.setdefault(name, _Module())
  package = name if path.name == '__init__.py' else name.rpartition('.')[0]
  todo: list[ast.stmt] = list(tree.body)
  while todo:
    node = todo.pop(0)
    match node:
      case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
        module.docs[node.name] = ast.get_docstring(node) or ''
      case ast.ImportFrom():
        parents = package.split('.')
        source = '.'.join(parents[: len(parents) - node.level + 1]) if node.level else ''
        source = '.'.join(part for part in (source, node.module) if part)
        for alias in node.names:
          if alias.name == '*':
            module.stars.append(source)
          else:
            module.imports[alias.asname or alias.name] = (source, alias.name)
      case ast.If() | ast.Try() | ast.With():
        todo += [
          *node.body,
          *getattr(node, 'orelse', []),
          *(line for handler in getattr(node, 'handlers', []) for line in handler.body),
        ]
      case ast.Assign(
        targets=[ast.Name(id='__all__')], value=ast.List(elts=elements) | ast.Tuple(elts=elements)
      ):
        module.listed = set(_strings(elements))
      case ast.AugAssign(target=ast.Name(id='__all__')):
        module.listed = None  # known only at run time: take every public name
      case ast.Expr(value=ast.Call(func=ast.Name(id='add_newdoc'), args=arguments)):
        # numpy.add_newdoc(module, name, doc), and add_newdoc(name, doc) of scipy.special.
        texts = _strings(arguments)
        if len(texts) == 3 or len(texts) == len(arguments) == 2:
          owner = texts[0] if len(texts) == 3 else f'{package}._ufuncs'
          modules.setdefault(owner, _Module()).docs.setdefault(
            texts[-2], inspect.cleandoc(texts[-1])
          )


def _strings(nodes: Sequence[ast.expr]) -> list[str]:
  values = [node.value for node in nodes if isinstance(node, ast.Constant)]
  return [value for value in values if isinstance(value, str)]


def _public_names(modules: dict[str, _Module]) -> dict[tuple[str, str], str]:
  """The shortest public name of each definition (module, name)."""

  def origin(
    module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
  ) -> tuple[str, str] | None:
    if module not in modules or (module, name) in seen:
      return None
    if name in modules[module].docs:
      return module, name
    seen |= {(module, name)}
    if name in modules[module].imports:
      return origin(*modules[module].imports[name], seen)
    return next(
      (place for star in modules[module].stars if (place := origin(star, name, seen))), None
    )

  def offered(module: str, seen: frozenset[str] = frozenset()) -> set[str]:
    if module not in modules or module in seen:
      return set()
    names = {*modules[module].docs, *modules[module].imports}
    for star in modules[module].stars:
      listed = modules[star].listed if star in modules else None
      names |= offered(star, seen | {module}) if listed is None else listed
    return {name for name in names if not name.startswith('_')}

  best: dict[tuple[str, str], tuple[int, int, str]] = {}
  for module in modules:
    if any(part.startswith('_') for part in module.split('.')):
      continue
    listed = modules[module].listed
    for name in offered(module):
      place = origin(module, name)
      if place is None or place[0].split('.')[0].lstrip('_') != module.split('.')[0]:
        continue  # a name that the module uses from another package
      # A helper imported by a public sibling still belongs to its own module. A name from a private
      # or deeper module is re-exported.
      inside = f'{place[0]}.'.startswith(f'{module}.')
      private = any(part.startswith('_') for part in place[0].split('.'))
      if (inside or private) and (listed is None or name in listed or inside):
        rank = (module.count('.'), len(module), f'{module}.{name}')
        best[place] = min(rank, best.get(place, rank))
  return {place: rank[-1] for place, rank in best.items()}


def _digest(text: str) -> bytes:
  return hashlib.sha256(text.encode()).digest()


def _plain(text: str) -> str:
  """Lower case, with a space for each run of characters that are not letters or digits."""
  return ' '.join(re.findall(r'\w+', text.lower()))
