"""Builds the site of the documentation: `make docs`.

    python docs/site/build.py --out=build/site

The pages are README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ as they stand, laid out as in
the checkout, so that a link leads to the same place here and on the forge. A file of another kind
that a page links to, such as a config, becomes a page that shows it. Zensical renders them, and
mkdocstrings the docstrings that docs/reference.md names, without importing dprjax or asking the
network. A link whose text is the name of a page shows the title of the page. A link or an anchor
that leads nowhere, and anything that a page would load from elsewhere, is an error.
DPRJAX_URL=https://HOST/OWNER/dprjax adds a link to the repository.
"""

import argparse
import html.parser
import json
import os
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'AGENTS.md')
_LANGUAGES = {'.py': 'python', '.toml': 'toml', '.cff': 'yaml', '.yaml': 'yaml', '.sh': 'bash'}
# A command in docs/reference.md, of which only the docstring is shown.
_COMMAND = re.compile(r'^::: dprjax\.\w+$', re.MULTILINE)
_LINK = re.compile(r'(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)')


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
  parser.add_argument('--out', type=pathlib.Path, default=ROOT / 'build' / 'site')
  out = parser.parse_args(argv).out.resolve()
  shutil.rmtree(out, ignore_errors=True)
  stage(out)
  command = [sys.executable, '-m', 'zensical', 'build', '--clean', '--strict']
  if status := subprocess.run(command, cwd=out).returncode:
    sys.exit(status)
  if wrong := check(out / 'html'):
    sys.exit('\n'.join(['the site is wrong:', *wrong]))
  print(f'{out / "html"}: python -m http.server -d {out / "html"} shows it')


def stage(out: pathlib.Path) -> None:
  """Lays the pages, the figures and the shape of the site into ``out``."""
  config = (ROOT / 'docs' / 'site' / 'zensical.toml').read_text(encoding='utf-8')
  titles = titles_of(tomllib.loads(config)['project']['nav'])
  if url := os.environ.get('DPRJAX_URL'):
    config = config.replace('[project]', f'[project]\nrepo_url = {json.dumps(url)}', 1)
  (out / 'pages' / 'docs' / 'experiments').mkdir(parents=True)
  (out / 'zensical.toml').write_text(config.replace('@ROOT@', ROOT.as_posix()), encoding='utf-8')
  shutil.copy(ROOT / 'docs' / 'site' / 'site.css', out / 'pages')
  for figure in (ROOT / 'docs').rglob('*.png'):
    shutil.copy(figure, out / 'pages' / figure.relative_to(ROOT))
  for page in [ROOT / name for name in PAGES] + sorted((ROOT / 'docs').rglob('*.md')):
    where = page.relative_to(ROOT).as_posix()
    text, shown = with_sources(page.read_text(encoding='utf-8'), where)
    text = with_titles(text, where, titles)
    text = _COMMAND.sub(r'\g<0>\n    options:\n      members: false', text)
    (out / 'pages' / where).write_text(text, encoding='utf-8')
    for name in shown:
      show(out / 'pages', name)


def with_sources(text: str, page: str) -> tuple[str, set[str]]:
  """The text with its links to files other than pages led to pages that show them, and these files.

  Args:
    text: of a page.
    page: its path from the checkout on.
  """
  shown = set()

  def lead(match: re.Match[str]) -> str:
    path = match['target'].partition('#')[0]
    name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if not path or ':' in path or path.endswith(('.md', '.png')) or not (ROOT / name).is_file():
      return match[0]
    shown.add(name)
    return f'[{match["text"]}]({path}.md)'

  return _LINK.sub(lead, text), shown


def titles_of(nav: Sequence[dict]) -> dict[str, str]:
  """The titles of the pages in the navigation, by their paths from the checkout on."""
  titles = {}
  for entry in nav:
    for title, value in entry.items():
      titles.update(titles_of(value) if isinstance(value, list) else {value: title})
  return titles


