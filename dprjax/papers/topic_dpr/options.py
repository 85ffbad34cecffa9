"""Options of ``config.method = 'topic_dpr'``."""

import types

from dprjax.training.options import SET, number, switch, text, whole


def table() -> types.SimpleNamespace:
  c = types.SimpleNamespace()
  c.topics = types.SimpleNamespace()
  # topics.npz of dprjax.topics, with a prompt for each topic; 'hlda' or 'lda': find topics of the
  # training passages at the start; '': none
  c.topics.path = text('')
  c.topics.keep = whole(0, least=0, most=1000)  # number of topics, the largest; 0: all
  c.topics.alpha = number(0.1, least=0, below=0.5)  # of the query-query and topic-topic losses
  c.topics.margin = number(0.1, least=0, most=2)  # of the topic-topic loss
  # rows of a batch that the topic-topic loss encodes under every prompt; 0: all
  c.topics.batch = whole(0, least=0, most=2**20)
  c.topics.topic_topic = switch(True)  # use the topic-topic loss
  # tokens of topic words put before texts, in place of prompts; 0: none
  c.topics.words = whole(0, least=0, most=512).only(topics__path=SET, prompt__length=0)
  # control: random words for each document
  c.topics.random_words = switch(False).only(topics__words=SET)
  # control: random topics for documents, in proportion to the sizes of topics
  c.topics.random_topics = switch(False).only(topics__path=SET, topics__random_words=False)
  return c
