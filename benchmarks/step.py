"""A training step of DPT, LoRA and FT: dprjax, PyTorch, and the trainer of sentence-transformers.

    pip install -e '.[bench]' && python benchmarks/step.py [--size=minilm] [--queries=8]
        [--prompt=16] [--rank=8] [--runs=5] [--variant=backbone.unroll=0]

All have the same weights and batch. A step encodes queries and passages, computes the in-batch
contrastive loss of their cosines over 0.05 and its gradient (of the prompt, of LoRA on queries and
values, or of all weights), clips it and applies AdamW.

- dprjax takes the update of train.py.
- PyTorch is written as users of transformers do: the prompt as past_key_values, LoRA as modules
  around the linear ones, SDPA, on a GPU
  bfloat16 autocast and fused AdamW. It runs plain and, if possible, under torch.compile; for DPT on
  a GPU also with frozen weights in bfloat16.
- sentence-transformers has no such prompts: its trainer with MultipleNegativesRankingLoss is
  measured for FT, with all of its loop, on ready-made tokens.

Before anything is timed, all losses must agree in float32 (1e-4), and so must the loss and the
gradient norm of the first steps, as far as the precision allows.

--dropout=0.1 measures steps of dprjax and PyTorch with dropout in the encoder, as most recipes have
it. Their first steps cannot agree then. The file is step_SIZE-dropout-DEVICE.json.

--variant also measures dprjax with other options (KEY=VALUE, separated by commas); with
backbone.dtype=mixed among them, PyTorch under bfloat16 autocast too. On a GPU,
--size=large, --prompt=128 and 128 tokens are the defaults. Writes
benchmarks/results/step_SIZE-DEVICE.json; ratios are to plain PyTorch (above 1: slower).
"""

import argparse
import contextlib
import functools
import gc
import logging
import pathlib
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import limit
import made
import options
import record
import roofline
import timing
import updates
from dprjax.base import flags, tree
from dprjax.text.vector_spec import same_length
from dprjax.training import dpr
from dprjax.training.method import Parts

TEMPERATURE, CLIP, LEARNING_RATE, ALPHA = 0.05, 1.0, 1e-5, 16.0


def main() -> None:
  accelerated = options.accelerated()
  parser = options.parser(
    __doc__,
    queries=(8, 64),
    query_length=32,
    passage_length=128,
    candidates=1,
    prompt=(16, 128),
    rank=8,
    runs=(5, 7),
    steps=(1, 5),
  )
  options.add_size(parser)
  options.add_dtype(parser)
  parser.add_argument(
    '--shortest',
    type=float,
    default=0.5,
    help='least length of a text, as a fraction of the padded length (default: 0.5)',
  )
  parser.add_argument(
    '--dropout', type=float, default=0.0, help='of hidden states and attention (default: none)'
  )
  parser.add_argument(
    '--methods', default='DPT,LoRA,FT', help='some of DPT, LoRA, FT (default: all)'
  )
  parser.add_argument(
    '--variant',
    action='append',
    default=[],
    metavar='KEY=VALUE,...',
    help='dprjax once more, with these options',
  )
  parser.add_argument(
    '--compile',
    type=flags.boolean,
    default=True,
    metavar='true|false',
    help='torch.compile as well',
  )
  args = parser.parse_args()
  device = torch.device('cuda' if accelerated else 'cpu')
  if accelerated and not torch.cuda.is_available():
    parser.error(
      'JAX has an accelerator and PyTorch has none: install PyTorch with CUDA, or set '
      'JAX_PLATFORMS=cpu'
    )
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()

  model = made.SHAPES[args.size]
  params = updates.parameters(model)
  batch = made.batch(
    model, args.queries, args.query_length, args.passage_length, args.candidates, args.shortest
  )
  rng = np.random.default_rng(1)
  trained = {
    'DPT': {
      'prefix': _normal(rng, model.num_layers, 2, args.prompt, model.num_heads, model.head_dim)
    },
    'LoRA': {
      f'attention/{name}/{half}': _normal(rng, model.num_layers, *shape)
      for name in ('query', 'value')
      for half, shape in (
        ('a', (model.hidden_size, args.rank)),
        ('b', (args.rank, model.hidden_size)),
      )
    },
    'FT': None,
  }
  cases: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as scratch:
    folder = made.backbone_folder(
      pathlib.Path(scratch) / 'model',
      model,
      same_length(model.max_tokens, pooling='mean', normalize=True),
    )
    for method in args.methods.split(','):
      cases[method] = compare(args, method, model, params, trained[method], batch, folder, device)
  versions = {
    name: module.__version__ for name, module in (('torch', torch), ('transformers', transformers))
  }
  name = f'step_{args.size}-dropout' if args.dropout else f'step_{args.size}'
  record.write_jax(name, cases, vars(args), versions)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return 0.02 * rng.standard_normal(shape, np.float32)


