"""Small data sets."""

from dprjax.text.qrels import write_dataset


def write(folder, corpus, queries, **judged):
  """A BEIR folder of texts by id and, for each split, the relevant passages by query."""
  passages, asked = (
    [{'_id': id_, 'text': text} for id_, text in texts.items()] for texts in (corpus, queries)
  )
  qrels = {
    split: {query: dict.fromkeys(found, 1) for query, found in relevant.items()}
    for split, relevant in judged.items()
  }
  write_dataset(folder, passages, asked, qrels)
  return folder
