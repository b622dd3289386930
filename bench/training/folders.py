"""Where the data of the experiments lie and where their results go."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("FASTSIM_DATA", ROOT / "../shared/data")).resolve()
RESULTS = ROOT / "bench/results/training"
