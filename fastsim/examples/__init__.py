"""Scripts to copy: each trains a few steps on the demo's sentences, and a test runs it.

    python -m fastsim.examples.NAME [MODEL]

| script | what it shows |
| --- | --- |
| `sentence_transformers_trainer` | the trainer of sentence-transformers with a drop-in loss |
| `transformers_trainer` | the Trainer of transformers, a model of your own, a learnt temperature |
| `lightning_module` | a LightningModule with a symmetric loss |
| `open_clip_loop` | open_clip's training step with its losses swapped |
| `grad_cache` | a plain loop, batches of any size, one process or several (torchrun) |
| `two_towers` | a recommender with dot products and the logQ correction |
| `late_interaction` | token vectors and MaxSim, as ColBERT trains them |
| `mine_and_retrain` | hard negatives from the model's own mistakes |

MODEL is a folder or a name on the hub.
"""
