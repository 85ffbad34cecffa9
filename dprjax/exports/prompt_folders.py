"""Prompts as folders of PEFT and of sentence-transformers, written without PyTorch.

    adapter_config.json         the method, and the shape of the backbone
    adapter_model.safetensors   the tensors, for instance prompt_embeddings [P, L * 2 * H]

Each kind of adapter defines its PEFT format (`models.adapter.Peft`). Separate adapters for queries
and passages are in the folders ``query`` and ``passage``.

    modules.json                names PromptedTransformer as the transformer
    dprjax_prompt.py            that class, in PyTorch
    prompt.npz                  the prompt
    config.json and so on       files of the backbone

Loading such a folder runs its code: ``SentenceTransformer(DIR, trust_remote_code=True)``.
"""

from typing import Any

import safetensors.numpy
from etils import epath

from dprjax.base.files import write_json
from dprjax.base.reading import read
from dprjax.models import artifact, hub, model_folders, sentence
from dprjax.models.family import Config
from dprjax.text.vector_spec import SIDES, of_meta

CONFIG = 'adapter_config.json'
WEIGHTS = 'adapter_model.safetensors'
CODE = 'dprjax_prompt.py'


def write_adapters(
  folder: epath.Path, prompt: artifact.Prompt, model: Config, base_model: str | None
) -> None:
  """Writes the adapters of a prompt into an existing folder.

  Args:
    base_model: the backbone on the hub, for AutoPeftModel; None: unknown.
  """
  form = prompt.kind.peft
  if form is None:
    raise artifact.unsupported(prompt, 'PEFT')
  for side in ('',) if prompt.tied else SIDES:
    if not (arrays := prompt.of_side(side)):
      continue
    config, tensors = form.write(prompt.path, model, prompt.meta, arrays)
    place = folder / side
    place.mkdir(parents=True, exist_ok=True)
    config |= {
      'base_model_name_or_path': base_model,
      'inference_mode': True,
      'peft_type': form.type,
      'task_type': 'FEATURE_EXTRACTION',
    }
    write_json(place / CONFIG, dict(sorted(config.items())))
    (place / WEIGHTS).write_bytes(safetensors.numpy.save(tensors))


def write_prompted(folder: epath.Path, prompt: artifact.Prompt, backbone: hub.Backbone) -> None:
  """Fills a folder for sentence-transformers with a prompt and its frozen backbone."""
  _code(prompt)
  model_folders.copy_files(backbone, folder)
  tokenizer = model_folders.tokenizer_keys(epath.Path(backbone.path))
  model_folders.write_sentence_files(
    folder, backbone.config, backbone.params, of_meta(prompt.meta), tokenizer
  )
  add_prompt(folder, prompt)


def add_prompt(folder: epath.Path, prompt: artifact.Prompt) -> None:
  code = _code(prompt)
  modules = read(folder / 'modules.json', 'modules.json', list[dict[str, Any]])
  modules[0]['type'] = sentence.PROMPTED_TYPE
  write_json(folder / 'modules.json', modules)
  (folder / CODE).write_text(code)
  artifact.save_prompt(folder / hub.PROMPT, prompt)


def _code(prompt: artifact.Prompt) -> str:
  if prompt.kind.code is None:
    raise artifact.unsupported(prompt, 'sentence-transformers')
  return prompt.kind.code.read_text(encoding='utf-8')
