"""NIR-Prompt: one backbone for several matching tasks, told apart by a prompt in the input.

    Xu, Pang, Shen and Cheng 2023   NIR-Prompt: A Multi-task Generalized Neural Information
                                    Retrieval Training Framework

A task puts its texts into a template. Retriever-Prompt encodes queries and passages apart;
Reranker-Prompt reads a pair:

    [CLS] P1 text P2 [MASK] [SEP]                            vector: the state at [MASK] (Eq. 1)
    [CLS] P1 first [SEP] P2 second [SEP] P3 [MASK] [SEP]     score: logit(yes) - logit(no) at [MASK]

A slot P is words (manual), or learned vectors (continuous): a bidirectional LSTM and an MLP over
trained embeddings (Eq. 2), ``PromptEncoder``. Training has two stages:

    matching description (MDM)   the prompt of one task, the backbone frozen:  :mdm=TASK
    essential matching (EMM)     the backbone on all tasks, all prompts fixed: :emm

and a new task gets a weighted sum of the prompts of trained tasks (:adapt=TASK):
P_new = sum_k w_k P_k, ``prompt/NAME/weights`` and ``sources/NAME``.

    loss of the retriever   InfoNCE over the global batch, as ``training.dpr``
    loss of the reranker    -log P(word of the label at [MASK]) over the whole vocabulary
    batches                 config.arrangement: tasks in turn, in random order, balanced, or mixed

Read in this order:

    task_templates.py    templates of several tasks in one batch; the words of Tables 1 and 2
    adapter.py           the kind of adapter ``template``
    learned_tokens.py    learned vectors among the tokens, and their encoder, Eq. 2
    nir_prompt.py        both stages: parameters, prompts from files, sums, export
    nir_retriever.py     the method nir_retriever, and its fine-tuned baseline
    nir_reranker.py      the method nir_reranker, and its fine-tuned baseline
    multitask.py, mixture.py, pairs.py   the data of several tasks
    prompt_reranker.py   exported prompts of pairs

docs/nir-prompt.md says what the paper leaves open; configs/nir_retriever.py and
configs/nir_reranker.py have the recipes.
"""
