"""The prompt file: a task's prompts and what they were made for, in one npz.

``meta`` is JSON in a 0-d unicode array; ``queries/train`` and ``queries/dev`` are hashes
(uint64) of the queries that the prompt was trained on and chosen by (``formats.seen``); the other
members are float arrays. ``numpy.load(path, allow_pickle=False)`` reads all of it, so a prompt file
cannot run code. By meta's kind it holds:

- prefix: ``prefix`` [L, 2, P, N, D], or ``query/prefix`` and ``passage/prefix`` where untied
  (index 0 of axis 1: keys, 1: values). Where meta's ``sides`` is 'query', ``query/prefix`` alone:
  passages are the bare backbone's
- topic: ``prefix`` [K, L, 2, P, N, D] and the arrays of the topic model
- template: ``segments/query/P1`` [P, H] and its like; the template and its words are in meta
  (``TEMPLATE_META``). A template of words alone has no arrays
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import repository
from dprjax.base.arrays import read_arrays, write_arrays
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import parse_object
from dprjax.formats import seen
from dprjax.models import pooling as poolings
from dprjax.models import segments
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.hub import Backbone

FORMAT = 'dprjax.prompt'
FILE = 'prompt.npz'  # its name in a folder
VERSION = 1
KINDS = ('prefix', 'topic', 'template')

# The required keys of meta and their types. Of two encoders backbone_sha256 is {'query': ...,
# 'passage': ...}.
META: dict[str, tuple[type, ...]] = {
  'format': (str,),
  'version': (int,),
  'kind': (str,),
  'backbone': (str,),
  'backbone_sha256': (str, dict),
  'tokenizer_sha256': (str,),
  'pooling': (str,),
  'normalize': (bool,),
  'temperature': (int, float),
  'shift_positions': (bool,),
  'query_max_length': (int,),
  'passage_max_length': (int,),
  'dprjax_version': (str,),
}
_RANGES = {
  'temperature': (1e-9, 1e9),
  'query_max_length': (1, 2**20),
  'passage_max_length': (1, 2**20),
}
# The further keys of a template's meta: ``template`` has a form (see ``segments.parse``) for each
# kind of input, ``words`` the text of each prompt segment that has no vectors, ``label_words`` the
# words for yes and no.
TEMPLATE_META: dict[str, tuple[type, ...]] = {
  'template': (dict,),
  'words': (dict,),
  'fixed_layers': (int,),
}
PAIR_META: dict[str, tuple[type, ...]] = {
  'label_words': (list,),
  'score': (str,),
  'head_sha256': (str,),
}
SCORES = ('logit', 'probability')
TEMPLATE_POOLINGS = ('mask', 'cls', 'mean')
_LONGEST_WORDS = 1000  # characters of a segment
# Other keys (task, metrics) are free.
_OPTIONAL_META: dict[str, tuple[type, ...]] = {
  'query_prefix': (str,),
  'passage_prefix': (str,),
  'sides': (str,),
  'matryoshka': (list,),
  'gain': (dict,),
}
# The keys of meta's ``gain``: how the prompt scores on the dev split beside what it began with.
_GAIN: dict[str, tuple[type, ...]] = {
  'measure': (str,),
  'baseline': (int, float),
  'best': (int, float),
  'difference': (int, float),
  'low': (int, float, type(None)),
  'high': (int, float, type(None)),
  'queries': (int,),
  'better': (bool,),
  'folds': (int,),
}

_SEGMENTS, _QUERIES = 'segments/', 'queries/'
_MOST_LAYERS = 1000
_LARGEST_SCORE = 1e15
_MOST_COMPRESSED = 20  # times; floats of a prompt hardly compress


@dataclasses.dataclass(frozen=True)
class Prompt:
  """The content of a prompt file.

  Attributes:
    meta: the JSON object; ``META`` has its keys.
    arrays: the other members, by name.
    path: the file; errors name it.
    queries: hashes of the queries that it was trained on and chosen by.
  """

  meta: dict[str, Any]
  arrays: dict[str, np.ndarray]
  path: str = 'prompt'
  queries: seen.Seen = dataclasses.field(default_factory=dict)

  @property
  def spec(self) -> segments.Spec:
    """The templates of a prompt of kind template."""
    lengths = {name: len(array) for name, array in self.vectors.items()}
    return segments.Spec(self.meta['template'], self.meta['words'], lengths)

  @property
  def vectors(self) -> dict[str, Float[np.ndarray, 'P H']]:
    """The learned segments of a prompt of kind template, by names such as ``query/P1``."""
    return {
      name.removeprefix(_SEGMENTS): array
      for name, array in self.arrays.items()
      if name.startswith(_SEGMENTS)
    }

  @property
  def tied(self) -> bool:
    """Whether queries and passages have one prompt."""
    return 'prefix' in self.arrays

  @property
  def query_only(self) -> bool:
    """Whether passages have no prompt."""
    return self.meta.get('sides') == 'query'

  def prefixes(self, kind: str) -> list[Float[np.ndarray, 'L 2 P N D'] | None]:
    """The key/value prefixes for texts of ``kind``: one of each topic, or one in all."""
    if self.meta['kind'] == 'topic':
      return list(self.arrays['prefix'])
    return [self.prefix(kind)]

  def prefix(self, kind: str) -> Float[np.ndarray, 'L 2 P N D'] | None:
    """The key/value prefix for texts of ``kind``, 'query' or 'passage'; None: the bare backbone.

    Raises:
      InputError: an unknown ``kind``, or not a prompt of kind prefix.
    """
    if kind not in ('query', 'passage'):
      raise InputError(f"kind: expected 'query' or 'passage', not {kind!r}")
    if self.meta['kind'] != 'prefix':
      raise InputError(
        f'{self.path}: a prompt of kind {self.meta["kind"]!r} has no single prefix; a prompt of '
        "kind 'prefix' is needed here"
      )
    if self.query_only and kind == 'passage':
      return None
    return self.arrays['prefix' if self.tied else f'{kind}/prefix']


def save_prompt(path: PathLike, prompt: Prompt) -> None:
  """Writes the npz, whole or not at all; the same prompt gives the same bytes.

  Raises:
    InputError: ``load_prompt`` would refuse the prompt, or no space is left.
  """
  arrays = {name: np.asarray(array) for name, array in prompt.arrays.items()}
  _check(str(path), prompt.meta, arrays)
  meta = np.array(json.dumps(prompt.meta, ensure_ascii=False))
  hashes = {f'{_QUERIES}{role}': values for role, values in prompt.queries.items()}
  write_arrays(path, {'meta': meta, **arrays, **hashes})


def check_content(prompt: Prompt) -> None:
  """Raises InputError, as ``load_prompt``, where arrays or meta are not those of a prompt."""
  _check(prompt.path, prompt.meta, prompt.arrays)


def check_gain(where: str, gain: Any) -> None:
  """Checks meta's ``gain``: the score on the dev split beside that before the training.

  Raises:
    InputError: a key is missing or unknown, of another type or range, or they contradict each
      other.
  """
  if not isinstance(gain, dict) or set(gain) != set(_GAIN):
    raise InputError(f'{where}: gain is {gain!r:.60}, expected an object of {", ".join(_GAIN)}')
  for key, types in _GAIN.items():
    value = gain[key]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
      expected = ' or '.join('null' if kind is type(None) else kind.__name__ for kind in types)
      raise InputError(f"{where}: gain's {key} is {value!r:.60}, expected {expected}")
    if isinstance(value, int | float) and not abs(value) <= _LARGEST_SCORE:
      raise InputError(f"{where}: gain's {key} is {value!r:.60}, no score")
  low, high = gain['low'], gain['high']
  if (low is None) != (high is None) or (low is not None and low > high):
    raise InputError(f"{where}: gain's low and high are {low!r} and {high!r}, no interval")
  if gain['better'] and gain['best'] <= gain['baseline']:
    raise InputError(
      f"{where}: gain's better is {gain['better']}, with best {gain['best']} and baseline "
      f'{gain["baseline"]}'
    )
  for key in ('queries', 'folds'):
    if gain[key] < 0:
      raise InputError(f"{where}: gain's {key} is {gain[key]}, expected 0 or more")


def load_prompt(path: PathLike) -> Prompt:
  """Reads a prompt file. To encode with it, use ``load_prompt_for``.

  Args:
    path: of the file; or what `locate` takes.

  Raises:
    InputError: it is missing, damaged, no npz, of a newer version, or holds pickled objects; an
      array or a key of meta is missing, of the wrong shape or type, or not finite.
  """
  path = locate(path)
  arrays = read_arrays(path, 'prompt', _MOST_COMPRESSED, 'export or fetch it again')
  if 'meta' not in arrays:
    raise InputError(f'{path}: no meta inside, so this is not a dprjax prompt')
  text = arrays.pop('meta')
  if text.ndim or text.dtype.kind != 'U':
    raise InputError(f'{path}: meta is not JSON in a single string; export the prompt again')
  try:
    meta = parse_object(text.item(), f'{path}, meta')
  except InputError as error:
    raise InputError(f'{error}; export the prompt again') from error
  hashes = {
    name.removeprefix(_QUERIES): arrays.pop(name) for name in [*arrays] if name.startswith(_QUERIES)
  }
  _check(str(path), meta, arrays)
  return Prompt(meta, arrays, str(path), seen.check(hashes, f'{path}, {_QUERIES}'))


def locate(path: PathLike) -> epath.Path:
  """The prompt file: ``path`` itself, or prompt.npz in a folder or in a repository of the hub.

  A repository is USER/NAME or USER/NAME@REVISION. The file that is read says which commit it is of
  (`repository.commit_of` of its folder).

  Raises:
    InputError: as `repository.locate`.
  """
  return repository.locate(path, FILE, 'prompt')


def check_prefix(prompt: Prompt, tool: str) -> dict[str, Float[np.ndarray, 'L 2 P N D']]:
  """The prefixes of a prompt for a tool that knows nothing else, by the names of their arrays.

  Raises:
    InputError: the prompt is not of kind prefix.
  """
  kind = prompt.meta['kind']
  if kind != 'prefix':
    why = {
      'topic': 'a prompt for each topic, of which a topic model chooses',
      'template': 'a template of words and vectors in the input',
    }[kind]
    raise InputError(
      f'{prompt.path}: {tool} cannot express a prompt of kind {kind!r}, {why}; only dprjax reads '
      'it: --format=npz'
    )
  return dict(prompt.arrays)


def load_prompt_for(path: PathLike, tokenizer_sha256: str, *backbones: Backbone) -> Prompt:
  """Reads a prompt file and checks that it fits these backbones and this tokenizer.

  Raises:
    InputError: as ``load_prompt`` and ``check_prompt``.
  """
  prompt = load_prompt(path)
  for backbone in backbones:
    check_prompt(prompt, backbone.config, backbone.sha256, tokenizer_sha256)
  return prompt


def check_prompt(
  prompt: Prompt, config: EncoderConfig, backbone_sha256: str, tokenizer_sha256: str
) -> None:
  """Checks that a prompt was made for this backbone and this tokenizer.

  Raises:
    InputError: another backbone's SHA-256, a shape that does not fit the backbone, or another
      tokenizer's SHA-256.
  """
  problems = []
  recorded = prompt.meta['backbone_sha256']
  if backbone_sha256 not in (recorded.values() if isinstance(recorded, dict) else (recorded,)):
    problems.append(
      f'was made for backbone {prompt.meta["backbone"]} with SHA-256 {recorded}, this one has '
      f'{backbone_sha256}'
    )
  for name, array in prompt.arrays.items():
    if name.startswith(_SEGMENTS):
      shape: tuple[int, ...] = array.shape[1:]
      expected: tuple[int, ...] = (config.hidden_size,)
    elif name == 'prefix' or name.endswith('/prefix'):
      *_, layers, two, _, heads, size = array.shape
      shape = layers, two, heads, size
      expected = config.num_layers, 2, config.num_kv_heads, config.head_dim
    else:
      continue
    if shape != expected:
      axes = '[P, H]' if len(expected) == 1 else '[L, 2, P, N, D]'
      problems.append(
        f'{name} has shape {list(array.shape)}, but as {axes} this backbone takes '
        f'{_with_length(expected)}'
      )
  recorded = prompt.meta['tokenizer_sha256']
  if tokenizer_sha256 != recorded:
    problems.append(
      f'was made with a tokenizer with SHA-256 {recorded}, this one has {tokenizer_sha256}'
    )
  if problems:
    raise InputError(
      f'{prompt.path}: {"; ".join(problems)}; give the backbone that it was trained on'
    )


def check_template(prompt: Prompt, kinds: Sequence[str], config: EncoderConfig) -> None:
  """Checks that a prompt is a template for these kinds of input, and for this backbone's layers.

  Raises:
    InputError: it is of another kind, for other inputs, or fixes more layers than there are.
  """
  if prompt.meta['kind'] != 'template' or set(prompt.meta['template']) != set(kinds):
    there = prompt.meta.get('template') if prompt.meta['kind'] == 'template' else None
    found = ' and '.join(there) if there else f'kind {prompt.meta["kind"]!r}'
    raise InputError(
      f"{prompt.path}: a prompt of {found}; a prompt of kind 'template' for "
      f'{" and ".join(kinds)} is needed here'
    )
  if prompt.meta['fixed_layers'] > config.num_layers:
    raise InputError(
      f'{prompt.path}: fixed_layers is {prompt.meta["fixed_layers"]}, and this backbone has '
      f'{config.num_layers} layers; give the backbone that it was trained on'
    )


def check_head(prompt: Prompt, head_sha256: str) -> None:
  """Raises InputError where a template's label words are read off another head than its own."""
  if (recorded := prompt.meta['head_sha256']) != head_sha256:
    raise InputError(
      f'{prompt.path}: was made for a masked-LM head with SHA-256 {recorded}, this backbone has '
      f'one with {head_sha256}; give the backbone that it was trained on'
    )


