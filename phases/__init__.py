"""What an operator chooses: phases, ladders, backends and launch flags. Loads no torch."""

from .choices import Backend, CaptureDevice, Compiler, Phase, Startup
from .config import GraphConfig, PhaseConfig
from .flags import add_graph_flags, flag_table, graph_config_from_args
from .ladder import BucketLadder
from .resolve import Resolved, resolve

__all__ = [
    "Backend",
    "BucketLadder",
    "CaptureDevice",
    "Compiler",
    "GraphConfig",
    "Phase",
    "PhaseConfig",
    "Resolved",
    "Startup",
    "add_graph_flags",
    "flag_table",
    "graph_config_from_args",
    "resolve",
]
