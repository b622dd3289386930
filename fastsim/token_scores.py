"""MaxSim: the late-interaction score of a query and a document, each a set of token embeddings.

    S_bc = sum_{q in query b} max_{d in document c} q . d

Source: Khattab and Zaharia 2020, "ColBERT: Efficient and Effective Passage Search via
Contextualized Late Interaction over BERT", equation 3; for images Faysse et al. 2024, "ColPali:
Efficient Document Retrieval with Vision Language Models".
"""

from torch import Tensor

from fastsim.annotations import Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.checks import check_alike, check_flags, check_similarity
from fastsim.engine.max_sim import max_sim_scores
from fastsim.tokens import Tokens, check_mask, check_offsets, check_tokens


@embeddings_in_autocast("queries", "documents")
def max_sim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    similarity: Similarity = "cosine",
    average: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Computes the late-interaction scores of queries and documents, differentiable.

    No (B, C, Lq, Ld) tensor is held. For the gradient it keeps only which token each query token
    chose in each document, in 2 or 4 bytes. For one vector per text use `cosine_similarity`; for
    training, `losses.late_interaction` is InfoNCE over these scores.

    Args:
        queries: token embeddings (B, Lq, D), or (P, D) with `query_offsets`.
        documents: token embeddings (C, Ld, D), or (T, D) with `document_offsets`; or (B, N, Ld, D),
            N documents for each query, which are compared only with that query.
        query_mask: (B, Lq) or (P,) bool, False for padding; None: every row is a token.
        document_mask: (C, Ld), (T,) or (B, N, Ld) bool, likewise.
        query_offsets: (B + 1,) integers from 0 to P: query b has the rows from query_offsets[b] up
            to query_offsets[b + 1].
        document_offsets: (C + 1,) integers from 0 to T, likewise; not with documents (B, N, Ld, D).
        similarity: "cosine", or "dot" for dot products, for example of embeddings of norm 1.
        average: whether to average over the tokens of a query instead of summing.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        Scores (B, C), or (B, N) for documents (B, N, Ld, D); float64 for float64, else float32. If
        tokens of a document are equal, the first one gets the gradient. A query without tokens has
        score 0 with every document; a document without tokens has score -inf with every other
        query. Neither has a gradient.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> queries = torch.eye(2)[None]
        >>> documents = torch.stack([torch.eye(2), torch.ones(2, 2)])
        >>> fastsim.max_sim(queries, documents)
        tensor([[2.0000, 1.4142]])
    """
    has_4d_documents = isinstance(documents, Tensor) and documents.dim() == 4
    own_documents = has_4d_documents and document_offsets is None
    check_tokens("queries", queries, query_offsets)
    check_tokens("documents", documents, document_offsets, dimensions=4 if own_documents else 3)
    check_alike("documents", documents, "queries", queries)
    check_mask("query_mask", query_mask, "queries", queries)
    check_mask("document_mask", document_mask, "documents", documents)
    check_similarity(similarity)
    check_flags(average=average)
    query_offsets = check_offsets("query_offsets", query_offsets, "queries", queries)
    document_offsets = check_offsets("document_offsets", document_offsets, "documents", documents)
    if own_documents:
        if query_offsets is not None:
            raise ValueError(
                "query_offsets: wanted None, as documents (B, N, Ld, D) come with queries"
                f" (B, Lq, D), got a tensor {tuple(query_offsets.shape)}"
            )
        if documents.shape[0] != queries.shape[0]:
            raise ValueError(
                f"documents: wanted those of {queries.shape[0]} queries, (B, N, Ld, D),"
                f" got shape {tuple(documents.shape)}"
            )
        documents = documents.flatten(0, 1)
    tensors = queries, documents, query_mask, document_mask, query_offsets, document_offsets
    chosen = pick(backend, *tensors, kind="max_sim")
    x = Tokens.of(queries, query_mask, query_offsets)
    y = Tokens.of(documents, document_mask, document_offsets)
    scores = max_sim_scores(x, y, similarity == "cosine", own_documents, chosen)
    return scores / x.kept().clamp(min=1)[:, None] if average else scores
