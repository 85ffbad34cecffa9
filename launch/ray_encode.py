"""Encodes Parquet files on the machines of a Ray cluster, with Ray Data; goes on after a stop.

    pip install 'ray[data]'        # where this runs, and on the workers, beside dprjax
    python launch/ray_encode.py --input=/shared/corpus --out=/shared/emb --backbone=/shared/model
        [--prompt=/shared/mine.npz] [--side=passage] [--workers=8] [--cpus=4 | --gpus=1]

--input is a Parquet file, or a folder of them, with the columns ``id`` and ``text`` (--id and
--text name others). --out/vectors gets Parquet files with the ids and ``vector`` (fixed-size list
of float32), which bulk loaders of engines read. Each worker loads the backbone once and calls
`Encoder.encode` for a batch. Ids that are written are noted in --out/checkpoint: the same command
leaves them out.
"""

import argparse
import os
import pathlib


class Encode:
  """A worker: the backbone and the prompt, loaded once."""

  def __init__(self, args: argparse.Namespace):
    from dprjax.encoding.text_encoder import Encoder

    self.args = args
    self.encoder = Encoder.load(args.backbone, args.prompt or None)

  def __call__(self, batch):
    import pyarrow as pa

    texts = batch[self.args.text].to_pylist()
    vectors = self.encoder.encode(texts, self.args.side)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    return pa.table({self.args.id: batch[self.args.id], 'vector': column})


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name in ('input', 'out', 'backbone'):
    parser.add_argument(f'--{name}', required=True)
  parser.add_argument('--prompt', default='')
  parser.add_argument('--side', default='passage', choices=('query', 'passage'))
  parser.add_argument('--id', default='id')
  parser.add_argument('--text', default='text')
  parser.add_argument('--batch', type=int, default=1024, help='rows that a worker takes at a time')
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--cpus', type=float, default=1, help='of a worker')
  parser.add_argument('--gpus', type=float, default=0, help='of a worker')
  args = parser.parse_args()

  import ray
  from ray.data.checkpoint import CheckpointConfig

  ray.init(address=os.environ.get('RAY_ADDRESS'), log_to_driver=False)
  context = ray.data.DataContext.get_current()
  context.checkpoint_config = CheckpointConfig(
    id_column=args.id,
    checkpoint_path=str(pathlib.Path(args.out, 'checkpoint')),
    delete_checkpoint_on_success=False,
  )
  rows = ray.data.read_parquet(args.input).select_columns([args.id, args.text])
  rows.map_batches(
    Encode,
    fn_constructor_args=(args,),
    batch_format='pyarrow',
    batch_size=args.batch,
    num_cpus=args.cpus,
    num_gpus=args.gpus,
    compute=ray.data.ActorPoolStrategy(size=args.workers),
  ).write_parquet(str(pathlib.Path(args.out, 'vectors')))


if __name__ == '__main__':
  main()
