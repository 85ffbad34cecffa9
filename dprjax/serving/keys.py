"""API keys. A file holds their SHA-256: a line is ``read`` or ``admin``, the digest in hexadecimal,
and any name; # begins a comment.
"""

import hashlib
import hmac
import re
from typing import NamedTuple

from dprjax.base import reading
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

READ, ADMIN = 'read', 'admin'
_LINE = re.compile(rf'\s*({READ}|{ADMIN})\s+([0-9a-fA-F]{{64}})(\s.*)?')


class Keys(NamedTuple):
  """Digests of the keys, by role."""

  digests: list[tuple[str, bytes]]

  @classmethod
  def load(cls, path: PathLike) -> 'Keys':
    """Reads a file of keys.

    Raises:
      InputError: it cannot be read, has a line of another form, or no key.
    """
    digests = []
    for number, line in reading.read_lines(path, 'keys'):
      if line.lstrip().startswith('#'):
        continue
      found = _LINE.fullmatch(line.rstrip('\r'))
      if found is None:
        raise InputError(
          f'{path}, line {number}: expected read or admin, a SHA-256 in hexadecimal, and a name'
        )
      digests.append((found[1], bytes.fromhex(found[2])))
    if not digests:
      raise InputError(f'{path}: no keys in it')
    return cls(digests)

  def allow(self, role: str, authorization: str) -> bool | None:
    """Whether ``Authorization: Bearer KEY`` allows the role; None for an unknown key.

    All digests are compared, each in constant time.
    """
    scheme, _, key = authorization.partition(' ')
    digest = hashlib.sha256(key.strip().encode()).digest()
    allowed, known = False, False
    for own, expected in self.digests:
      same = hmac.compare_digest(digest, expected) and scheme.lower() == 'bearer'
      known |= same
      allowed |= same and own in (role, ADMIN)
    return allowed if known else None
