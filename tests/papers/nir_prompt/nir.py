"""The two methods of NIR-Prompt in plain numpy, float64, an example at a time."""

import jax
import numpy as np

from dprjax.base import tree
from dprjax.models import heads, scratch
from dprjax.models.artifact import Prompt, save_prompt
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.head_specs import Head
from dprjax.papers.nir_prompt import options
from dprjax.papers.nir_prompt.task_templates import FORMS
from dprjax.training.method import Parts
from tests import gradients, reference
from tests.models.test_artifact import META
from tests.options import with_options

SHA = 'a' * 64
WORDS = {
  'query': ('oak elm', 'ash'),
  'passage': ('fir', 'yew oak ash'),
  'pair': ('oak', 'elm fir', 'ash yew'),
}


def shape_of(tokenizer):
  return EncoderConfig(
    'bert', tokenizer.vocab_size, 8, 3, 2, 16, max_positions=40, attention_dropout=0.0
  )


def make_parts(model):
  """A backbone and a masked-LM head with weights that matter."""
  rng = np.random.default_rng(2)

  def draw(init):
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: (0.4 * rng.standard_normal(leaf.shape) + (path[-1].key == 'scale')).astype(
        np.float32
      ),
      jax.eval_shape(lambda key: init(model, key), jax.random.key(0)),
    )

  head = Head(draw(heads.init_mlm_head), {})
  return Parts(draw(scratch.init_encoder), {'mlm': head}, sha256=SHA)


def make_config(method, tasks=('dialogue', 'qa'), **changes):
  config = with_options(
    **{
      'method': method,
      'trainable': ('prompt/.*', 'backbone/.*'),
      'backbone__dropout': 0.0,
      'backbone__path': 'BACKBONE',
      'pooling': 'mask',
      'batch_size': 16,
      'template__lengths': (2, 2, 2),
      'template__verbalizer': ('oak', 'elm'),
      'data__query_max_length': 7,
      'data__passage_max_length': 9,
    }
    | changes
  )
  for name in tasks:
    config.tasks[name] = options.task(dir='x')
    config.tasks[name].words.update(WORDS)
  return config


def write_prompt(path, model, tokenizer, config, kinds, lengths=None, seed=0, **change):
  """A prompt file of learned vectors; returns its arrays by ``query/P1`` and its like."""
  rng = np.random.default_rng(seed)
  lengths = lengths or config.template.lengths
  names = {
    'query': ('P1', 'P2'),
    'passage': ('P1', 'P2'),
    'pair': ('P1', 'P2', 'P3'),
  }
  arrays = {
    f'{kind}/{name}': 0.5 * rng.standard_normal((length, model.hidden_size)).astype(np.float32)
    for kind in kinds
    for name, length in zip(names[kind], lengths, strict=False)
  }
  own = {
    'kind': 'template',
    'backbone': 'BACKBONE',
    'backbone_sha256': SHA,
    'tokenizer_sha256': tokenizer.sha256,
    'pooling': 'mask',
    'normalize': False,
    'query_max_length': 7,
    'passage_max_length': 9,
    'template': {kind: FORMS[kind] for kind in kinds},
    'words': {},
    'fixed_layers': 2,
    'verbalizer': ['oak', 'elm'],
    'score': 'logit',
    'head_sha256': 'b' * 64,
  }
  meta = {name: value for name, value in META.items() if name != 'task'} | own | change
  save_prompt(path, Prompt(meta, {f'slots/{name}': array for name, array in arrays.items()}))
  return arrays


def texts(rng, rows, longest, length, tokenizer, words):
  """Stored texts, ``[CLS] text [SEP]`` padded to ``length``; [MASK] is a word of some."""
  ids = [tokenizer.encode([word], 8)[0][0][1] for word in words] + [tokenizer.mask_id]
  tokens = np.full((rows, length), tokenizer.pad_id, np.int32)
  mask = np.zeros((rows, length), bool)
  for row in range(rows):
    count = rng.integers(0, longest + 1)
    tokens[row, : count + 2] = [tokenizer.opening[0], *rng.choice(ids, count), tokenizer.closing[0]]
    mask[row, : count + 2] = True
  return tokens, mask


def expand(config, params, task, name):
  """The words or the vectors of a slot in float64; ``params`` is the tree."""
  kind, slot = name.split('/')
  own = params['prompt'][task]
  if 'weights' in own:
    several = params['sources'].values()
    return sum(
      weight * source[kind][slot] for weight, source in zip(own['weights'], several, strict=True)
    )
  leaf = own[kind][slot]
  return leaf['vectors'] if 'vectors' in leaf else reference.prompt_encoder(leaf)


def slot(config, params, tokenizer, task, name):
  """P1, P2 or P3 of a task: word ids, or vectors."""
  kind, number = name.split('/')[0], int(name[-1]) - 1
  if config.template.kind == 'none':
    return []
  if config.template.kind == 'hybrid' and name == 'pair/P3':
    return tokenizer.encode_bare(['Do these two sentences match?']).popitem()[1].tolist()
  if config.template.kind == 'manual':
    return tokenizer.encode_bare([WORDS[kind][number]]).popitem()[1].tolist()
  return list(expand(config, params, task, name))


def bare(tokens, mask):
  return tokens[1 : mask.sum() - 1].tolist()


def value_and_gradient(build, config, model, tokenizer, parts, batch, sizes):
  """The flat parameters, the loss, its metrics, and gradients of trainable parameters."""
  mesh = gradients.make_mesh(sizes)
  method = build(config, model, mesh, tokenizer)
  made = tree.flatten(method.init(parts, jax.random.key(3)))
  params = {name: np.asarray(leaf) for name, leaf in made.items()}
  return params, *gradients.value_and_gradient(method, params, config.trainable, mesh, batch)


def assert_slope(loss, params, gradient):
  gradients.assert_slope(loss, params, gradient, 2e-4)
