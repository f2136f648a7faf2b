"""Runs a program under accelerate's FSDP2 and context parallelism in processes without accelerators, on gloo.

PYTHONPATH=tests:. python -m torch.distributed.run --nproc-per-node 2 tests/tools/fsdp_on_cpu.py PROGRAM ARGUMENTS
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate.state import PartialState
from tools.context_parallel_cases import use_fsdp_on_cpu

use_fsdp_on_cpu()
os.environ.update(ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_CP_SIZE=os.environ["WORLD_SIZE"])
prepare_backend = PartialState._prepare_backend


def start_group(*args):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return prepare_backend(*args)


PartialState._prepare_backend = start_group
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