def _length(args: argparse.Namespace, method: str) -> int:
  return {'DPT': args.prompt, 'LoRA': args.rank, 'FT': 0}[method]


def compare(
  args: argparse.Namespace,
  method: str,
  model: Any,
  params: Any,
  prompt: Mapping[str, np.ndarray] | None,
  batch: Any,
  folder: pathlib.Path,
  device: torch.device,
) -> dict[str, Any]:
  """Checks and measures all systems with one method."""
  found = our_loss(args, method, model, params, prompt, batch)
  with torch.no_grad():
    expected = Torch(folder, prompt, batch, device, 'float32').loss().item()
  assert np.isclose(found, expected, rtol=1e-4), (
    f'{method}: the loss is {found} by dprjax, {expected} by PyTorch'
  )
  print(f'{method}: loss {found:.6f} by dprjax, {expected:.6f} by PyTorch', flush=True)

  torch_step = functools.partial(Torch, folder, prompt, batch, device, dropout=args.dropout)
  ways: dict[str, Any] = {'PyTorch': torch_step(args.dtype)}
  if method == 'DPT' and args.dtype == 'bfloat16':
    ways['PyTorch, bfloat16 weights'] = torch_step(args.dtype, held='bfloat16')
  if args.dtype == 'float32' and any('=mixed' in variant for variant in args.variant):
    # The peer of products of rounded factors.
    ways['PyTorch, autocast'] = torch_step('bfloat16')
    if args.compile:
      ways['PyTorch, autocast, compiled'] = torch_step('bfloat16', compiled=True)
  if args.compile:
    ways['PyTorch, compiled'] = torch_step(args.dtype, compiled=True)
  if (
    method == 'FT'
    and not args.dropout
    and (trainer := SentenceTransformers.make(folder, batch, device, args.dtype))
  ):
    ways['sentence-transformers'] = trainer
  for overrides in ('', *args.variant):
    plain = [
      f'optim.learning_rate={LEARNING_RATE}',
      'optim.warmup=0',
      'optim.decay=none',
      'optim.weight_decay=0',
      f'backbone.dropout={args.dropout}',
    ]
    settings = updates.options(
      method, _length(args, method), args.dtype, [*plain, *filter(None, overrides.split(','))]
    )
    ways[f'dprjax, {overrides}' if overrides else 'dprjax'] = ours(
      settings, model, params, prompt, batch
    )

  cases: dict[str, Any] = {}
  norm = None
  for name in list(ways):
    try:
      loss, norm_here = ways[name].first_step()
    except Exception as error:  # torch.compile fails in as many ways as it has parts
      if not name.endswith('compiled'):
        raise
      print(f'torch.compile does not run here: {" ".join(str(error).split())[:200]}', flush=True)
      del ways[name]
      continue
    if args.dropout:
      continue
    norm = norm_here if norm is None else norm
    rough = args.dtype == 'bfloat16' or 'autocast' in name or '=mixed' in name
    assert np.isclose(loss, expected, rtol=2e-2 if rough else 1e-4), (
      f'{method}: the loss is {loss} by {name}, {expected} by PyTorch in float32'
    )
    assert np.isclose(norm_here, norm, rtol=5e-2 if rough else 1e-3), (
      f'{method}: the gradient norm is {norm_here} by {name}, {norm} by PyTorch'
    )
  if not args.dropout:
    print(
      f'{method}: all {len(ways)} agree on loss and gradient norm of the first step ({norm:.4g})',
      flush=True,
    )

  seconds = timing.take_turns(
    {name: lambda way=way: way(args.steps) for name, way in ways.items()}, args.runs
  )
  cases = timing.summary(seconds, 'PyTorch', args.steps)
  rows = [(args.queries, args.query_length), (args.queries * args.candidates, args.passage_length)]
  # LoRA costs an update without gradients of weights; its own products are below a percent.
  kind, length = ('DPT', 0) if method == 'LoRA' else (method, _length(args, method))
  must = roofline.cost(model, kind, rows, length, jnp.dtype(args.dtype).itemsize).flops
  peak = limit.peak(args.dtype)
  for name, case in cases.items():
    case['gflop_a_second'] = round(must / case['milliseconds'] / 1e6, 1)
    case['queries_a_second'] = round(args.queries / case['milliseconds'] * 1e3, 1)
    if peak:
      case['mfu'] = round(1e9 * case['gflop_a_second'] / peak[0], 3)
    if (memory := ways[name].memory_mib) is not None:
      case['memory_mib'] = memory
  timing.show(
    cases,
    ['milliseconds', 'fastest_and_slowest', 'ratio', 'gflop_a_second', 'mfu', 'memory_mib'],
    f'{method}, {args.size}',
  )
  for way in ways.values():
    if isinstance(way, SentenceTransformers):
      way.close()
  ways.clear()
  gc.collect()  # the systems of the next method need the memory
  torch.cuda.empty_cache()
  return cases


