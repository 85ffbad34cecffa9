"""docs/no-labels.md and docs/smaller.md: every command in them is one that its parser takes."""

import importlib
import pathlib
import shlex

import pytest

from dprjax.runtime import cli
from dprjax.runtime import config as configs

ROOT = pathlib.Path(__file__).parent.parent


def commands(page):
  """The words of each command of a page, behind `python -m`."""
  text = (ROOT / 'docs' / page).read_text().replace('\\\n', ' ')
  lines = [line.strip() for line in text.splitlines() if line.startswith('    python -m ')]
  return [shlex.split(line)[2:] for line in lines]


COMMANDS = [(page, words) for page in ('no-labels.md', 'smaller.md') for words in commands(page)]


class Parsed(Exception):
  """Raised in place of running the command."""


@pytest.mark.parametrize(('page', 'words'), COMMANDS, ids=lambda value: ' '.join(value)[:60])
def test_every_command_is_taken(page, words, monkeypatch):
  def run(parser, command, argv=None):
    raise Parsed(parser.parse_args(argv))

  monkeypatch.setattr(cli, 'run', run)
  monkeypatch.chdir(ROOT)
  name, *arguments = words
  with pytest.raises(Parsed):
    importlib.import_module(name).main(arguments)
  knobs = [word for word in arguments if word.startswith('--config')]
  if knobs:
    configs.check(configs.parse(knobs))


def test_the_pages_have_commands():
  assert len(commands('no-labels.md')) >= 12 and len(commands('smaller.md')) >= 5
