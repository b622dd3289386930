"""The tables of training in bench/README.md, from bench/results/training (bench/report.py)."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "bench/results/training"
PARAPHRASES = ["average_precision_cosine", "accuracy_cosine"]
# Result file -> what it is and the metrics shown, of test data.
IMPROVED = {
    "demo": ("the demo's sentences, CoSENT", ["spearman_cosine"]),
    "stsb_cosent": ("STS-B scores, CoSENT, one epoch", ["spearman_cosine"]),
    "stsb_lora": ("STS-B scores, CoSENT, LoRA, a third of an epoch", ["spearman_cosine"]),
    "sick_cosent": ("SICK relatedness, CoSENT", ["spearman_cosine"]),
    "sick_classification": ("SICK entailment, classification (u; v; abs(u-v))", ["accuracy"]),
    "sick_pairs_info_nce": ("SICK entailed pairs, InfoNCE", ["recall@1", "mrr@10"]),
    "sick_pairs_full_triplet": ("SICK entailed pairs, full triplet", ["recall@1", "mrr@10"]),
    "sick_pairs_prompts": ("SICK entailed pairs, InfoNCE, prompts", ["recall@1", "mrr@10"]),
    "sick_retrieval_mined": (
        "SICK as a search, InfoNCE with mined negatives, prompts, LoRA",
        ["ndcg@10", "mrr@10"],
    ),
    "sick_groups_sup_con": ("SICK paraphrase groups, SupCon", PARAPHRASES),
    "sick_groups_nt_xent": ("SICK paraphrase groups, NT-Xent", PARAPHRASES),
    "sick_groups_multi_similarity": ("SICK paraphrase groups, multi-similarity", PARAPHRASES),
    "sick_groups_batch_hard_triplet": ("SICK paraphrase groups, batch-hard triplet", PARAPHRASES),
    "sick_groups_siglip": ("SICK paraphrase groups, SigLIP", PARAPHRASES),
    "sick_groups_cosent_matrix": ("SICK paraphrase groups, CoSENT matrix", PARAPHRASES),
    "sick_groups_matrix_cross_entropy": (
        "SICK paraphrase groups, matrix cross entropy",
        PARAPHRASES,
    ),
    "sick_groups_matrix_mse": ("SICK paraphrase groups, matrix MSE", PARAPHRASES),
}
CROSSED = {
    "cross_related_cosent": ("SICK relatedness, CoSENT on logits", "spearman"),
    "cross_related_cross_entropy": ("SICK relatedness, cross entropy", "spearman"),
    "cross_related_regression": ("SICK relatedness, regression", "spearman"),
    "cross_entailed_cosent": ("SICK entailed or not, CoSENT on logits", "accuracy"),
    "cross_entailed_cross_entropy": ("SICK entailed or not, cross entropy", "accuracy"),
}


def read(name):
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def percent(value):
    return f"{100 * value:.1f}"


def improved_table():
    """Metrics on test data before and after training."""
    lines = [
        "| trained on | steps | metric | before | after |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for name, (what, metrics) in IMPROVED.items():
        result = read(name)
        for metric in metrics if result else ():
            values = (percent(result[when][metric]) for when in ("before", "after"))
            lines.append(f"| {what} | {result['steps']} | {metric} | {' | '.join(values)} |")
    if baseline := read("stsb_sentence_transformers"):
        value = percent(baseline["after"]["spearman_cosine"])
        lines.append(
            f"| the same epoch by sentence-transformers' trainer | | spearman_cosine | | {value} |"
        )
    return "\n".join(lines)


def crossed_table():
    """Cross-encoders: CoSENT on the logits beside its baselines."""
    lines = ["| cross-encoder | steps | metric | value |", "| --- | ---: | --- | ---: |"]
    for name, (what, metric) in CROSSED.items():
        if result := read(name):
            value = percent(result["after"][metric])
            lines.append(f"| {what} | {result['steps']} | {metric} | {value} |")
    return "\n".join(lines)
