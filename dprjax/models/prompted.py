"""Folders for sentence-transformers: a backbone with a prompt.

    modules.json             names PromptedTransformer as the transformer
    dprjax_prompt.py         that class, in PyTorch
    prompt.npz               the prompt
    config.json and so on    files of the backbone

Loading such a folder runs its code: ``SentenceTransformer(DIR, trust_remote_code=True)``.
"""

from typing import Any

from etils import epath

from dprjax.base import reading
from dprjax.base.files import write_json
from dprjax.models import artifact, hub, sentence
from dprjax.text.vector_spec import of_meta

CODE = 'dprjax_prompt.py'


def write_folder(folder: epath.Path, prompt: artifact.Prompt, backbone: hub.Backbone) -> None:
  """Fills a folder with a prompt and its frozen backbone."""
  _code(prompt)
  hub.copy_files(backbone, folder)
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
