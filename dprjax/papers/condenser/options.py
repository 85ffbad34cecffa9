"""Options of ``config.method = 'pretrain'``; ``config.data.dir`` lists files and folders."""

import types

import ml_collections

from dprjax.training.options import SET, choice, lengths, number, switch, text, whole


def local(c: ml_collections.ConfigDict) -> None:
  c.pretrain.max_length, c.pretrain.span_length, c.pretrain.passage_length = 32, 16, 64


def table() -> types.SimpleNamespace:
  c = types.SimpleNamespace()
  c.pretrain = types.SimpleNamespace()
  # texts of a passage: 'one'; 'siblings', two units; 'ict', a sentence and the rest
  c.pretrain.views = choice('one', 'siblings', 'ict')
  # of siblings: 'sentence' (RIP) or 'span' (coCondenser); DPTDR Table 7 calls both coCondenser
  c.pretrain.unit = choice('sentence', 'span')
  c.pretrain.span_length = whole(64, least=1, most=8192)  # most tokens of a span
  c.pretrain.max_length = whole(128, least=3, most=8192)  # tokens of a text, with special ones
  # padded lengths of batches
  c.pretrain.buckets = lengths(32, 64, 96, 128, 192, 256, 384, 512)
  # documents are cut into passages of whole sentences, up to this many tokens
  c.pretrain.passage_length = whole(256, least=5, most=10**6)
  c.pretrain.language = text('en')  # whose rules split sentences
  # fraction of tokens masked, in whole words
  c.pretrain.mask_rate = number(0.15, above=0, below=1)
  # weight of the masked-token losses; 0: none
  c.pretrain.mlm_weight = number(1.0, least=0, most=1e6)
  # whether the last layer has a masked-token loss; False: only the Condenser head
  c.pretrain.late_mlm = switch(True)
  # weight of the contrastive loss, if a passage has two texts
  c.pretrain.contrast_weight = number(1.0, least=0, most=1e6)
  # layers of the Condenser head; 0: no head
  c.pretrain.head_layers = whole(0, least=0, most=100).only(pretrain__mlm_weight=SET)
  # the layer that feeds the Condenser head; 0: L // 2
  c.pretrain.skip_from = whole(0, least=0, most=1000)
  return c
