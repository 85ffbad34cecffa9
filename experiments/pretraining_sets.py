"""Sets of experiments/pretraining.py: those of gain_sets.py, and others that are not retrieval.

The others are pairs of STS-b and triplets of Wikipedia sections. Each has a folder, and a measure
of its test pairs or triplets.
"""

import bz2
import hashlib
import json
import re
import shutil

import numpy as np

import gain_sets
import trials
from dprjax.base import files
from lab import measures, mediawiki, sections, sts
from lab.similarity import spearman_values

SETS = {
  'scifact': gain_sets.Setting('scifact', 809),
  'scifact-long': gain_sets.Setting('scifact', 809),
  'medquad': gain_sets.Setting('medquad-large', 2000),
  'medquad-even': gain_sets.Setting('medquad-even', 2000),
  'medquad-100': gain_sets.Setting('medquad-large', 100),
  'medquad-1000': gain_sets.Setting('medquad-large', 1000),
  'stsb-500': gain_sets.Setting('stsb', 500),
  'stsb-1000': gain_sets.Setting('stsb', 1000),
  'sections-1000': gain_sets.Setting('sections', 1000),
}
EVEN = 'medquad-even'  # all texts as long as spans; zero-shot only
LONG, UPDATES = 'scifact-long', 1200  # fine-tuning of so many updates, whatever they gain
WHOLE = ('scifact', 'medquad')  # also zero-shot and by a prompt
LOW = ('medquad-100', 'medquad-1000')
# Sources that are not retrieval.
SENTENCES = {
  name: trials.ROOT / 'experiments' / 'lab' / 'configs' / f'{name}.py'
  for name in ('stsb', 'sections')
}
TESTED = 0.3  # of Wikipedia articles
LOOKED_AT = 1000  # texts, at most
SHIFTED = 'medquad'  # the set for the change of attention by fine-tuning


def repeat_texts(source, folder, length):
  """A folder with the queries and passages of another, each repeated until it has so many words."""
  if not folder.exists():
    with files.atomic_path(folder) as made:
      shutil.copytree(source, made)
      for path in (made / 'corpus.jsonl', made / 'queries.jsonl'):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        with path.open('w') as file:
          for row in rows:
            words = f'{row.pop("title", "")} {row["text"]}'.split()
            times = -(-length // max(1, len(words)))
            file.write(json.dumps(row | {'text': ' '.join(words * times)}) + '\n')
  return folder


def few_pairs(source, folder, count):
  """A folder of so many training pairs, by a hash of their rows, and all dev and test pairs."""
  if not (folder / 'test.jsonl').exists():
    folder.mkdir(parents=True, exist_ok=True)
    for split in ('train', 'dev', 'test'):
      pairs = sts.read_pairs(source / f'stsb-en-{split}.csv')
      if split == 'train':
        pairs = sorted(pairs, key=lambda pair: gain_sets.hashed('\n'.join(pair[:2])))[:count]
      with files.atomic_write(folder / f'{split}.jsonl') as file:
        for first, second, score in pairs:
          row = {'sentence1': first, 'sentence2': second, 'score': score}
          file.write(json.dumps(row) + '\n')
  return folder


def split_dump(dump, folder):
  """A folder of two dumps, train.xml.bz2 and test.xml.bz2, by a hash of page titles."""
  if not (folder / 'test.xml.bz2').exists():
    folder.mkdir(parents=True, exist_ok=True)
    whole = bz2.decompress(dump.read_bytes()).decode()
    head, tail = whole[: whole.index('<page>')], whole[whole.rindex('</page>') + len('</page>') :]
    pages = {'train': [], 'test': []}
    for page in re.findall(r'<page>.*?</page>', whole, re.DOTALL):
      title = re.search(r'<title>(.*?)</title>', page, re.DOTALL)[1]
      share = int.from_bytes(hashlib.sha256(title.encode()).digest()[:7]) / 2**56
      pages['test' if share < TESTED else 'train'].append(page)
    for split, some in pages.items():
      with files.atomic_write(folder / f'{split}.xml.bz2', 'wb') as file:
        file.write(bz2.compress(''.join((head, *some, tail)).encode()))
  return folder


def measure_pairs(folder, embed):
  """Spearman correlation of the test pairs, and the influence of each pair on it as 'scores'."""
  pairs = sts.read_pairs(folder / 'test.jsonl')
  first, second = (embed([pair[side] for pair in pairs]) for side in (0, 1))
  cosines, people = measures.cosine(first, second), np.array([pair.score for pair in pairs])
  values = spearman_values(cosines, people)
  return {'spearman': measures.spearman(cosines, people), 'scores': {'spearman': values}}


def measure_sections(folder, embed):
  """Whether an anchor is nearer to its own section, of triplets of articles that none has seen."""
  articles = mediawiki.read_articles(folder / 'test.xml.bz2')
  triplets, _ = sections.draw_triplets(articles, 0, most=LOOKED_AT)
  anchor, positive, negative = (embed([one[view] for one in triplets]) for view in range(3))
  near, far = (np.linalg.norm(anchor - other, axis=1) for other in (positive, negative))
  right = (near < far).astype(float)
  return {'accuracy': float(right.mean()), 'scores': {'accuracy': right}}
