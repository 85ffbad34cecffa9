"""Folders for sentence-transformers: a backbone with a prompt.

    modules.json             names PromptedTransformer as the transformer
    dprjax_prompt.py         that class, in PyTorch
    prompt.npz               the prompt
    config.json and so on    files of the backbone; or
    backbone.json            its repository and commit on the hub

Loading such a folder runs its code: ``SentenceTransformer(DIR, trust_remote_code=True)``.
"""

from typing import Any

from etils import epath

from dprjax.base import reading, repository
from dprjax.base.files import write_json
from dprjax.models import artifact, hub, sentence
from dprjax.text.vector_spec import of_meta

CODE = 'dprjax_prompt.py'
_REFERENCE = 'backbone.json'


def write_folder(
  folder: epath.Path,
  prompt: artifact.Prompt,
  backbone: hub.Backbone,
  reference: repository.Reference | None = None,
) -> None:
  """Fills a folder with a prompt and its frozen backbone.

  Args:
    reference: the same backbone on the hub, pinned to a commit; then no files are copied.
  """
  _code(prompt)
  if reference is None:
    hub.copy_files(backbone, folder)
  else:
    write_json(folder / _REFERENCE, {'repository': reference.name, 'revision': reference.revision})
  kept = sentence.tokenizer_keys(epath.Path(backbone.path))
  sentence.write_folder(folder, backbone.config, backbone.params, of_meta(prompt.meta), kept)
  add_prompt(folder, prompt)


def add_prompt(folder: epath.Path, prompt: artifact.Prompt) -> None:
  """Adds a prompt to the transformer of a sentence-transformers folder."""
  code = _code(prompt)
  modules = reading.read(folder / 'modules.json', 'modules.json', list[dict[str, Any]])
  modules[0]['type'] = sentence.PROMPTED_TYPE
  write_json(folder / 'modules.json', modules)
  (folder / CODE).write_text(code)
  artifact.save_prompt(folder / artifact.FILE, prompt)


def _code(prompt: artifact.Prompt) -> str:
  if prompt.kind.code is None:
    raise artifact.unsupported(prompt, 'sentence-transformers')
  return prompt.kind.code.read_text(encoding='utf-8')
