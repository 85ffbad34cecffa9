"""Sentence splitters that need no download: precision, recall and speed.

    pip install -e '.[bench]' && python benchmarks/sentences.py [--data=DIR]

There are three texts:

- `hard`: the sentences of HARD joined by spaces
- `arxiv`: 100 abstracts of arxiv/arxiv_sample.jsonl.xz; an end is right if all four splitters find
  it or if it is in JUDGED (by hand, for the versions in docs/pretraining.md)
- `brown`: every fifth file of the Brown corpus in NLTK, detokenised; ends without punctuation (of
  headings) are optional

Speed is measured on the first 300 abstracts.
"""

import json
import lzma
import os
import pathlib
import random
import re
import time
import zipfile
from collections.abc import Callable, Iterator

import blingfire
import pysbd
import sentencex
import syntok.segmenter

import options

HARD = [
  ['Dr. Smith et al. (2019) found no effect.', 'Prof. Jones disagreed.'],
  ['The result of Miller et al. is shown in Fig. 3.', 'It rose by 3.5 % in Sec. 2.1.'],
  ['See Eq. (4), Table 2 and Refs. 12-14 for details.', 'The others follow.'],
  ['We use priors, e.g. Gaussians, i.e. normal laws.', 'Cf. Theorem 2.'],
  ['The value is approx. 0.05 vs. 0.07 for the baseline.', 'No. 5 was best.'],
  [
    'The code is at https://example.org/a.b/c.html?x=1.2 and was tested.',
    'Write to j.doe@mail.example.com for more.',
  ],
  ['J. R. R. Tolkien wrote it.', 'G. W. Bush did not.'],
  ['He works at Acme Inc. in the U.S. and travels a lot.', 'She lives in the U.K. too.'],
  ['"Is it true?" he asked.', '"No!" she said.', 'They left.'],
  ['She said, "We are done."', 'Nobody answered.'],
  ['The drug was given at 8 a.m. and again at 5 p.m. on both days.', 'Doses were 2.5 mg.'],
  ['It happened on Jan. 5, 2020, in St. Louis.', 'Mr. and Mrs. Brown were there.'],
  ['The species E. coli and S. aureus were grown.', 'Both survived.'],
  ['Wait... what is that?', 'I do not know!', 'Run.'],
  ['Python 3.11 and version 2.0.1 were used.', 'Files named a.txt were skipped.'],
  ['The proof (see App. A. of the paper) is short.', 'It uses induction.'],
  ['The method works (cf. Lee et al., 2019).', '(A proof is given below.)', 'It scales.'],
  ['Let x be in R.', 'Then f(x) is in R as well.'],
  ['Yahoo! Inc. was sold.', 'Who bought it?', 'Verizon.'],
  ['The 3rd ed. has 400 pp. of text and 12 figs. in colour.', 'Vol. 2 is out of print.'],
]
# Right ends in the abstracts that not all four splitters find, as character offsets.
JUDGED = {
  '1503.03255': [190],
  '1511.03055': [842],
  '1305.1899': [393],
  '1805.04002': [1425],
  '1603.08232': [1670],
  '1710.08045': [1123],
  '1706.02565': [219],
  '1807.02715': [253, 314, 536, 593],
  '1712.0945399999998': [135, 246],
}

Ends = set[int]


def main() -> None:
  parser = options.parser(__doc__)
  parser.add_argument(
    '--data',
    default=os.environ.get('DPRJAX_DATA'),
    help='a folder that holds arxiv/ and text/nltk/ (default: $DPRJAX_DATA)',
  )
  args = parser.parse_args()
  if not args.data:
    parser.error('no data: pass --data=DIR')
  folder = pathlib.Path(args.data)
  with lzma.open(folder / 'arxiv' / 'arxiv_sample.jsonl.xz', 'rt', encoding='utf-8') as file:
    papers = [json.loads(line) for line in file]
  splitters = make_splitters()
  texts = {
    'hard': [joined(sentences) for sentences in HARD],
    'arxiv': judged(papers, splitters),
    'brown': list(brown(folder / 'text' / 'nltk' / 'brown.zip')),
  }
  print(
    f'{"":10}'
    + ''.join(f'{name + " P":>10}{name + " R":>10}' for name in texts)
    + f'{"us/text":>10}'
  )
  for name, split in splitters.items():
    cells = [f'{value:10.3f}' for cases in texts.values() for value in scores(cases, split)]
    began = time.perf_counter()
    for paper in papers[:300]:
      split(paper['abstract'])
    print(
      f'{name:10}' + ''.join(cells) + f'{(time.perf_counter() - began) / 300 * 1e6:10,.0f}',
      flush=True,
    )


