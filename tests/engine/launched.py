"""Joins whatever launched it and adds up the ranks: a script, one process a rank. Prints a line of JSON."""

import json
import sys

import torch
import torch.distributed as dist

import tonnage

job = tonnage.init_process_group(device="cpu", timeout=60)
total = torch.tensor([float(job.rank)])
if dist.is_initialized():
    dist.all_reduce(total)
    dist.destroy_process_group()
line = {"launcher": job.launcher, "rank": job.rank, "of": job.world_size, "local": job.local_rank}
sys.stdout.write(json.dumps({**line, "device": str(job.device), "total": total.item()}) + "\n")
