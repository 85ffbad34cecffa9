"""Data sets of the Hugging Face hub, or local copies, read by the ``datasets`` library.

``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``. NAME is a data set of the hub, a folder
of data files, or a folder from ``Dataset.save_to_disk``. A data set with one split needs no SPLIT.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from dprjax.base import files, reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError

_MARK = 'hub_data.json'
_log = logging.getLogger(__name__)


def names(hub_name: str) -> list[str]:
  return list(_load(hub_name).column_names)


def rows(hub_name: str) -> Iterator[dict[str, Any]]:
  """The rows in order.

  The rows are mapped into memory from a file.
  """
  dataset = _load(hub_name)
  try:
    yield from dataset
  except Exception as error:  # decoders and downloads raise anything
    raise _unreadable(hub_name, error) from error


def folder_of(hub_name: str, folder: files.PathLike, splits: Sequence[str]) -> epath.Path:
  """A folder with SPLIT.jsonl for each split, written unless it exists.

  A split named in ``hub_name`` replaces the first one.
  """
  out = epath.Path(folder)
  about = {'name': hub_name, 'splits': list(dict.fromkeys(splits))}
  if _was_made(out, about):
    return out
  name, config, first = _parts(hub_name)
  with files.atomic_path(out) as aside:
    aside.mkdir()
    for number, split in enumerate(about['splits']):
      wanted = first if first and not number else split
      source = f'{files.HUB}{name}:{config}:{wanted}' if config else f'{files.HUB}{name}:{wanted}'
      path, count = aside / f'{split}.jsonl', 0
      with files.no_room(path), path.open('wb') as file:
        for row in rows(source):
          count += 1
          values = {key: value for key, value in row.items() if _is_json(value)}
          file.write(json.dumps(values, ensure_ascii=False).encode('utf-8', 'replace') + b'\n')
      _log.info('%s: %s', source, counted(count, 'rows'))
    files.write_json(aside / _MARK, about)
  return out


def _was_made(folder: epath.Path, about: dict[str, Any]) -> bool:
  """Whether a folder exists, with this description; InputError if it has another."""
  if not folder.exists():
    return False
  path = folder / _MARK
  if (reading.read_json_object(path, 'data set') if path.exists() else {}) != about:
    raise InputError(f'{folder} does not contain {about}; remove it, or name another workdir')
  return True


def _is_json(value: Any) -> bool:
  """Whether a value is text, a number, or lists and objects of them; pictures are not."""
  if isinstance(value, dict):
    return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
  if isinstance(value, list):
    return all(map(_is_json, value))
  return value is None or isinstance(value, str | int | float)


def _parts(hub_name: str) -> tuple[str, str, str]:
  """Name, config and split; the last two may be empty."""
  name, *more = hub_name.removeprefix(files.HUB).split(':')
  if not name or len(more) > 2 or not all(more):
    raise InputError(f'{hub_name!r:.80}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT')
  config = more[0] if len(more) == 2 else ''
  return name, config, more[-1] if more else ''


def _load(hub_name: str) -> Any:
  import datasets

  name, config, split = _parts(hub_name)
  try:
    if any(
      os.path.exists(os.path.join(name, kind)) for kind in ('state.json', 'dataset_dict.json')
    ):
      splits = datasets.load_from_disk(name)
      if isinstance(splits, datasets.Dataset):
        return splits
    else:
      known = datasets.get_dataset_split_names(name, config or None)
      chosen = split or (known[0] if len(known) == 1 else '')
      if chosen in known:
        return datasets.load_dataset(name, config or None, split=chosen)
      splits = dict.fromkeys(known)
  except Exception as error:  # from the hub, loaders and files
    raise _unreadable(hub_name, error) from error
  chosen = split or (next(iter(splits)) if len(splits) == 1 else '')
  if chosen not in splits:
    why = f'no split {split!r:.80}' if split else 'several splits'
    raise InputError(
      f'{hub_name}: {why}; name one of {", ".join(splits)}, as in {hub_name}:{next(iter(splits))}'
    )
  return splits[chosen]


def _unreadable(hub_name: str, error: Exception) -> InputError:
  why = ' '.join(str(error).split())
  return InputError(f'{hub_name}: datasets cannot read it ({type(error).__name__}: {why:.300})')
