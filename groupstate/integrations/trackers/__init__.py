"""Experiment trackers, for `open_run(trackers=[...])`: W&B, TensorBoard, MLflow, and a file of JSON lines.

Importing this is cheap. A tracker's package is imported when the tracker is made, and what it opens (a run at a server,
a file) is opened when the run that it is for is opened.
"""

from groupstate.integrations.trackers.json_lines import JsonLines
from groupstate.integrations.trackers.mlflow import MLflow
from groupstate.integrations.trackers.tensorboard import TensorBoard
from groupstate.integrations.trackers.wandb import WandB
from groupstate.runtime.tracking import Tracker, TrackerState

__all__ = ["JsonLines", "MLflow", "TensorBoard", "Tracker", "TrackerState", "WandB"]
