"""Unified negative mining (UNM) of DPTDR, section 3.3, as one command.

    Tang et al. 2022   DPTDR: Deep Prompt Tuning for Dense Passage Retrieval

Negatives of several retrievers train the next one, and a cross-encoder removes those that may be
relevant:

    1  BM25 ranks the training queries; a first retriever trains on its negatives
    2  the un-denoised pool: what BM25 and this retriever rank high, without the positives
    3  a cross-encoder trains on samples of the pool; the denoised pool has the candidates to which
       it gives a probability of relevance below config.threshold
    4  the last retriever trains on config.mix of both pools and of random passages

Mining itself is in the core (``retrieval.negatives``), and so are the methods that train (``dpr``
and ``cross_encoder``). In ``pipeline.py``, `Pipeline` has the order of the stages; `Stages` runs a
command only if its input changed. configs/unm.py has the options; docs/mining.md the rules.
"""
