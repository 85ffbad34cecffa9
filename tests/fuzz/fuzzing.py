"""Harms a sound call of a command in many ways, and checks the promises of dprjax.

    python -m tests.fuzz.fuzzing --cases=500 --seed=7 [--only=encode]

Every case is named by its scene, seed and number, and can be run again by itself.
"""

import argparse
import os
import pathlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tests.fuzz import mutations, scenes
from tests.fuzz.scenes import Scene
from tests.fuzz.server import Reply, Server


class Case(NamedTuple):
  """A harmed call.

  Attributes:
    name: names it for ever: 'encode-7-12'.
    scene: the harmed call.
    argv: the command line.
    harm: applied to the folder; returns its change in words.
    harmed: the file that ``harm`` changes, if it changes one.
    same: whether a run that succeeds must give the sound output.
  """

  name: str
  scene: Scene
  argv: list[str]
  harm: Callable[[pathlib.Path], str]
  harmed: str | None
  same: bool


def cases(scene: Scene, seed: int, count: int) -> Iterator[Case]:
  """The first cases of a seed."""
  for number in range(count):
    name = f'{scene.name}-{seed}-{number}'
    rng = random.Random(name)
    argv, harmed, same = list(scene.argv), rng.choice(scene.files), False
    kind = rng.choices(('file', 'flag', 'out', 'neutral'), (6, 3, 1, 1))[0]
    if kind == 'flag':
      done = mutations.mutate_flag(rng, argv)
      yield Case(name, scene, argv, lambda folder, done=done: done, None, False)
    elif kind == 'out':
      yield _bad_output(name, rng, scene, argv)
    else:
      path = pathlib.Path(harmed)
      text = mutations.is_text(path)
      if kind == 'neutral' and text and harmed not in scene.kept:
        mutate, same = mutations.neutral, True
      else:
        choices = [mutations.mutate_bytes]
        if path.suffix in ('.json', '.jsonl'):
          choices += [mutations.mutate_json] * 3
        elif text:
          choices += [mutations.mutate_lines] * 2
        elif path.suffix in ('.npz', '.npy'):
          choices.append(mutations.mutate_npz)
        mutate, same = rng.choice(choices), harmed in scene.kept

      def harm(
        folder: pathlib.Path,
        mutate: Callable[[random.Random, pathlib.Path], str] = mutate,
        rng: random.Random = rng,
        harmed: str = harmed,
      ) -> str:
        return f'{harmed}: {mutate(rng, folder / harmed)}'

      yield Case(name, scene, argv, harm, harmed, same)


def _bad_output(name: str, rng: random.Random, scene: Scene, argv: list[str]) -> Case:
  place = next(number for number, word in enumerate(argv) if word.startswith('--out='))
  target = rng.choice(
    (
      rng.choice(scene.files),
      rng.choice(scene.files) + '/x',
      'in',
      '.',
      '',
      'in/../in',
      'soft',
      'out/neighbour/x',
      '/proc/self/x',
      '/dev/full',
      'x' * 300,
      'out/a\nb',
    )
  )
  argv[place] = f'--out={target}'
  source = rng.choice(scene.files)

  def harm(folder: pathlib.Path) -> str:
    if target == 'soft':
      os.symlink(folder / source, folder / 'soft')
    return f'--out={target[:40]!r}' + (f' -> {source}' if target == 'soft' else '')

  return Case(name, scene, argv, harm, None, False)


class Verdict(NamedTuple):
  """The fault of a case, if any, and how it ended."""

  case: Case
  harm: str
  reply: Reply
  faults: list[str]

  def __str__(self) -> str:
    return (
      f'{self.case.name}: {self.harm}\n  {" ".join(self.case.argv)[:300]}\n  status '
      f'{self.reply.status}, {self.reply.seconds:.1f} s: '
      f'{" | ".join(self.reply.err.splitlines()[-3:])[-700:]}\n  '
      + '\n  '.join(f'FAULT: {fault}' for fault in self.faults)
    )


def run(
  server: Server, template: pathlib.Path, case: Case, sound: dict[str, object], folder: pathlib.Path
) -> Verdict:
  """Runs one case in a copy of ``template`` at ``folder``, which is removed again."""
  scenes.copy(template, folder, case.harmed)
  try:
    harm = case.harm(folder)
    before = scenes.content(folder)
    reply = server.run(folder, case.argv)
    return Verdict(case, harm, reply, list(_faults(case, folder, before, reply, sound)))
  finally:
    shutil.rmtree(folder)


