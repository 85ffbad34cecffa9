"""The pages, and their blocks of code."""

import os
import pathlib
import re
import shlex
import typing

from dprjax import __main__ as console

ROOT = pathlib.Path(__file__).parent.parent
MODULES = console.modules()
COMMANDS = MODULES.keys()
# What begins a line of the shell.
_SHELL = re.compile(r'(?:\w+=\S* )*(?:dprjax|python[\d.]*|pip|curl|git|make|export)(?= )')


class Block(typing.NamedTuple):
  """A block of code.

  Attributes:
    page: its path from the root of the repository.
    line: its number, from 1.
    language: that of a fence; of an indented block 'sh' for commands, else ''.
    text: without indentation and fences.
  """

  page: str
  line: int
  language: str
  text: str

  def __str__(self):
    return f'{self.page}:{self.line}'

  def commands(self, setenv):
    """Yields the commands of the shell, each a list of words; ``setenv`` takes what it exports."""
    for line in self.text.replace('\\\n', ' ').splitlines():
      words = shlex.split(os.path.expandvars(line), comments=True)
      if words[:1] == ['export']:
        setenv(*words[1].split('=', 1))
      elif words:
        yield words


def blocks(page):
  """The blocks of a page in their order."""
  lines = (ROOT / page).read_text().splitlines()
  found, at = [], 0
  while at < len(lines):
    start = at
    if lines[at].startswith('```'):
      language = lines[at].strip('`')
      at += 1
      while lines[at] != '```':
        at += 1
      found.append(Block(page, start + 2, language, '\n'.join(lines[start + 1 : at]) + '\n'))
    elif lines[at].startswith('    ') and not (at and lines[at - 1]):
      while at + 1 < len(lines) and re.match(r' {4}|$', lines[at + 1]):
        at += 1
      text = re.sub('^ +', '', '\n'.join(lines[start : at + 1]), flags=re.MULTILINE)
      shell = _SHELL.match(text)
      found.append(Block(page, start + 1, 'sh' if shell else '', f'{text.strip()}\n'))
    at += 1
  return found


def command(words):
  """``(name, arguments)`` of a command of dprjax by the name of its module, else None."""
  words = [word for at, word in enumerate(words) if at or not re.match(r'\w+=', word)]
  if words[:1] == ['dprjax']:
    for count in (2, 1):
      if (name := '_'.join(words[1 : 1 + count])) in COMMANDS:
        return name, words[1 + count :]
  elif words[1:2] == ['-m'] and (words[2:3] or [''])[0].removeprefix('dprjax.') in COMMANDS:
    return words[2].removeprefix('dprjax.'), words[3:]
  return None


def commands(page, setenv):
  """Yields the commands of a page, as `Block.commands`."""
  for block in blocks(page):
    if block.language == 'sh':
      yield from block.commands(setenv)
