"""Requests for vectors, in the terms of several interfaces."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from dprjax.encoding import codes
from dprjax.serving.answers import Failure
from dprjax.serving.engine import Tokens
from dprjax.serving.library import UnknownPrompt
from dprjax.serving.messages import Document
from dprjax.serving.turns import Steps
from dprjax.text.vector_spec import SIDES

_T = TypeVar('_T')


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
    shorter = {length for length in version.meta.get('matryoshka', ()) if length < whole}
    given = sorted({*shorter, whole}, reverse=True)
    if self.dimensions not in (None, *given):
      sizes = ' or '.join(map(str, given))
      raise Failure(400, f'this model has vectors of {sizes} dimensions', param='dimensions')
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


def split(model: str, default: str, said: Mapping[str, str | None] = {}) -> tuple[str, str, bool]:
  """The name of a prompt, the side, and whether it was named: 'qa:query' gives 'qa', 'query', True.

  Args:
    model: may name the side.
    said: fields that may give the side.

  Raises:
    UnknownPrompt: an unknown side.
    Failure: contradictory sides.
  """
  name, colon, side = model.rpartition(':')
  if not colon:
    name, side = model, ''
  elif side not in SIDES:
    raise UnknownPrompt(model)
  for field, word in said.items():
    other = _side_of(word or '')
    if side and other and side != other:
      raise Failure(400, f'{field} says {other}, and another field says {side}', param=field)
    side = side or other
  return name, side or default, bool(side or any(said.values()))


def _side_of(task: str) -> str:
  """The side that a `messages.Task` names, or ''."""
  if task.endswith('query'):
    return 'query'
  return 'passage' if task.endswith(('passage', 'document')) else ''


def inputs(given: str | Sequence[Any], param: str) -> list[Any]:
  """Texts, or lists of token ids, of a field that may be one of these. Raises Failure."""
  if isinstance(given, str):
    return [given]
  kinds = {type(one) for one in given}
  if kinds == {int}:
    return [given]
  if kinds <= {str, Document}:
    return [one if isinstance(one, str) else one.text for one in given]
  if kinds == {list}:
    return [*given]
  raise Failure(400, 'expected a text, a list of texts, token ids, or a list of these', param=param)
