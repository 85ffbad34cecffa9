"""Command-line options of benchmarks, with defaults for a processor and for an accelerator."""

import argparse

import jax

import made
from dprjax.base import flags


def parser(description: str | None, **numbers: int | tuple[int, int]) -> argparse.ArgumentParser:
  """A parser with a flag for each number: its default, or those of a processor and an accelerator.

  The backend of JAX starts only where there are two defaults.
  """
  made_parser = argparse.ArgumentParser(
    description=description, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name, default in numbers.items():
    value = default if isinstance(default, int) else default[accelerated()]
    made_parser.add_argument(f'--{name}', type=flags.whole(), default=value)
  return made_parser


def accelerated() -> bool:
  return jax.default_backend() != 'cpu'


def add_dtype(parser: argparse.ArgumentParser) -> None:
  usual = 'bfloat16' if accelerated() else 'float32'
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default=usual)


def add_size(parser: argparse.ArgumentParser) -> None:
  usual = 'large' if accelerated() else 'minilm'
  parser.add_argument('--size', choices=sorted(made.SHAPES), default=usual)


def case(text: str) -> tuple[int, int, int]:
  """Three numbers separated by commas, for ``type`` of argparse."""
  first, second, third = (flags.whole()(part) for part in text.split(','))
  return first, second, third
