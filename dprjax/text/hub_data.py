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


def names(given: str) -> list[str]:
  return list(_load(given).column_names)


def rows(given: str) -> Iterator[dict[str, Any]]:
  """The rows in order.

  The rows are mapped into memory from a file.
  """
  dataset = _load(given)
  try:
    yield from dataset
  except Exception as error:  # decoders and downloads raise anything
    raise _unreadable(given, error) from error


def folder_of(given: str, folder: files.PathLike, splits: Sequence[str]) -> epath.Path:
  """A folder with SPLIT.jsonl for each split, written unless it exists.

  A split named in ``given`` replaces the first one.
  """
  out = epath.Path(folder)
  about = {'name': given, 'splits': list(dict.fromkeys(splits))}
  if _was_made(out, about):
    return out
  name, config, own = _parts(given)
  with files.atomic_path(out) as aside:
    aside.mkdir()
    for number, split in enumerate(about['splits']):
      wanted = own if own and not number else split
      source = f'{files.HUB}{name}:{config}:{wanted}' if config else f'{files.HUB}{name}:{wanted}'
      path, count = aside / f'{split}.jsonl', 0
      with files.no_room(path), path.open('wb') as file:
        for row in rows(source):
          count += 1
          kept = {key: value for key, value in row.items() if _is_json(value)}
          file.write(json.dumps(kept, ensure_ascii=False).encode('utf-8', 'replace') + b'\n')
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


def _parts(given: str) -> tuple[str, str, str]:
  """Name, config and split; the last two may be empty."""
  name, *more = given.removeprefix(files.HUB).split(':')
  if not name or len(more) > 2 or not all(more):
    raise InputError(f'{given!r:.80}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT')
  config = more[0] if len(more) == 2 else ''
  return name, config, more[-1] if more else ''


def _load(given: str) -> Any:
  import datasets

  name, config, split = _parts(given)
  try:
    if any(
      os.path.exists(os.path.join(name, kind)) for kind in ('state.json', 'dataset_dict.json')
    ):
      found = datasets.load_from_disk(name)
      if isinstance(found, datasets.Dataset):
        return found
    else:
      known = datasets.get_dataset_split_names(name, config or None)
      chosen = split or (known[0] if len(known) == 1 else '')
      if chosen in known:
        return datasets.load_dataset(name, config or None, split=chosen)
      found = dict.fromkeys(known)
  except Exception as error:  # from the hub, loaders and files
    raise _unreadable(given, error) from error
  chosen = split or (next(iter(found)) if len(found) == 1 else '')
  if chosen not in found:
    said = f'no split {split!r:.80}' if split else 'several splits'
    raise InputError(
      f'{given}: {said}; name one of {", ".join(found)}, as in {given}:{next(iter(found))}'
    )
  return found[chosen]


def _unreadable(given: str, error: Exception) -> InputError:
  why = ' '.join(str(error).split())
  return InputError(f'{given}: datasets cannot read it ({type(error).__name__}: {why:.300})')
