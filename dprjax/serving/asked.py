"""Requests for vectors, in the terms of several interfaces."""

import re
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from dprjax.encoding import codes
from dprjax.serving.answers import Failure
from dprjax.serving.engine import Tokens
from dprjax.serving.library import UnknownPrompt
from dprjax.serving.turns import Steps
from dprjax.text.vector_spec import SIDES

_T = TypeVar('_T')
_SIDE_OF = dict.fromkeys(('query', 'search_query'), 'query')
_SIDE_OF |= dict.fromkeys(('passage', 'document', 'search_document'), 'passage')


class Wanted(NamedTuple):
  """The vectors that a request asks for.

  Attributes:
    name, side: of the prompt.
    said: whether the request names the side.
    dimensions: None: all.
    normalize: whether vectors get length 1; None: by the prompt.
    cut: whether texts that are too long may lose their end.
  """

  name: str
  side: str
  said: bool = True
  dimensions: int | None = None
  normalize: bool | None = None
  cut: bool = True

  def check(self, tokens: Tokens, whole: int) -> None:
    """Raises Failure if the prompt does not give such vectors for these texts."""
    version = tokens.version
    if version.two_sided and not self.said:
      names = ' or '.join(f'{self.name}:{side}' for side in SIDES)
      raise Failure(
        400, f'queries and passages have different vectors: ask for {names}', param='model'
      )
    if self.dimensions is not None and self.dimensions > whole:
      raise Failure(400, f'this model has vectors of {whole} dimensions', param='dimensions')
    if self.normalize is False and version.spec.normalize:
      raise Failure(400, 'vectors of this model have length 1', param='normalize')
    if tokens.truncated and not self.cut:
      most = version.spec.max_length(self.side)
      raise Failure(
        413,
        f'text {tokens.truncated[0]} has more than the {most} tokens of this model',
        param='truncate',
      )

  def finish(self, tokens: Tokens, vectors: Float[np.ndarray, 'n H']) -> Float[np.ndarray, 'n d']:
    """Converts vectors of the model to the requested ones."""
    normalized = tokens.version.spec.normalize
    vectors = codes.cut(vectors, self.dimensions or vectors.shape[1], normalized)
    if self.normalize and not normalized:
      norms = np.linalg.norm(vectors, axis=1, keepdims=True)
      vectors = vectors / np.where(norms > 0, norms, np.float32(1))
    return vectors


def decode(content: bytes, kind: type[_T]) -> _T:
  """A body of JSON. Raises Failure."""
  try:
    return msgspec.json.decode(content, type=kind)
  except msgspec.ValidationError as error:
    raise Failure(400, str(error), param=_field(str(error))) from error
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
    raise Failure(400, f'the body is not JSON, or a text is not Unicode: {error}') from error


def count_values(content: bytes) -> Steps:
  """The number of values in JSON, without building them, as a job of one slice."""
  yield len(content)
  data = np.frombuffer(content.replace(rb'\\', b'').replace(rb'\"', b''), np.uint8)
  inside = np.add.accumulate(data == ord('"'), dtype=np.uint8) & 1  # of a string
  begins = (data == ord(',')) | (data == ord('[')) | (data == ord('{'))
  return int(np.count_nonzero(begins > inside))


def _field(message: str) -> str | None:
  found = re.search(r'at `\$\.(\w+)', message) or re.search(r'field `(\w+)`', message)
  return found and found[1]


def split(model: str, default: str, task: str | None = None) -> tuple[str, str, bool]:
  """The name of a prompt, the side, and whether it was named: 'qa:query' gives 'qa', 'query', True.

  Args:
    model: may name the side.
    task: a `messages.Task`, which may name the side.

  Raises:
    UnknownPrompt: an unknown side.
    Failure: contradictory sides.
  """
  name, colon, side = model.rpartition(':')
  if not colon:
    name, side = model, ''
  elif side not in SIDES:
    raise UnknownPrompt(model)
  other = _SIDE_OF.get(task or '', '')
  if side and other and side != other:
    raise Failure(400, f'input_type says {other}, model says {side}', param='input_type')
  return name, side or other or default, bool(side or task)