def _with_length(shape: tuple[int, ...]) -> str:
  axes = [str(size) for size in shape]
  return '[' + ', '.join([*axes[:-2], 'P', *axes[-2:]] if len(axes) > 1 else ['P', *axes]) + ']'


def _check(path: str, meta: Any, arrays: dict[str, np.ndarray]) -> None:
  """Raises InputError naming ``path`` and the first thing that is wrong."""
  _check_meta(path, meta)
  names = sorted(arrays)
  kind = meta['kind']
  if kind == 'template':
    axes = dict.fromkeys(_check_template(path, meta, names), '[P, H]')
  elif meta.get('sides') == 'query':
    axes = {'query/prefix': '[L, 2, P, N, D]'}
  elif kind == 'topic' or 'prefix' in arrays:
    axes = {'prefix': '[K, L, 2, P, N, D]' if kind == 'topic' else '[L, 2, P, N, D]'}
  else:
    axes = {f'{side}/prefix': '[L, 2, P, N, D]' for side in ('query', 'passage')}
  for name, letters in axes.items():
    if name not in arrays:
      needed = 'prefix' if kind == 'topic' else 'prefix, or query/prefix and passage/prefix'
      needed = name if len(axes) == 1 and name != 'prefix' else needed
      raise InputError(
        f'{path}: a prompt of kind {kind!r} needs {needed}; {name} is missing (found: '
        f'{", ".join(names) or "no arrays"})'
      )
    _check_array(path, name, arrays[name], letters)
  if kind != 'topic' and (extra := sorted(set(names) - set(axes))):
    raise InputError(f'{path}: unexpected arrays in a prompt of kind {kind!r}: {", ".join(extra)}')
  for name in sorted(set(names) - set(axes)):
    if arrays[name].dtype.kind not in 'biufU':
      raise InputError(f'{path}, array {name}: cannot be of type {arrays[name].dtype}')
    if arrays[name].dtype.kind == 'f' and not np.isfinite(arrays[name]).all():
      raise InputError(f'{path}, array {name}: holds values that are not finite')
  if kind == 'prefix' and len(axes) == 2:
    query, passage = (arrays[name].shape for name in axes)
    if query[:2] + query[3:] != passage[:2] + passage[3:]:
      raise InputError(
        f'{path}: query/prefix {list(query)} and passage/prefix {list(passage)} may differ in P '
        'only'
      )


