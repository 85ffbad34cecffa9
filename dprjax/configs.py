"""Lists the experiments that come with dprjax, for --config, and the folder that they lie in.

    python -m dprjax.configs

They go by these names in every folder that has no `configs/` of its own. Copy one to change it: a
config file is a few lines of Python, and `dprjax/runtime/knobs.py` explains every knob.
"""

import argparse
import ast
from collections.abc import Sequence

from dprjax.runtime import cli
from dprjax.runtime import config as configs

_WIDTH = 16
_GAP = '\n\n'


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(cli.Parser('configs', __doc__ or ''), _command, argv)


def _command(_: argparse.Namespace) -> None:
  folder = configs.shipped()
  for path in sorted(folder.glob('*.py')):
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ''
    print(f'configs/{path.name:{_WIDTH}}  {" ".join(text.partition(_GAP)[0].split())}')
  print(f'\nin {folder}\nThe first lines of each name its recipes: configs/NAME.py:RECIPE')


if __name__ == '__main__':
  main()
