"""The baseline encoder, run as `dprjax.encode` does without a prompt.

Lengths, pooling, normalisation and prefixes are those of the backbone folder, not of the
experiment. So all alternatives and folds of a run are compared with the same baseline: the scores
that a user has without training.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np
from etils import epath
from jaxtyping import Float
from ml_collections import ConfigDict

from dprjax.base import arrays
from dprjax.base.counts import counted
from dprjax.encoding import folders
from dprjax.encoding import text_encoder as inference
from dprjax.models import hub
from dprjax.text import vector_spec
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import stored_config
from dprjax.training import workdir as workdirs

FOLDER = 'frozen'  # in the workdir
_MOST_KEPT = 100_000  # texts


class Frozen:
  """The frozen encoder of a run; ``spec`` is the record of `dprjax.encode` without a prompt."""

  def __init__(self, config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer):
    self._config, self._tokenizer = config, tokenizer
    self._path = stored_config.backbone_path(config, workdir)
    self._folder = workdirs.top(workdir) / FOLDER
    self.spec = hub.load_spec(self._path)

  def differs(self, side: str) -> bool:
    """Whether the experiment makes the vectors of a side with other settings than the baseline."""
    return self.spec.of_side(side) != vector_spec.of_config(self._config).of_side(side)

  def describe(self, cut: dict[str, tuple[int, int]]) -> list[str]:
    """Log lines about settings in which training differs; ``cut`` is (cut, all) texts by side."""
    theirs, ours = self.spec, vector_spec.of_config(self._config)
    lines = []
    for side, plural in zip(SIDES, ('queries', 'passages'), strict=True):
      count, of = cut[side]
      length, longer = ours.max_length(side), theirs.max_length(side)
      if count and length < longer:
        lines.append(
          f'{count:,} of {counted(of, plural)} cut at {length} tokens '
          f'(config.data.{side}_max_length); the baseline reads {longer}'
        )
    for name in ('pooling', 'normalize', *(f'{side}_prefix' for side in SIDES)):
      own, other = getattr(ours, name), getattr(theirs, name)
      if own != other:
        option = f'data.{name}' if name.endswith('_prefix') else name
        lines.append(
          f'config.{option} is {own!r}; the baseline has {other!r}, as dprjax encode without a '
          'prompt'
        )
    return lines

  def vectors(
    self, side: str, texts: Sequence[str], made: Float[np.ndarray, 'n H'] | None = None
  ) -> Float[np.ndarray, 'n H']:
    """Vectors of the texts, ``made`` if given. Up to 100,000 are kept in the workdir."""
    if len(texts) > _MOST_KEPT:
      return self._encoder.encode(texts, side) if made is None else made
    path = self._folder / f'{side}.npz'
    # Everything that decides a vector, except the text.
    settings = folders.describe(self._encoder, side, 'float32', '')
    meta = json.dumps(dataclasses.asdict(settings), sort_keys=True)
    known: dict[bytes, np.ndarray] = {}
    if path.exists():
      found = arrays.read_arrays(path, 'frozen vectors', remedy='remove it to make it again')
      if str(found.get('meta')) == meta:
        known = dict(zip(map(bytes, found['texts']), found['vectors'], strict=True))
    keys = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
    places = {key: place for place, key in enumerate(keys) if key not in known}
    if places:
      rows = [*places.values()]
      new = self._encoder.encode([texts[i] for i in rows], side) if made is None else made[rows]
      known |= dict(zip(places, new, strict=True))
      self._folder.mkdir(exist_ok=True)
      content = {
        'meta': np.array(meta),
        'texts': np.array([list(key) for key in known], np.uint8),
        'vectors': np.stack([*known.values()]),
      }
      arrays.write_arrays(path, content)
    return np.stack([known[key] for key in keys])

  @functools.cached_property
  def _encoder(self) -> inference.Encoder:
    return inference.Encoder(
      dict.fromkeys(SIDES, hub.load_backbone(self._path, on_disk=True)),
      self._tokenizer,
      {inference.UNNAMED: inference.BankEntry(None, self.spec)},
      batch_size=self._config.eval.batch_size,
      dtype=self._config.backbone.dtype,
    )
