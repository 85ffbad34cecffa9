"""Training files with mined negatives, for the experiments."""

import trials

DEPTH = 100  # passages of a query that a retriever ranks first


def mine(folder, qrels, runs, out, *flags):
  """A training file for the queries of a BEIR folder that are judged in a file, unless it is there.

  Args:
    folder: of the setting.
    qrels: the file.
    runs: flags of `dprjax.mine` that name the runs of retrievers.
    out: the file that is made.
    flags: more of them.
  """
  if out.exists():
    return
  out.parent.mkdir(parents=True, exist_ok=True)
  given = (f'--{kind}={folder}/{kind}.jsonl' for kind in ('queries', 'corpus'))
  settings = (f'--depth={DEPTH}', '--seed=0', '--texts=false', f'--qrels={qrels}')
  trials.command('mine', *given, *settings, *runs, f'--out={out}', *flags)


def words(folder, out):
  """The BM25 run of the training queries, unless it is there."""
  if not out.exists():
    out.parent.mkdir(parents=True, exist_ok=True)
    given = (f'--{kind}={folder}/{kind}.jsonl' for kind in ('queries', 'corpus'))
    qrels = f'--qrels={folder}/qrels/train.tsv'
    trials.command('bm25', *given, qrels, f'--k={DEPTH}', f'--out={out}')
  return out
