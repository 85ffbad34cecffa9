"""Finding topics by documents and sweeps, and the topic of a text from its words.

    python benchmarks/topics.py --input=../shared/data/arxiv/arxiv_sample.jsonl.xz
        [--documents=3000] [--sweeps=200] [--topics=5]

Runs hLDA on a growing number of documents, then on all with a growing number of sweeps, with LDA
beside it. Each row has the seconds, the number of topics under the root and of those with a
fifteenth of the documents or more, the share of the largest topic, and the share of documents for
which inference from words gives the topic that the method assigned. The last rows are titles and
abstracts a second whose topic is inferred. Writes benchmarks/results/topics-DEVICE.json. A training
step under topics is in topic_step.py.
"""

import time
from typing import Any

import numpy as np
import tomotopy

import options
import record
from dprjax.base.hashes import draw
from dprjax.papers.topic_dpr import topic_models
from dprjax.papers.topic_dpr.papers import read_papers


def main() -> None:
  parser = options.parser(__doc__, documents=3000, sweeps=200, topics=5)
  parser.add_argument('--input', required=True, help='papers: an arXiv jsonl')
  args = parser.parse_args()
  papers = sorted(
    (paper for paper in read_papers(args.input) if paper.passage), key=lambda p: draw(p.id, 0, '')
  )[: args.documents]
  texts = [paper.passage for paper in papers]
  grown = [(len(texts) * part // 6, args.sweeps) for part in (1, 2, 4, 6)]
  longer = [(len(texts), args.sweeps * part // 4) for part in (1, 2)]
  wanted = [('hlda', *case) for case in (*grown, *longer)] + [('lda', len(texts), args.sweeps)]
  columns = ('seconds', 'topics', 'of a fifteenth', 'largest', 'agreement')
  print(
    f'{"kind":>6} {"documents":>9} {"sweeps":>6} ' + ' '.join(f'{name:>14}' for name in columns)
  )
  cases: dict[str, Any] = {}
  made = None
  for kind, count, sweeps in wanted:
    began = time.perf_counter()
    # Fewer documents may have fewer topics than are kept in the end.
    settings = topic_models.TopicSettings(kind, topics=args.topics if count == len(texts) else 2)
    fitted = topic_models.fit(texts[:count], settings._replace(sweeps=sweeps))
    seconds = time.perf_counter() - began
    sizes = np.array(fitted.all_sizes)
    values = (
      round(seconds, 1),
      len(sizes),
      int(np.count_nonzero(15 * sizes >= count)),
      round(float(sizes[0] / count), 3),
      round(fitted.agreement, 3),
    )
    cases[f'{kind}, {count} documents, {sweeps} sweeps'] = dict(zip(columns, values, strict=True))
    print(f'{kind:>6} {count:>9} {sweeps:>6} ' + ' '.join(f'{v:>14}' for v in values), flush=True)
    if (kind, count, sweeps) == ('hlda', *grown[-1]):
      made = fitted.topics
  assert made is not None
  for name, given in (('titles', [paper.title for paper in papers]), ('abstracts', texts)):
    began = time.perf_counter()
    made.assign(given)
    rate = round(len(given) / (time.perf_counter() - began))
    cases[f'infer {name}'] = {'texts a second': rate}
    print(f'{name}: {rate:,} topics a second')
  settings_given = {name: value for name, value in vars(args).items() if name != 'input'}
  record.write(
    'topics',
    cases,
    settings_given | {'input': args.input.rpartition('/')[2]},
    {'tomotopy': tomotopy.__version__, 'numpy': np.__version__, 'isa': tomotopy.isa},
  )


if __name__ == '__main__':
  main()
