"""Seeded mutations of files and flags. Each returns its change in a few words."""

import json
import pathlib
import random
from typing import Any

from dprjax.base import reading

EVIL: tuple[Any, ...] = (
  None,
  [],
  {},
  '',
  ' ',
  'a\tb',
  'a\nb',
  '\x00',
  '\ud800',
  '../../../etc/passwd',
  'x' * 5000,
  True,
  -1,
  0,
  10**9,
  10**400,
  1e308,
  -0.5,
  float('nan'),
  float('inf'),
  [[[]]],
  {'a': None},
)
FLAG_VALUES = (
  '',
  ' ',
  'x',
  '-1',
  '0',
  '0.5',
  '1e999',
  'nan',
  '-inf',
  '9' * 30,
  '9' * 5000,
  '1_0',
  '+3',
  '\u0663',
  'a\nb',
  '../..',
  '/dev/null/x',
  'true',
  'None',
)


def nested(depth: int) -> str:
  return '[' * depth + ']' * depth


def mutate_bytes(rng: random.Random, path: pathlib.Path) -> str:
  """Damages a file as disks, networks and editors do."""
  content = path.read_bytes()
  place = rng.randrange(max(len(content), 1))
  match rng.choice(('flip', 'flip', 'cut', 'empty', 'lost', 'folder', 'tail', 'zeros', 'latin')):
    case 'flip' if content:
      changed = bytearray(content)
      changed[place] ^= 1 << rng.randrange(8)
      path.write_bytes(changed)
      return f'flip a bit at {place}'
    case 'cut':
      path.write_bytes(content[:place])
      return f'cut off at {place}'
    case 'lost':
      path.unlink()
      return 'remove'
    case 'folder':
      path.unlink()
      path.mkdir()
      return 'put a folder there'
    case 'tail':
      path.write_bytes(content + rng.randbytes(rng.randrange(1, 40)))
      return 'append noise'
    case 'zeros':
      path.write_bytes(content[:place] + bytes(64) + content[place:])
      return f'insert zeros at {place}'
    case 'latin':
      path.write_bytes(content[:place] + b'\xe9\xff' + content[place:])
      return f'insert Latin-1 at {place}'
  path.write_bytes(b'')
  return 'empty'


def mutate_lines(rng: random.Random, path: pathlib.Path) -> str:
  """Changes the lines of a text file."""
  lines = path.read_text().split('\n')
  number = rng.randrange(max(len(lines) - 1, 1))
  columns = lines[number].split('\t' if '\t' in lines[number] else ' ')
  join = '\t' if '\t' in lines[number] else ' '
  column = rng.randrange(len(columns))
  kind = rng.choice(('double', 'column', 'less', 'more', 'swap', 'long', 'blank', 'cr'))
  match kind:
    case 'double':
      lines.insert(rng.randrange(len(lines)), lines[number])
    case 'column':
      columns[column] = rng.choice(
        ('', ' ', '\ufeff', 'a b', '\x01', '\x00', '-1', '1.0', '1e5', 'nan', 'inf', '9' * 400)
      )
      lines[number] = join.join(columns)
    case 'less':
      del columns[column]
      lines[number] = join.join(columns)
    case 'more':
      columns.insert(column, 'x')
      lines[number] = join.join(columns)
    case 'swap':
      other = rng.randrange(len(columns))
      columns[column], columns[other] = columns[other], columns[column]
      lines[number] = join.join(columns)
    case 'long':
      lines[number] = 'x' * 1_000_000
    case 'blank':
      lines = [''] * 3
    case 'cr':
      lines[number] = lines[number][:5] + '\r' + lines[number][5:]
  path.write_text('\n'.join(lines), newline='')
  return f'{kind} in line {number + 1}'


def mutate_json(rng: random.Random, path: pathlib.Path) -> str:
  """Replaces or removes a value in a JSON file or in a line of jsonl."""
  text = path.read_text()
  lines = text.splitlines() if path.suffix == '.jsonl' else [text]
  number = rng.randrange(len(lines))
  document = json.loads(lines[number])
  parent, key = document, None
  for _ in range(rng.randrange(1, 5)):
    value = parent if key is None else parent[key]
    if not isinstance(value, dict | list) or not value:
      break
    parent = value
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
  if key is None or rng.random() < 0.05:
    lines[number] = rng.choice(('[]', 'null', '7', '{', '"x"', nested(2000), nested(100), 'NaN'))
    what = 'whole document'
  elif rng.random() < 0.2:
    del parent[key]
    what = f'without {key!r}'
    lines[number] = json.dumps(document)
  else:
    parent[key] = rng.choice(EVIL) if rng.random() < 0.9 else 'DEEP'
    what = f'{key!r}: {str(parent[key])[:20]!r}'
    lines[number] = json.dumps(document).replace('"DEEP"', nested(1500))
  path.write_text('\n'.join(lines) + '\n')
  return what


def mutate_npz(rng: random.Random, path: pathlib.Path) -> str:
  """Makes a member of an npz, or the npy file, declare another shape, type or order."""
  content = path.read_bytes()
  old = b"'shape': ("
  place = content.find(old)
  if place < 0:
    return mutate_bytes(rng, path)
  end = content.index(b')', place)
  width = end - place - len(old)
  shape = rng.choice((b'9' * (width - 1) + b',', b'-1,', b'0,', b'', b'3,' * (width // 2)))
  changed = content[: place + len(old)] + shape[:width].ljust(width) + content[end:]
  path.write_bytes(changed)
  return f'declare the shape ({shape.decode()})'


def mutate_flag(rng: random.Random, argv: list[str]) -> str:
  """Gives a flag another value, doubles it, removes it, or adds an unknown one."""
  place = rng.randrange(1, len(argv))
  name = argv[place].partition('=')[0]
  kind = rng.choice(('value', 'value', 'value', 'value', 'remove', 'double', 'unknown'))
  if kind == 'value':
    argv[place] = f'{name}={rng.choice(FLAG_VALUES)}'
  elif kind == 'remove':
    del argv[place]
  elif kind == 'double':
    argv.append(argv[place])
  else:
    argv.append(rng.choice(('--unknown', '--unknown=3', '-x', 'word', '--', '--config.x=3')))
  return f'{kind}: {name} {argv[place][:60] if place < len(argv) else ""}'


def neutral(rng: random.Random, path: pathlib.Path) -> str:
  """Changes the bytes of a text file and not its meaning."""
  content = path.read_bytes()
  match rng.choice(('mark', 'blank', 'windows')):
    case 'mark':
      path.write_bytes(b'\xef\xbb\xbf' + content)
      return 'byte-order mark'
    case 'blank':
      path.write_bytes(content + b'\n\n')
      return 'blank lines'
    case _:
      path.write_bytes(content.replace(b'\n', b'\r\n'))
      return 'Windows line ends'


def is_text(path: pathlib.Path) -> bool:
  return reading.plain_name(path).endswith(('.jsonl', '.tsv', '.trec', '.txt', '.csv', '.json'))