def _check_array(path: str, name: str, array: np.ndarray, letters: str) -> None:
  if array.dtype != np.float32:
    raise InputError(f'{path}, array {name}: expected float32, found {array.dtype}')
  if (
    array.ndim != letters.count(',') + 1
    or 0 in array.shape
    or ('2' in letters and array.shape[-4] != 2)
  ):
    raise InputError(f'{path}, array {name}: expected shape {letters}, found {list(array.shape)}')
  if not np.isfinite(array).all():
    raise InputError(
      f'{path}, array {name}: {np.count_nonzero(~np.isfinite(array))} of its values are not finite'
    )


def _check_template(path: str, meta: dict[str, Any], names: Sequence[str]) -> list[str]:
  """The arrays that a template needs. Raises InputError where its meta does not describe one."""
  forms = meta.get('template')
  if not isinstance(forms, dict) or set(forms) not in ({'query', 'passage'}, {'pair'}):
    raise InputError(
      f"{path}: meta's template is {forms!r:.60}, expected forms for query and passage, or for pair"
    )
  _check_types(path, meta, TEMPLATE_META | (PAIR_META if 'pair' in forms else {}), needed=True)
  pooling, words = meta['pooling'], meta['words']
  if pooling not in (('mask',) if 'pair' in forms else TEMPLATE_POOLINGS):
    raise InputError(
      f"{path}: meta's pooling is {pooling!r:.60}, expected one of: "
      f'{", ".join(TEMPLATE_POOLINGS)}; of a pair mask'
    )
  prompts: list[str] = []
  for kind, form in forms.items():
    if not isinstance(form, str):
      raise InputError(f"{path}: meta's template of a {kind} is {form!r:.60}, expected a text")
    where = f"{path}: meta's template of a {kind}"
    segments.parse(form, kind, where, masked=pooling == 'mask')
    prompts += segments.prompt_names(form, kind)
  for name, value in words.items():
    if name not in prompts or not isinstance(value, str) or len(value) > _LONGEST_WORDS:
      raise InputError(
        f"{path}: meta's words of {name!r:.40} are {value!r:.60}; expected a text of at most "
        f'{_LONGEST_WORDS} characters for one of: {", ".join(prompts) or "no segment"}'
      )
  learned = [f'{_SEGMENTS}{name}' for name in prompts if name not in words]
  if missing := [name for name in learned if name not in names]:
    raise InputError(
      f'{path}: the template has neither words nor an array for {missing[0]}; found: '
      f'{", ".join(names) or "no arrays"}'
    )
  if meta['shift_positions']:
    raise InputError(f"{path}: meta's shift_positions is true, which no template takes")
  if not 0 <= meta['fixed_layers'] <= _MOST_LAYERS:
    raise InputError(
      f"{path}: meta's fixed_layers is {meta['fixed_layers']!r:.60}, expected 0 to {_MOST_LAYERS}"
    )
  if 'pair' in forms:
    labels = meta['label_words']
    if len(labels) != 2 or not all(isinstance(word, str) and word for word in labels):
      raise InputError(f"{path}: meta's label_words are {labels!r:.60}, expected two words")
    if meta['score'] not in SCORES:
      raise InputError(
        f"{path}: meta's score is {meta['score']!r:.60}, expected one of: {', '.join(SCORES)}"
      )
  return learned


