"""mteb tasks: retrieval in a folder, and scores on several tasks."""

import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.mteb.model import MtebModel, require
from dprjax.text import seen, sources

_log = logging.getLogger(__name__)


def folder_task(
  path: PathLike, split: str = 'test', *, name: str = '', language: str = 'eng-Latn'
) -> Any:
  """Retrieval in a data set on disk as an mteb task, measured by nDCG@10.

  Args:
    path: in any format of ``text.sources``.
    split: of the judgements.
    name: by default that of the folder; eight digits of a digest of the content follow.
    language: mteb code.

  Raises:
    InputError: mteb is missing or refuses the language, or the data cannot be read.
  """
  require()
  from datasets import Dataset
  from mteb.abstasks.retrieval import AbsTaskRetrieval
  from mteb.abstasks.task_metadata import TaskMetadata
  from mteb.languages import check_language_code

  data = sources.load_dataset(sources.Source(os.fspath(path), split=split))
  digests = sorted(files.sha256_file(file) for file in set(data.files.values()))
  revision = hashlib.sha256(''.join(digests).encode()).hexdigest()
  try:
    check_language_code(language)
    described = TaskMetadata(
      # mteb stores results only by the name of the task.
      name=f'{name or epath.Path(path).name}-{revision[:8]}',
      description=f'Retrieval in {epath.Path(path).name}.',
      dataset={'path': os.fspath(path), 'revision': revision[:40]},
      type='Retrieval',
      category='t2t',
      eval_splits=[split],
      eval_langs=[language],
      main_score='ndcg_at_10',
    )
  except ValueError as error:  # pydantic's
    raise InputError(f'mteb refuses {path}: {error}') from error

  class FolderTask(AbsTaskRetrieval):  # type: ignore[misc]
    metadata = described
    data_loaded: bool

    def load_data(self, *_: Any, **__: Any) -> None:
      if self.data_loaded:
        return
      passages = [{'id': passage.id, 'text': passage.text} for passage in data.passages]
      queries = [{'id': query.id, 'text': query.text} for query in data.queries]
      found = {
        'corpus': Dataset.from_list(passages),
        'queries': Dataset.from_list(queries),
        'relevant_docs': {query.id: dict(data.qrels[query.id]) for query in data.queries},
        'top_ranked': None,
      }
      self.dataset = {'default': {split: found}}
      self.data_loaded = True

  return FolderTask()


def measure(model: MtebModel, names: Sequence[str], split: str = 'test') -> dict[str, Any]:
  """Scores of a model on tasks; mteb stores them below ``MTEB_CACHE`` or ``~/.cache/mteb``.

  Args:
    model: from ``load``.
    names: mteb tasks, and folders (``folder_task``).
    split: of the folders.

  Returns:
    ``mean``: main score by task, and the ``average``; ``tasks``: all scores by task, split and
    subset (None without a number); ``model``: its mteb meta; ``seen``: by task, encoded queries
    that it was trained on or selected by.

  Raises:
    InputError: an unknown task, or an unreadable folder.
  """
  mteb = require()
  tasks = []
  for name in names:
    if epath.Path(name).is_dir():
      tasks.append(folder_task(name, split))
      continue
    try:
      tasks.append(mteb.get_task(name))
    except (KeyError, ValueError) as error:
      reason = error.args[0] if error.args else error
      raise InputError(f'{name} is neither a task of mteb nor a folder: {reason}') from error
  given = [task.metadata.name for task in tasks]
  if twice := next((name for name in given if given.count(name) > 1), None):
    raise InputError(f'the task {twice} is given twice')
  results = mteb.evaluate(model, tasks)
  known = {task: counts for task, counts in model.seen.items() if counts}
  for task, counts in known.items():
    for role, count in counts.items():
      _log.warning('%s: the model %s %d of its queries', task, seen.ROLES[role], count)
  mean = {result.task_name: float(result.get_score()) for result in results.task_results}
  return {
    'mean': mean | {'average': sum(mean.values()) / len(mean)},
    'tasks': {
      result.task_name: {'main_score': task.metadata.main_score, 'scores': _finite(result.scores)}
      for task, result in zip(tasks, results.task_results, strict=True)
    },
    'model': {
      key: value
      for key, value in model.mteb_model_meta.to_dict().items()
      if key in ('name', 'revision', 'training_datasets', 'adapted_from', 'n_parameters')
    },
    'mteb_version': mteb.__version__,
    **({'seen': known} if known else {}),
  }


def _finite(value: Any) -> Any:
  """Replaces NaN by None, for JSON."""
  if isinstance(value, Mapping):
    return {key: _finite(one) for key, one in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(one) for one in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
