"""Shared by the experiments: commands, measurements that are made once, tables over seeds."""

import json
import subprocess
import sys
import time

import numpy as np


def say(line):
  print(time.strftime('%H:%M:%S'), line, flush=True)


def command(name, *flags):
  """Runs a dprjax command in its own process."""
  say(f'$ python -m dprjax.{name} {" ".join(flags)}')
  subprocess.run([sys.executable, '-m', f'dprjax.{name}', *flags], check=True)


def once(path, work):
  """The measurement in ``path``; if it does not exist, ``work`` makes it."""
  if not path.exists():
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = work()
    path.write_text(json.dumps(values) + '\n')
    shown = ', '.join(
      f'{key} {value:.4f}' for key, value in values.items() if isinstance(value, float)
    )
    say(f'{path}: {shown}  {time.monotonic() - began:.0f} s')
  return json.loads(path.read_text())


def claim(folder, settings):
  """Makes the folder of an experiment; exits if it already belongs to other settings."""
  folder.mkdir(parents=True, exist_ok=True)
  known = folder / 'settings.json'
  if known.exists() and json.loads(known.read_text()) != json.loads(json.dumps(settings)):
    sys.exit(
      f'{folder} holds results of other settings ({known.read_text().strip()}); choose another '
      '--out'
    )
  known.write_text(json.dumps(settings) + '\n')


def cell(values):
  """The mean and, for several seeds, half the range."""
  values = list(values)
  if not values:
    return ''
  return f'{np.mean(values):.3f}' + (f' ±{np.ptp(values) / 2:.3f}' if len(values) > 1 else '')


def table(head, rows):
  """A Markdown table."""
  return ''.join(f'| {" | ".join(row)} |\n' for row in (head, ['---'] * len(head), *rows))