def _faults(
  case: Case,
  folder: pathlib.Path,
  before: dict[str, str],
  reply: Reply,
  sound: dict[str, object],
) -> Iterator[str]:
  lines = reply.err.splitlines()
  errors = [line for line in lines if line.startswith('dprjax: error: ')]
  if reply.status is None:
    yield 'it hangs'
    return
  if reply.status not in (0, 2):
    yield f'status {reply.status}'
  if 'Traceback' in reply.err:
    yield 'a traceback'
  if reply.status == 2 and (len(errors) != 1 or lines[-1] != errors[0]):
    yield f'{len(errors)} error lines'
  if reply.status == 0 and errors:
    yield 'an error line and status 0'
  if any(len(line) > 500 for line in errors):
    yield 'a line of more than 500 characters'
  after = scenes.content(folder)
  outputs = {word.partition('=')[2] for word in case.argv if word.startswith('--out=')}
  if changed := [name for name, digest in before.items() if after.get(name) != digest]:
    yield f'changed or removed: {changed[:3]}'
  # A command that continues where it stopped keeps its files.
  own = tuple(outputs) if reply.status == 0 or case.scene.keeps else ()
  endings = ('', '.json', '.parts', '.fusion.json')
  allowed = [f'{out}{ending}' for out in own if out for ending in endings]
  allowed += [str(parent) for name in allowed for parent in pathlib.Path(name).parents]
  if left := [
    name
    for name in after
    if name not in before
    and name not in allowed
    and not any(name.startswith(f'{place}/') for place in allowed if place != '.')
  ]:
    yield f'left behind: {left[:3]}'
  if hidden := [name for name in after if name not in before and _is_scratch(name)]:
    yield f'left behind: {hidden[:3]}'
  if reply.status == 0 and case.same and scenes.output(folder, case.scene) != sound:
    yield 'another output than from the sound input, with status 0'


def _is_scratch(name: str) -> bool:
  last = name.rpartition('/')[2]
  return last.startswith('.') and last.endswith(('.tmp', '.old', '.lock'))


def sound_output(
  server: Server, template: pathlib.Path, scene: Scene, folder: pathlib.Path
) -> tuple[dict[str, object], float]:
  """The output of the unharmed call, and the seconds that it takes."""
  scenes.copy(template, folder)
  try:
    replies = [server.run(folder, list(argv)) for argv in (scene.argv, *scene.then)]
    assert not any(reply.status for reply in replies), replies
    return scenes.output(folder, scene), replies[0].seconds
  finally:
    shutil.rmtree(folder)


def killed(
  server: Server,
  template: pathlib.Path,
  scene: Scene,
  kills: Sequence[tuple[int, float]],
  folder: pathlib.Path,
) -> tuple[list[Reply], dict[str, object], list[str]]:
  """Runs a scene that is killed again and again, then undisturbed.

  Args:
    kills: signals, and the seconds after which they come.

  Returns:
    How each run ended; the output in the end; wrong changes and leftovers.
  """
  scenes.copy(template, folder)
  try:
    before = scenes.content(folder)
    replies = [server.run(folder, list(scene.argv), kill=kill) for kill in kills]
    replies += [server.run(folder, list(argv)) for argv in (scene.argv, *scene.then)]
    after = scenes.content(folder)
    harmed = [name for name, digest in before.items() if after.get(name) != digest]
    left = [name for name in after if name not in before and _is_scratch(name)]
    return replies, scenes.output(folder, scene), harmed + left
  finally:
    shutil.rmtree(folder)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--cases', type=int, default=100, help='of each command')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--only', help='the name of a scene, or of a case')
  args = parser.parse_args()
  from tests.fuzz import material

  only = (args.only or '').partition('-')[0]
  with tempfile.TemporaryDirectory() as scratch, Server() as server:
    root = pathlib.Path(scratch)
    built = scenes.build(root / 'template')
    if only not in built:
      built |= scenes.add_models(root / 'template', *material.make(root / 'material'))
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for scene in built.values():
      if only not in ('', scene.name):
        continue
      sound, _ = sound_output(server, root / 'template', scene, root / 'case')
      for case in cases(scene, args.seed, args.cases):
        if '-' in (args.only or '') and case.name != args.only:
          continue
        verdict = run(server, root / 'template', case, sound, root / 'case')
        counts[f'{scene.name} {verdict.reply.status}'] += 1
        if verdict.faults or '-' in (args.only or ''):
          counts[f'{scene.name} FAULTS'] += bool(verdict.faults)
          print(verdict, flush=True)
    seconds = time.monotonic() - began
    print(dict(counts), f'{sum(counts.values()) / seconds * 60:.0f} cases a minute')


if __name__ == '__main__':
  main()