def make_splitters() -> dict[str, Callable[[str], Ends]]:
  rules = pysbd.Segmenter(language='en', clean=False, char_span=True)

  def syntok_ends(text: str) -> Iterator[int]:
    for paragraph in syntok.segmenter.analyze(text):
      for sentence in paragraph:
        *_, last = sentence
        yield last.offset + len(last.value)

  return {
    'sentencex': lambda text: inner(
      text, (span['end_index'] for span in sentencex.get_sentence_boundaries('en', text))
    ),
    'pysbd': lambda text: inner(text, (span.end for span in rules.segment(text))),
    'blingfire': lambda text: inner(
      text, (end for _, end in blingfire.text_to_sentences_and_offsets(text)[1])
    ),
    'syntok': lambda text: inner(text, syntok_ends(text)),
  }


def inner(text: str, ends: Iterator[int]) -> Ends:
  """Ends without the white space that follows them, and without the end of the text."""
  return {place for end in ends if 0 < (place := len(text[:end].rstrip())) < len(text.rstrip())}


def joined(sentences: list[str]) -> tuple[str, Ends, Ends]:
  """(text, its ends, those that must be found)."""
  text, ends = '', set()
  for sentence in sentences:
    text = f'{text} {sentence}' if text else sentence
    ends.add(len(text))
  ends.discard(len(text))
  return text, ends, {end for end in ends if re.search(r'[.?!]["\')\]]*$', text[:end])}


def judged(
  papers: list[dict[str, str]], splitters: dict[str, Callable[[str], Ends]]
) -> list[tuple[str, Ends, Ends]]:
  cases = []
  for paper in random.Random(0).sample(papers, 100):
    ends = set.intersection(*(split(paper['abstract']) for split in splitters.values())) | set(
      JUDGED.get(paper['id'], ())
    )
    cases.append((paper['abstract'], ends, ends))
  return cases


def brown(path: pathlib.Path) -> Iterator[tuple[str, Ends, Ends]]:
  with zipfile.ZipFile(path) as archive:
    names = sorted(name for name in archive.namelist() if re.search(r'/c[a-r]\d\d$', name))
    for name in names[::5]:
      lines = archive.read(name).decode('ascii').splitlines()
      yield joined([together(line.split()) for line in lines if line.strip()])


def together(tokens: list[str]) -> str:
  """A tagged sentence of Brown almost as printed: from `word/tag` with quotes as `` and ''."""
  text = ' '.join(token.rpartition('/')[0] for token in tokens)
  text = re.sub(r"(?<=\S) (?=([,.;:?!)]|'')( |$))", '', text)
  return (
    re.sub(r"``|''", '"', re.sub(r'(``|\() ', r'\1', text))
    .replace(';;', ';')
    .replace('??', '?')
    .replace('!!', '!')
  )


def scores(
  cases: list[tuple[str, Ends, Ends]], split: Callable[[str], Ends]
) -> tuple[float, float]:
  """Precision and recall of the ends."""
  found = [(split(text), ends, wanted) for text, ends, wanted in cases]
  right = sum(len(got & ends) for got, ends, _ in found)
  right_wanted = sum(len(got & wanted) for got, _, wanted in found)
  precision = right / sum(len(got) for got, _, _ in found)
  return precision, right_wanted / sum(len(wanted) for _, _, wanted in found)


if __name__ == '__main__':
  main()
