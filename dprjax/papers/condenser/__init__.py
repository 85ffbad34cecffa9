"""Pretraining of a backbone: masked LM, ICT, Condenser, coCondenser and RIP.

    Gao and Callan 2021   Condenser: a Pre-training Architecture for Dense Retrieval
    Gao and Callan 2022   Unsupervised Corpus Aware Language Model Pre-training for Dense Passage
                          Retrieval (coCondenser)
    Tang et al. 2022      DPTDR, section 3.2: retrieval-oriented intermediate pretraining (RIP)
    Lee et al. 2019       Latent Retrieval for Weakly Supervised Open Domain QA (ICT)

One loss has up to three terms, over one or two texts (views) of each passage:

    L = mlm_weight (L_late + L_head) + contrast_weight L_contrast

    L_late      mean over masked tokens t of CE(W h_t, x_t): h, the states of the last layer
                (Condenser Eq. 10; here ``late`` of ``encoder.encode_early_late``)
    L_head      mean over masked tokens t of CE(W h^cd_t, x_t) (Eq. 9), where
                h^cd = head([h^late_first ; h^early_others]) (Eq. 8): ``head/condenser``,
                config.pretrain.head_layers new layers, early states of layer skip_from
    L_contrast  mean over the 2m texts i of m passages of
                -log( exp(s_i . s_i') / sum over j != i of exp(s_i . s_j) ): ``nt_xent``,
                i' the sibling of i (DPTDR Eq. 4, coCondenser Eq. 6). For ICT the m sentences score
                the m remainders: ``info_nce``
    W           the masked-LM head, tied to the word embeddings: ``head/mlm``
    s           the vector of a text, pooled as config.pooling says

    method       config                      views      L_late  L_head  L_contrast
    masked LM    condenser.py:mlm            one        x
    Condenser    condenser.py:condenser      one        x       x
    coCondenser  condenser.py:cocondenser    siblings   x       x       x
    RIP          rip.py                      siblings   x               x
    ICT          condenser.py:ict            ict                        x

The contrast sees all texts of an update, on all devices and chunks.

Read in this order:

    segments.py        documents of files, cut into passages of whole sentences, on disk
    views.py           the texts of a batch
    losses.py          masked tokens, in whole words; L_late, L_head and L_contrast
    pretrain.py        the method: loss, data and export

docs/pretraining.md has the recipes and what we measured.
"""
