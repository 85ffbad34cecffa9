"""sentence-transformers folders of a backbone under a prompt.

    modules.json             as of any such folder; its transformer is PromptedTransformer
    dprjax_prompt.py         which is this class: PyTorch, for whoever loads the folder
    prompt.npz               the prompt, as dprjax reads it
    config.json and so on    the backbone's own files, unchanged; or
    backbone.json            its repository and commit on the hub

Loading such a folder runs its code: ``SentenceTransformer(DIR, trust_remote_code=True)``.
"""

import pathlib
from typing import Any

from etils import epath

from dprjax.base import reading, repository
from dprjax.base.errors import InputError
from dprjax.base.files import write_json
from dprjax.formats.vector_spec import of_meta
from dprjax.models import artifact, hub, sentence

CODE = 'dprjax_prompt.py'
_REFERENCE = 'backbone.json'


def check(prompt: artifact.Prompt) -> None:
  """Raises InputError for a prompt that sentence-transformers cannot express."""
  artifact.check_prefix(prompt, 'sentence-transformers')


def write_folder(
  folder: epath.Path,
  prompt: artifact.Prompt,
  backbone: hub.Backbone,
  reference: repository.Reference | None = None,
) -> None:
  """Fills a folder of this command's own with a prompt and its frozen backbone.

  Args:
    folder: is there, and empty.
    prompt: one that `check` takes, for this backbone.
    backbone: as it was loaded; its files are copied.
    reference: the same backbone on the hub, pinned; then its files are not copied.

  Raises:
    InputError: as `check`; the reference is not pinned.
  """
  check(prompt)
  if reference is None:
    hub.copy_files(backbone, folder)
  elif not reference.pinned:
    raise InputError(
      f'{reference} names no commit, so what it stands for may change; write it as '
      f'{reference.name}@COMMIT, with the 40 digits that the hub shows'
    )
  else:
    write_json(folder / _REFERENCE, {'repository': reference.name, 'revision': reference.revision})
  kept = sentence.tokenizer_keys(epath.Path(backbone.path))
  sentence.write_folder(folder, backbone.config, backbone.params, of_meta(prompt.meta), kept)
  add_prompt(folder, prompt)


def add_prompt(folder: epath.Path, prompt: artifact.Prompt) -> None:
  """Puts a prompt over the transformer of a sentence-transformers folder.

  Raises:
    InputError: as `check`.
  """
  check(prompt)
  modules = reading.read(folder / 'modules.json', 'modules.json', list[dict[str, Any]])
  modules[0]['type'] = sentence.PROMPTED_TYPE
  write_json(folder / 'modules.json', modules)
  (folder / CODE).write_text(_code())
  artifact.save_prompt(folder / artifact.FILE, prompt)


def _code() -> str:
  # Not a module of this package, which never needs PyTorch.
  return pathlib.Path(__file__).with_name(f'{CODE}.txt').read_text(encoding='utf-8')
