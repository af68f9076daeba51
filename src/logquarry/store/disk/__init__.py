"""What every part of a store stands on: the disk, threads, health, who may write."""