def our_loss(
  args: argparse.Namespace,
  method: str,
  model: Any,
  params: Any,
  prompt: Mapping[str, np.ndarray] | None,
  batch: Any,
) -> float:
  """The loss of dprjax, in float32."""
  settings = updates.options(method, _length(args, method), 'float32')
  system = dpr.build(settings, model, updates.one_device())
  tensors = {'backbone': params} | ({} if prompt is None else {'prompt': tree.unflatten(prompt)})
  # By default, float32 products on a GPU have the precision of tf32.
  with jax.default_matmul_precision('highest'):
    return float(
      jax.jit(lambda tensors, batch: system.loss(tensors, batch, None)[0])(
        jax.device_put(tensors), batch
      )
    )


def ours(
  settings: Any, model: Any, params: Any, prompt: Mapping[str, np.ndarray] | None, batch: Any
) -> updates.Update:
  system = dpr.build(settings, model, updates.one_device())

  def init(parts: Parts, key: jax.Array) -> dict[str, Any]:
    start = system.init(parts, key)
    if prompt is not None:
      assert tree.flatten(start['prompt']).keys() == prompt.keys(), (
        'the prompt of a variant has other parameters than that of PyTorch'
      )
      start['prompt'] = tree.unflatten(prompt)
    return start

  return updates.Update(settings, system._replace(init=init), Parts(params), batch)


class Lora(torch.nn.Module):
  """A linear module with a change of low rank."""

  def __init__(self, linear: torch.nn.Module, a: torch.Tensor, b: torch.Tensor, scale: float):
    super().__init__()
    self._linear, self._scale = linear, scale
    self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self._linear(x) + self._scale * (x @ self.a @ self.b)


