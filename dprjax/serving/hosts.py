"""Host names and browser pages that get answers without a key.

A page of any site can make a browser send requests to a server on the same machine: by a name that
it points to 127.0.0.1 (DNS rebinding), or by a form. The headers Host and Origin show both.
"""

import fnmatch
import ipaddress
import urllib.parse
from collections.abc import Sequence


class Hosts:
  """Allowed names in requests: those of this machine, and given patterns.

  Args:
    patterns: names such as ``search.example.org`` or ``*.example.org``, without a port.
  """

  def __init__(self, patterns: Sequence[str] = ()):
    self._patterns = [pattern.lower() for pattern in patterns]

  def allow(self, host: str) -> bool:
    """Whether the header Host, with or without a port, names this server."""
    return self._allow_url(f'//{host}')

  def allow_origin(self, origin: str) -> bool:
    """Whether the header Origin names a page of this server."""
    return self._allow_url(origin)

  def _allow_url(self, url: str) -> bool:
    try:
      name = urllib.parse.urlsplit(url).hostname or ''
    except ValueError:
      return False
    return is_loopback(name) or any(fnmatch.fnmatchcase(name, one) for one in self._patterns)


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach the address."""
  if host == 'localhost' or host.endswith('.localhost'):
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
