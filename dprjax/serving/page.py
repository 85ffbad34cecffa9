"""The pages at ``/`` and ``/docs``, with headers that let them load nothing else."""

import base64
import hashlib
import pathlib
import re


def read(name: str) -> tuple[bytes, dict[str, str]]:
  """A page beside this file, and its headers, which allow only its own script and style."""
  page = pathlib.Path(__file__).with_name(name).read_text(encoding='utf-8')
  sources = []
  for tag in ('script', 'style'):
    found = re.search(f'<{tag}>(.*?)</{tag}>', page, re.DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    sources.append(f"{tag}-src 'sha256-{digest}'")
  policy = ["default-src 'none'", "connect-src 'self'", 'img-src data:', *sources]
  policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
  return page.encode(), {
    'content-security-policy': '; '.join(policy),
    'x-content-type-options': 'nosniff',
    'referrer-policy': 'no-referrer',
    'cache-control': 'no-cache',
  }
