"""Topic-DPR: a prompt for each topic of a corpus.

    Xiao, Li and Chen 2023   Topic-DPR: Topic-based Prompts for Dense Passage Retrieval

A document i has a title (query q_i), an abstract (passage p_i) and a set of categories C_i. A topic
model gives each text its topic, and the text is encoded with the prompt of this topic. Documents of
the batch with a common category are positives z of each other, all others are negatives j.

    theta(i)   distribution over topics of a text (Eq. 1): ``Topics.distribution``; the largest
               share chooses the prompt: ``Topics.assign``
    P(k)       the prompt of topic k: embeddings of its top words through an MLP with a residual
               connection, and M(P(k)), the keys and values of every layer (Eq. 2): ``topic.expand``
    rho        |C_i n C_z| / |C_i u C_z|, the weight of a positive (Eq. 6, misprinted in the paper):
               ``topic_losses.jaccard``
    gamma      config.temperature; s is the cosine

    query-query (Eq. 3), query-passage (Eq. 4): ``topic_losses.document_losses``
      -1/m sum_z rho(i, z) log( e^(s(i,z)/gamma) / (e^(s(i,z)/gamma) + sum_j e^(s(i,j)/gamma)) )

    topic-topic (Eq. 5): ``topic_losses.topic_topic_loss``
      1 / ((K - 1) N^2) sum_{z != k} sum_{i,j} max(margin - s(p_i^k, p_j^k) + s(p_i^k, p_j^z), 0)

    total (Eq. 7): (1 - 2 alpha) query-passage + alpha query-query + alpha topic-topic, with
      config.topics.alpha and config.topics.margin

Read in this order:

    papers.py          command: folders of queries and passages from an arXiv file
    topics.py          command: finds the topics of a corpus
    topic_models.py    hLDA and LDA as one model of words
    topic.py           the adapter: P(k) and M
    topic_losses.py    Eqs. 3 to 6
    topic_dpr.py       the method: Eq. 7, batches with categories, export

docs/topic-dpr.md says what the paper leaves open and what we chose; configs/topic_dpr.py has the
recipes, the baselines of the paper among them.
"""