def _check_types(
  path: str, meta: dict[str, Any], known: dict[str, tuple[type, ...]], needed: bool = False
) -> None:
  """Raises InputError for a key of meta of another type, or a needed one that is missing."""
  if needed and (missing := [key for key in known if key not in meta]):
    raise InputError(f'{path}: meta lacks {", ".join(missing)}; export the prompt again')
  for key, types in known.items():
    value = meta.get(key)
    if key in meta and (
      not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    ):
      raise InputError(
        f"{path}: meta's {key} is {value!r:.60}, expected {' or '.join(t.__name__ for t in types)}"
      )


def _check_meta(path: str, meta: Any) -> None:
  if not isinstance(meta, dict):
    raise InputError(f'{path}: meta holds a JSON {type(meta).__name__}, expected an object')
  if meta.get('format') != FORMAT:
    raise InputError(
      f"{path}: meta's format is {meta.get('format')!r:.60}, expected {FORMAT!r}: this is not a "
      'dprjax prompt'
    )
  version = meta.get('version')
  if isinstance(version, int) and version > VERSION:
    raise InputError(
      f'{path}: version {version} of the prompt format is newer than this dprjax reads '
      f'({VERSION}): upgrade dprjax'
    )
  if version != VERSION:
    raise InputError(f"{path}: meta's version is {version!r}, expected {VERSION}")
  _check_types(path, meta, META, needed=True)
  _check_types(path, meta, _OPTIONAL_META)
  if 'gain' in meta:
    check_gain(f'{path}: meta', meta['gain'])
  for key, (least, most) in _RANGES.items():
    if not least <= meta[key] <= most:
      raise InputError(f"{path}: meta's {key} is {meta[key]!r:.60}, expected {least} to {most}")
  digests = meta['backbone_sha256']
  for digest in digests.values() if isinstance(digests, dict) else ():
    if not isinstance(digest, str):
      raise InputError(f"{path}: meta's backbone_sha256 holds {digest!r:.60}, expected texts")
  if meta['kind'] not in KINDS:
    raise InputError(
      f"{path}: meta's kind is {meta['kind']!r}, expected one of: {', '.join(KINDS)}"
    )
  if meta.get('sides', 'both') not in (
    ('both', 'query') if meta['kind'] == 'prefix' else ('both',)
  ):
    raise InputError(
      f"{path}: meta's sides is {meta['sides']!r:.60}; a prompt of kind {meta['kind']!r} has 'both'"
      + (" or 'query'" if meta['kind'] == 'prefix' else '')
    )
  for length in meta.get('matryoshka', ()):
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
      raise InputError(
        f"{path}: meta's matryoshka holds {length!r:.60}, expected whole numbers of dimensions"
      )
  if meta['kind'] != 'template':
    poolings.find(meta['pooling'], f"{path}: meta's pooling")
