"""Systems of experiments/pretraining.py, and the claims on them.

A system is a backbone after a method of pretraining, and a training that starts from it.
"""

from typing import NamedTuple

import systems
from pretraining_sets import EVEN, LONG, LOW, WHOLE


class Method(NamedTuple):
  """A pretraining of a backbone: a label, a recipe of configs/, and differences from it."""

  label: str
  recipe: str
  options: tuple[str, ...] = ()


ALONE = ('pretrain.contrast_weight=0.0',)
METHODS = {
  'mlm': Method('masked LM', 'condenser.py:mlm'),
  'mlm-sentence': Method('masked LM, sentences', 'rip.py:sentence', ALONE),
  'mlm-span': Method('masked LM, spans', 'rip.py:span', ALONE),
  'rip-sentence': Method('RIP, sentences', 'rip.py:sentence'),
  'rip-span': Method('RIP, spans', 'rip.py:span'),
  'cocondenser-sentence': Method('coCondenser, sentences', 'condenser.py:cocondenser,sentence'),
  'cocondenser-span': Method('coCondenser, spans', 'condenser.py:cocondenser'),
  'condenser': Method('Condenser', 'condenser.py:condenser'),
  'ict': Method('ICT', 'condenser.py:ict'),
}
START = 'start'
LABELS = {START: 'start'} | {key: one.label for key, one in METHODS.items()}
POOLINGS = ('cls', 'mean')
RATES = (1e-4, 3e-4, 1e-3)  # of whole backbones
PROMPT_RATES = (3e-2, 0.1, 0.3)
# Small encoders that know little rise late.
LONGER = (*systems.PLAIN, 'steps=600', 'eval.patience=4')
TUNED = {  # trainings: learning rates, options
  'zero': ((), ('prompt.length=0',)),
  'dpt': (PROMPT_RATES, LONGER),
  'ft': (
    RATES,
    (*LONGER, *systems.FINE_TUNED),
  ),
}
KINDS = {'zero': 'zero-shot', 'dpt': 'DPT', 'ft': 'FT'}

UNITS = ('sentence', 'span')
# (claim, its method, the one that it is above), whatever is trained
CROSSED = (
  *(
    (f'D6: sentences above spans, {said}', f'{loss}-sentence', f'{loss}-span')
    for said, loss in (('coCondenser', 'cocondenser'), ('RIP', 'rip'))
  ),
  *(
    (f'D7: {said}, {unit}s', f'{ours}-{unit}', f'{theirs}-{unit}')
    for said, ours, theirs in (
      ('RIP above coCondenser', 'rip', 'cocondenser'),
      ('RIP above masked LM', 'rip', 'mlm'),
      ('coCondenser above masked LM', 'cocondenser', 'mlm'),
    )
    for unit in UNITS
  ),
)
# (claim, its method, the one that it is above, the training, the sets)
CLAIMS = (
  *((*one, kind, WHOLE) for kind in KINDS for one in CROSSED),
  *((*one, 'ft', (LONG,)) for one in CROSSED),
  (
    'D6, one length: coCondenser',
    'cocondenser-sentence',
    'cocondenser-span',
    'zero',
    (EVEN,),
  ),
  ('D6, one length: RIP', 'rip-sentence', 'rip-span', 'zero', (EVEN,)),
  ('C1: Condenser above masked LM, 500 pairs', 'condenser', 'mlm', 'ft', ('stsb-500',)),
  ('C1: Condenser above masked LM, 1,000 pairs', 'condenser', 'mlm', 'ft', ('stsb-1000',)),
  ('C2: Condenser above masked LM, sections', 'condenser', 'mlm', 'ft', ('sections-1000',)),
  ('C3: Condenser above masked LM, few queries', 'condenser', 'mlm', 'ft', LOW),
  ('C3: Condenser above masked LM, all queries', 'condenser', 'mlm', 'ft', WHOLE),
  ('C4: ICT above Condenser, few queries', 'ict', 'condenser', 'ft', LOW),
  ('C4: ICT above Condenser, all queries', 'ict', 'condenser', 'ft', WHOLE),
)
# (claim, the method whose measure is higher, and lower, without training; see `Experiment.look` of
# pretraining.py)
LOOKS = tuple(
  (f'D8: {said}, {unit}s', f'{other}-{unit}', f'rip-{unit}', measure)
  for said, other, measure in (
    ('RIP better aligned than masked LM', 'mlm', 'raw alignment'),
    ('RIP more uniform than masked LM', 'mlm', 'raw uniformity'),
    ('RIP more uniform than coCondenser', 'cocondenser', 'raw uniformity'),
  )
  for unit in UNITS
)
# (claim, the method whose attention fine-tuning moves more, and less; see `Experiment.shift`)
SHIFTS = (
  ('C5: more after masked LM than after Condenser', 'mlm', 'condenser', 'shift'),
  ('C5: more after masked LM than after ICT', 'mlm', 'ict', 'shift'),
)


def way(start, kind, pooling):
  """The name of a system."""
  return f'{start}.{kind}.{pooling}'


def alone(start):
  """Plain masked LM on the texts of a method."""
  unit = start.rpartition('-')[2]
  return f'mlm-{unit}' if unit in UNITS else 'mlm'


def make(start, kind, pooling):
  rates, options = TUNED[kind]
  return systems.Way(
    f'{LABELS[start]}, {KINDS[kind]}',
    'dptdr.py:beir,both',
    rates,
    (*options, f'pooling={pooling}'),
    keeps='',
    start=start,
    trained=kind != 'zero',
  )


WAYS = {
  way(start, kind, pooling): make(start, kind, pooling)
  for pooling in POOLINGS
  for kind in TUNED
  for start in LABELS
}