class Torch:
  """A step as a user of transformers writes it: of ``prompt`` or, without one, of all weights."""

  def __init__(
    self,
    folder: pathlib.Path,
    prompt: Mapping[str, np.ndarray] | None,
    batch: Mapping[str, np.ndarray],
    device: torch.device,
    dtype: str,
    *,
    held: str = 'float32',
    compiled: bool = False,
    dropout: float = 0.0,
  ):
    self._device, self._autocast = device, dtype == 'bfloat16'
    net = transformers.AutoModel.from_pretrained(
      folder,
      trust_remote_code=False,
      attn_implementation='sdpa',
      add_pooling_layer=False,
      dtype=getattr(torch, held),
      hidden_dropout_prob=dropout,
      attention_probs_dropout_prob=dropout,
    )
    net.to(device).train()
    self._prompt = None
    if prompt is not None:
      net.requires_grad_(False)
    if prompt is not None and 'prefix' in prompt:
      self._prompt = torch.tensor(prompt['prefix'], device=device, requires_grad=True)
    elif prompt is not None:
      for number, layer in enumerate(net.encoder.layer):
        for name in ('query', 'value'):
          a, b = (
            torch.tensor(prompt[f'attention/{name}/{half}'][number], device=device) for half in 'ab'
          )
          wrapped = Lora(getattr(layer.attention.self, name), a, b, ALPHA / a.shape[1])
          setattr(layer.attention.self, name, wrapped)
    self._trained = [one for one in net.parameters() if one.requires_grad]
    if self._prompt is not None:  # [L, 2, P, N, D]
      self._trained = [self._prompt]
    self._roberta = net.config.model_type != 'bert'
    self._padding = net.config.pad_token_id
    self._net = torch.compile(net, dynamic=False) if compiled else net
    self._optimizer = torch.optim.AdamW(
      self._trained, lr=LEARNING_RATE, weight_decay=0.0, fused=device.type == 'cuda'
    )
    self._texts = {}
    for side in ('query', 'passage'):
      tokens, mask = (
        torch.tensor(rows.reshape(-1, rows.shape[-1])).to(device, torch.long)
        for rows in (batch[f'{side}_tokens'], batch[f'{side}_mask'])
      )
      self._texts[side] = tokens, mask
    queries, candidates = batch['passage_index'].shape
    self._target = torch.arange(queries, device=device) * candidates
    self.memory_mib: float | None = None

  def _embed(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if self._roberta:
      positions = torch.cumsum(mask, 1) * mask + self._padding
    else:
      positions = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
    seen, past = mask, {}
    if self._prompt is not None:
      prefix = self._prompt.to(torch.bfloat16) if self._autocast else self._prompt
      pairs = [
        tuple(one.permute(1, 0, 2).expand(len(tokens), -1, -1, -1) for one in layer)
        for layer in prefix
      ]
      seen = torch.cat([mask.new_ones(len(tokens), self._prompt.shape[2]), mask], 1)
      past = {'past_key_values': transformers.DynamicCache(pairs)}
    hidden = self._net(
      input_ids=tokens, attention_mask=seen, position_ids=positions, **past
    ).last_hidden_state.float()
    pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(pooled, dim=1)

  def loss(self) -> torch.Tensor:
    autocast = (
      torch.autocast(self._device.type, torch.bfloat16)
      if self._autocast
      else contextlib.nullcontext()
    )
    with autocast:
      q, p = (self._embed(*self._texts[side]) for side in ('query', 'passage'))
    return torch.nn.functional.cross_entropy(q @ p.T / TEMPERATURE, self._target)

  def first_step(self) -> tuple[float, float]:
    """Loss and norm of the gradient."""
    on_gpu = self._device.type == 'cuda'
    if on_gpu:
      before = torch.cuda.memory_allocated()
      torch.cuda.reset_peak_memory_stats()
    found = self._step()
    if on_gpu:
      torch.cuda.synchronize()
      held = sum(one.nbytes for one in self._net.parameters())
      self.memory_mib = round((torch.cuda.max_memory_allocated() - before + held) / 2**20, 1)
    return found[0].item(), found[1].item()

  def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
    loss = self.loss()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(self._trained, CLIP)
    self._optimizer.step()
    self._optimizer.zero_grad()
    return loss.detach(), norm

  def __call__(self, steps: int) -> None:
    for _ in range(steps):
      self._step()
    if self._device.type == 'cuda':
      torch.cuda.synchronize()


class SentenceTransformers:
  """The loop of SentenceTransformerTrainer in a thread, which waits after the requested steps."""

  memory_mib = None

  @classmethod
  def make(cls, *arguments: Any) -> 'SentenceTransformers | None':
    """None, with a line that says why, if the trainer or a package for it is not installed."""
    try:
      import accelerate  # noqa: F401
      import datasets  # noqa: F401
      import sentence_transformers  # noqa: F401
    except ImportError as error:
      print(f'the trainer of sentence-transformers is left out: {error}', flush=True)
      return None
    return cls(*arguments)

  def __init__(
    self, folder: pathlib.Path, batch: Mapping[str, np.ndarray], device: torch.device, dtype: str
  ):
    import datasets
    import sentence_transformers
    from sentence_transformers.sentence_transformer import data_collator, losses

    logging.getLogger('sentence_transformers').setLevel(logging.ERROR)
    queries, candidates = batch['passage_index'].shape
    features = {'anchor': (batch['query_tokens'], batch['query_mask'])}
    features |= {
      f'passage{i}': (batch['passage_tokens'][:, i], batch['passage_mask'][:, i])
      for i in range(candidates)
    }
    tokens = {
      f'{name}_{key}': torch.tensor(rows.astype(np.int64))
      for name, pair in features.items()
      for key, rows in zip(('input_ids', 'attention_mask'), pair, strict=True)
    }
    # More than will be requested, in one epoch, so that no step includes the end of an epoch.
    steps = 10_000
    # The content of the rows is not used: the collator has the tokens.
    rows = datasets.Dataset.from_dict({name: ['-'] * (queries * steps) for name in features})
    settings = sentence_transformers.SentenceTransformerTrainingArguments(
      output_dir=str(folder.with_name('trainer')),
      per_device_train_batch_size=queries,
      max_steps=steps,
      learning_rate=LEARNING_RATE,
      lr_scheduler_type='constant',
      weight_decay=0.0,
      max_grad_norm=CLIP,
      bf16=dtype == 'bfloat16',
      use_cpu=device.type == 'cpu',
      report_to='none',
      save_strategy='no',
      logging_strategy='no',
      disable_tqdm=True,
    )
    net = sentence_transformers.SentenceTransformer(
      str(folder), device=str(device), trust_remote_code=False
    )
    self._left, self._leave, self._error = 0, False, None
    self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
    holder = self

    class Turns(transformers.TrainerCallback):
      def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        holder._left -= 1
        if not holder._left:
          if device.type == 'cuda':
            torch.cuda.synchronize()
          holder._done.release()
          holder._go.acquire()
          control.should_training_stop = holder._leave

    class Ready(data_collator.SentenceTransformerDataCollator):
      def __call__(self, _: Any) -> dict[str, torch.Tensor]:
        return dict(tokens)

    class Trainer(sentence_transformers.SentenceTransformerTrainer):
      def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        found = super().compute_loss(*arguments, **options)
        holder._loss = found.detach()
        return found

    trainer = Trainer(
      net,
      settings,
      rows,
      loss=losses.MultipleNegativesRankingLoss(net, scale=1 / TEMPERATURE),
      data_collator=Ready(net.preprocess),
      callbacks=[Turns()],
    )
    clip = trainer.accelerator.clip_grad_norm_

    def noted(*arguments: Any, **options: Any) -> Any:
      self._norm = clip(*arguments, **options)
      return self._norm

    trainer.accelerator.clip_grad_norm_ = noted
    self._thread = threading.Thread(target=self._run, args=(trainer,), daemon=True)

  def _run(self, trainer: Any) -> None:
    try:
      trainer.train()
    except BaseException as error:  # the main thread raises it
      self._error = error
    self._done.release()

  def first_step(self) -> tuple[float, float]:
    """Loss and norm of the gradient."""
    self(1)
    return float(self._loss), float(self._norm)

  def __call__(self, steps: int) -> None:
    self._left = steps
    if self._thread.is_alive():
      self._go.release()
    else:
      self._thread.start()
    self._done.acquire()
    if self._error is not None:
      raise RuntimeError("sentence-transformers' trainer failed") from self._error

  def close(self) -> None:
    self._leave = True
    self._go.release()
    self._thread.join()


if __name__ == '__main__':
  main()
