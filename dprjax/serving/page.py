"""The pages at ``/`` and ``/docs``, with headers that let them load nothing else."""

import base64
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_FILE = pathlib.Path(__file__).with_name('page.html')


def read() -> tuple[bytes, dict[str, str]]:
  """The search page and its headers, which allow only its own script and style."""
  page = _FILE.read_text(encoding='utf-8')
  return page.encode(), _headers(page, 'script', 'style')


def reference(document: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
  """A page with the paths and types of an OpenAPI document, and its headers."""
  paths = [
    (
      f'<code>{method.upper()} {escape(path)}</code>',
      escape(operation['summary']),
      _types(operation.get('requestBody', {})),
      _types(next(iter(operation['responses'].values()))),
    )
    for path, operations in document['paths'].items()
    for method, operation in operations.items()
    if method != 'parameters'
  ]
  types = ''.join(
    _schema(name, schema) for name, schema in document['components']['schemas'].items()
  )
  title = f'{document["info"]["title"]} {document["info"]["version"]}'
  page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: reference</title>
<link rel="icon" href="data:,">
<style>{_tag(_FILE.read_text(encoding='utf-8'), 'style')}</style>
</head>
<body>
<h1>{title}</h1>
<p>A key goes into the header <code>Authorization: Bearer KEY</code>. Programs read
<a href="openapi.json">openapi.json</a>. <a href="./">Search</a></p>
{_table(('path', 'for', 'body', 'answer'), paths)}{types}
</body>
</html>
"""
  return page.encode(), _headers(page, 'style')


def _schema(name: str, schema: Mapping[str, Any]) -> str:
  rows = [
    (
      f'<code>{field}</code>',
      _type(about),
      f'<code>{escape(json.dumps(about["default"]))}</code>' if 'default' in about else '',
      escape(about.get('description', '')),
    )
    for field, about in schema.get('properties', {}).items()
  ]
  about = escape(schema.get('description', ''))
  table = _table(('field', 'type', 'default', ''), rows)
  return f'<section id="{name}"><h2>{name}</h2><p class="soft">{about}</p>{table}</section>'


def _types(message: Mapping[str, Any]) -> str:
  """The types of a body."""
  return ' or '.join(_type(content['schema']) for content in message.get('content', {}).values())


def _type(schema: Mapping[str, Any]) -> str:
  """A JSON schema in a few words, with links to other types."""
  if '$ref' in schema:
    name = schema['$ref'].rpartition('/')[2]
    return f'<a href="#{name}">{name}</a>'
  if 'enum' in schema:
    return ' or '.join(f'<code>{escape(json.dumps(one))}</code>' for one in schema['enum'])
  if 'anyOf' in schema:
    return ' or '.join(map(_type, schema['anyOf']))
  if schema.get('type') == 'array':
    return f'list of ({_type(schema.get("items", {}))})'
  return schema.get('format') or schema.get('type', 'any')


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [''.join(f'<th>{cell}</th>' for cell in head)]
  lines += [''.join(f'<td>{cell}</td>' for cell in row) for row in rows]
  return f'<div class="table"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _headers(page: str, *tags: str) -> dict[str, str]:
  sources = []
  for tag in tags:
    digest = base64.b64encode(hashlib.sha256(_tag(page, tag).encode()).digest()).decode()
    sources.append(f"{tag}-src 'sha256-{digest}'")
  policy = ["default-src 'none'", "connect-src 'self'", 'img-src data:', *sources]
  policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
  return {
    'content-security-policy': '; '.join(policy),
    'x-content-type-options': 'nosniff',
    'referrer-policy': 'no-referrer',
    'cache-control': 'no-cache',
  }


def _tag(page: str, tag: str) -> str:
  """The content of the first tag of this name."""
  found = re.search(f'<{tag}>(.*?)</{tag}>', page, re.DOTALL)
  assert found is not None
  return found[1]
