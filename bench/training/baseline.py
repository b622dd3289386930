"""sentence-transformers' own trainer under the settings of `fastsim train`: prints one JSON line.

Usage: python bench/training/baseline.py --train train.csv --test test.csv [--max-steps N] [--output
D]
"""

import argparse
import csv
import json

from datasets import Dataset
from scipy.stats import spearmanr
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch.nn.functional import cosine_similarity

from fastsim.encoders.model_files import model_folder
from fastsim.encoders.names import EMBEDDED


def read(path):
    with open(path, encoding="utf-8", newline="") as handle:
        first, second, score = zip(*csv.reader(handle), strict=True)
    return {"sentence1": first, "sentence2": second, "score": [float(value) for value in score]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", required=True)
    parser.add_argument("--test")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    model = SentenceTransformer(str(model_folder(EMBEDDED)), device="cpu")
    model.max_seq_length = 64
    arguments = SentenceTransformerTrainingArguments(
        output_dir=options.output,
        num_train_epochs=1,
        max_steps=options.max_steps,
        per_device_train_batch_size=32,
        learning_rate=5e-5,
        warmup_steps=0.1,
        seed=0,
        save_strategy="epoch",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(read(options.train)),
        loss=CoSENTLoss(model),
    )
    outcome = trainer.train()
    result = {"steps": outcome.global_step, "seconds": outcome.metrics["train_runtime"]}
    if options.test:
        test = read(options.test)
        u, v = (model.encode(list(test[c]), convert_to_tensor=True) for c in list(test)[:2])
        result["spearman_cosine"] = float(spearmanr(cosine_similarity(u, v), test["score"])[0])
    print("RESULT " + json.dumps(result))


main()