def with_titles(text: str, page: str, titles: dict[str, str]) -> str:
  """The text with titles in place of file names where they are the texts of links.

  Args:
    text: of a page.
    page: its path from the checkout on.
    titles: as of `titles_of`.
  """

  def name(match: re.Match[str]) -> str:
    path = match['target'].partition('#')[0]
    there = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if not match['text'].endswith('.md') or there not in titles:
      return match[0]
    return f'[{titles[there]}]({match["target"]})'

  return _LINK.sub(name, text)


def show(pages: pathlib.Path, name: str) -> None:
  """Makes the page ``name.md``, which shows the file ``name`` of the checkout."""
  page = pages / f'{name}.md'
  page.parent.mkdir(parents=True, exist_ok=True)
  code = (ROOT / name).read_text(encoding='utf-8')
  if name.endswith('.ipynb'):
    page.write_text(notebook(json.loads(code)), encoding='utf-8')
    return
  language = _LANGUAGES.get(posixpath.splitext(name)[1], 'text')
  fence = '`' * (3 + max(map(len, re.findall('`{3,}', code)), default=0))
  page.write_text(f'# {name}\n\n{fence}{language}\n{code}\n{fence}\n', encoding='utf-8')


def notebook(content: dict) -> str:
  """A notebook as Markdown: its texts, its code, and what the code showed when it last ran."""
  parts = []
  for cell in content['cells']:
    text = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown':
      parts.append(text)
      continue
    parts.append(f'```python\n{text}\n```')
    for output in cell['outputs']:
      data = output.get('data', {})
      if 'text/html' in data:  # one line: an empty one would end the HTML
        parts.append(' '.join(''.join(data['text/html']).split()))
      elif 'image/png' in data:
        image = ''.join(data['image/png']).replace('\n', '')
        parts.append(f'<img alt="A figure of the notebook" src="data:image/png;base64,{image}">')
      elif shown := data.get('text/plain', output.get('text')):
        parts.append(f'```text\n{"".join(shown).rstrip()}\n```')
  return '\n\n'.join([*parts, ''])


class _Page(html.parser.HTMLParser):
  """The anchors of a page, where it links to, and what it loads."""

  def __init__(self, text: str):
    super().__init__()
    self.anchors: set[str] = set()
    self.links: set[str] = set()
    self.loads: set[str] = set()
    self.feed(text)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    values = {name: value for name, value in attrs if value is not None}
    self.anchors |= {values[name] for name in ('id', 'name') if name in values}
    if tag == 'a' and 'href' in values:
      self.links.add(values['href'])
    elif tag == 'link' and values.get('rel') not in ('canonical', 'prev', 'next'):
      self.loads.add(values.get('href', ''))
    self.loads |= {values[name] for name in ('src', 'data') if name in values and tag != 'a'}


def check(site: pathlib.Path) -> list[str]:
  """What is wrong with the links of a built site; nothing where all is well."""
  pages = {path: _Page(path.read_text(encoding='utf-8')) for path in sorted(site.rglob('*.html'))}
  wrong = []
  for path, page in pages.items():
    if path.name == '404.html':  # its links are those of the site's root
      continue
    at = path.relative_to(site)
    for link in sorted(page.links | page.loads):
      parts = urllib.parse.urlsplit(link)
      if parts.scheme or parts.netloc:
        if link in page.loads and parts.scheme != 'data':
          wrong.append(f'{at} loads {link}')
        continue
      target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
      if target.is_dir():
        target /= 'index.html'
      anchor = urllib.parse.unquote(parts.fragment)
      if not target.is_file():
        wrong.append(f'{at} leads to {link}, which is not there')
      elif anchor and target in pages and anchor not in pages[target].anchors:
        wrong.append(f'{at} leads to {link}; there is no such anchor')
  return wrong


if __name__ == '__main__':
  main()
