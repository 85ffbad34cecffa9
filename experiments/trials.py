"""What the experiments share: commands in processes of their own, measurements that are made once,
a table over seeds.
"""

import json
import subprocess
import sys
import time

import numpy as np


def say(line):
  print(time.strftime('%H:%M:%S'), line, flush=True)


def command(name, *flags):
  """A dprjax command in a process of its own; its output goes through."""
  say(f'$ python -m dprjax.{name} {" ".join(flags)}')
  subprocess.run([sys.executable, '-m', f'dprjax.{name}', *flags], check=True)


def once(path, work):
  """The measurement in ``path``, made if it is not there."""
  if not path.exists():
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = work()
    path.write_text(json.dumps(found) + '\n')
    say(
      f'{path}: {", ".join(f"{key} {value:.4f}" for key, value in found.items())}  '
      f'{time.monotonic() - began:.0f} s'
    )
  return json.loads(path.read_text())


def claim(folder, settings):
  """Makes the folder of an experiment, and ends the process where it is one of other settings."""
  folder.mkdir(parents=True, exist_ok=True)
  known = folder / 'settings.json'
  if known.exists() and json.loads(known.read_text()) != json.loads(json.dumps(settings)):
    sys.exit(
      f'{folder} holds results of other settings ({known.read_text().strip()}); choose another '
      '--out'
    )
  known.write_text(json.dumps(settings) + '\n')


def cell(values):
  """Mean and, of several seeds, half the range."""
  values = list(values)
  if not values:
    return ''
  return f'{np.mean(values):.3f}' + (f' ±{np.ptp(values) / 2:.3f}' if len(values) > 1 else '')


def table(head, rows):
  """Markdown."""
  return (
    '\n'.join('| ' + ' | '.join(row) + ' |' for row in (head, ['---'] * len(head), *rows)) + '\n'
  )
