"""Unified negative mining (DPTDR section 3.3) from beginning to end.

    dprjax pipeline --config=configs/unm.py:beir --workdir=runs/unm --config.data.dir=DIR

BM25 -> a first prompt -> mining -> a cross-encoder -> denoising -> a second prompt -> evaluation.
The argument is a recipe of configs/dptdr.py (`beir`, the default, `scifact`, `medquad`), then `ft`
for configs/ft.py instead (`unm.py:medquad,ft`), or `local`: minutes on a CPU, on docstrings.
`config.retriever` and `config.reranker` are experiments of dprjax.train:
`--config.retriever.optim.learning_rate=3e-3`.
"""

import pathlib

import ml_collections

from dprjax.training import config as defaults


def get_config(arg: str = 'beir'):
  recipe, *rest = (arg or 'beir').split(',')
  retriever, local = ('ft' if 'ft' in rest else 'dptdr'), 'local' in (recipe, *rest)
  if unknown := set(rest) - {'ft', 'local'}:
    raise ValueError(
      f'configs/unm.py:{arg}: {", ".join(sorted(unknown))}? only ft and local may follow {recipe}'
    )
  # Both sides: the query-only recipe has the whole corpus as negatives, not mined ones.
  both = [] if retriever == 'ft' else ['both']
  within = ','.join(dict.fromkeys([recipe, *both, *(['local'] if local else [])]))
  c = ml_collections.ConfigDict()
  c.method = 'unm'
  c.seed = 42  # of every stage
  c.data = ml_collections.ConfigDict()
  # a BEIR folder with a train and a test split; 'docstrings:json,email' for those of some packages
  c.data.dir = ''
  c.data.train_split, c.data.test_split = 'train', 'test'
  # The stages that train: a config file of dprjax.train, and its options.
  c.retriever_recipe = f'{pathlib.Path(__file__).with_name(retriever)}.py:{within}'
  c.retriever = defaults.sibling(__file__, retriever).get_config(within)
  c.retriever.eval.choose = False  # the last table compares
  c.reranker_recipe = (
    f'{pathlib.Path(__file__).with_name("cross_encoder")}.py:{"local" if local else "beir"}'
  )
  c.reranker = defaults.sibling(__file__, 'cross_encoder').get_config('local' if local else 'beir')
  # its sigmoid is a probability, as the threshold wants; listwise scores have no zero
  c.reranker.cross_encoder.loss = 'pointwise'
  c.reranker_path = ''  # a cross-encoder that is there already, in place of one trained here
  c.depth = 200  # rows of each run that are looked at for a query
  c.sample = 30  # of each source, for a query
  c.threshold = 0.1  # candidates with a lower reranker probability are denoised
  # Negatives of the last training; the paper names the sources and no shares.
  c.mix = ml_collections.ConfigDict({'denoised': 0.5, 'undenoised': 0.5, 'random': 0.0})
  # also train on only the un-denoised negatives of the first round (row 2 of Table 9)
  c.undenoised = True
  c.measures = ('nDCG@10', 'RR@10', 'R@100')

  c.retriever.negatives = max(c.retriever.negatives, 1)
  if recipe in ('scifact', 'medquad'):
    c.data.dir = c.retriever.data.dir
    c.reranker.data.query_max_length = c.retriever.data.query_max_length
    c.reranker.data.passage_max_length = c.retriever.data.passage_max_length
  if local:
    c.data.dir = f'docstrings:{c.retriever.data.dir}'
    c.depth, c.sample = 20, 4
    c.threshold = 0.9  # a reranker after so little training is never certain
  return c
